# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""`accumulate`: train a Keras model with `fit` in micro-batches."""

from __future__ import annotations

import importlib
from typing import Any

import keras

from ..errors import InputError
from . import first_check, recompiling, refusals, sharing, survey
from .options import BatchNorm, LossWeight, NonFinite, Options
from .options import check as check_options

ORIGINAL = "_superbatch_original"
OPTIONS = "_superbatch_options"
STEPS = {"tensorflow": ".step_tensorflow", "jax": ".step_jax", "torch": ".step_torch"}


def accumulate(
    model: Any,
    *,
    microbatch_size: int,
    loss_weight: LossWeight | None = None,
    batchnorm: BatchNorm = "error",
    nonfinite: NonFinite = "propagate",
    check: bool = True,
) -> Any:
    """Return a model whose `fit` processes each batch in micro-batches and makes one update per batch.

    ``l_ij`` is the mean of loss j over micro-batch i, and ``w_ij`` the divisor of this mean in Keras: rows,
    unmasked tokens or a sum of sample weights. ``f_j`` is the entry of the loss in `loss_weights` of
    `compile`, and R are the regularizers::

        L = sum_j f_j sum_i (w_ij / W_j) l_ij + R,     W_j = sum_i w_ij

    That is the loss of the whole batch, and the optimizer is called once with its gradient. Schedules,
    clipping, moving averages of weights, constraints, callbacks and `steps_per_epoch` therefore work per
    update, as before. Metrics are updated per micro-batch, which is exact for metrics that are sums over
    samples.

    The returned model is a new object, of a subclass of the model's class. It shares layers, weights,
    optimizer and metrics with `model`, and has the arguments of its `compile`. `model` itself is not changed.
    A saved file of the returned model loads as a model of the original class.

    Args:
        model: a compiled `keras.Model`: functional, sequential or subclassed, on the backend tensorflow, jax
            or torch. Its class may override `compute_loss`, `compute_metrics` and `call`, but not
            `train_step`.
        microbatch_size: the largest number of rows of a micro-batch. Micro-batches of a batch differ by at
            most one row.
        loss_weight: a function ``(x, y, sample_weight) -> scalar`` that returns the divisor of the loss of a
            micro-batch. Needed for an overridden `compute_loss`, and for a loss that returns one number,
            whose divisor Keras does not know.
        batchnorm: BatchNormalization in training normalises by the statistics of the micro-batch.
            ``"error"`` raises; ``"per_microbatch"`` trains with these statistics, and updates the moving
            statistics once per update, with mean and variance over all rows of the batch.
        nonfinite: ``"propagate"`` NaN and infinity to the update; or ``"skip_microbatch"``: leave a
            micro-batch and its weight out if its loss or gradient is not finite.
        check: before training, evaluate a few rows of the first batch in one piece and in parts, and compare.
            Raise if a layer or a loss couples rows, or a weight does not fit its loss.

    Returns:
        The model on which to call `fit` and `train_on_batch`. A batch of weight 0 (all W are 0) does not
        count in the mean loss of its epoch and makes no update; on several replicas it makes an update with
        a gradient of 0.

    Raises:
        InputError: an option has a wrong value; the model is not compiled or has a `train_step` of its own;
            or a layer is not supported: a stateful layer, SpectralNormalization, BatchNormalization with
            ``renorm=True``, or with a mask under ``batchnorm="per_microbatch"``. When training begins: a
            forward changes variables of layers, or `model` was compiled again.
        CoupledSamplesError: the model has BatchNormalization in training; when training begins: a layer or
            a loss couples rows.
        OptimizerError: the optimizer accumulates by itself.
        LossSpecError: when training begins: a loss returns one number and `loss_weight` is missing;
            `loss_weight` is not needed, or is not the divisor of the loss; or no weighted sum of the
            losses of micro-batches is the loss of the batch.
        SplitError: when training begins: arrays of a batch differ in length, are sparse or ragged.

    Examples:
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.Adam(0.1), loss="mse")
        >>> x = keras.ops.ones((100, 1))
        >>> history = accumulate(model, microbatch_size=8).fit(x, x, batch_size=50, verbose=0)
        >>> int(model.optimizer.iterations)  # 2 batches of 50, in micro-batches of 7 and 8
        2

    See Also:
        https://keras.io/guides/custom_train_step_in_tensorflow/ on train steps.
    """
    options = check_options(Options(microbatch_size, loss_weight, batchnorm, nonfinite, check))
    model = plain(model) if is_accumulating(model) else model
    refusals.check_model(model)
    refusals.check_optimizer(model)
    refusals.check_layers(model, options)
    step = importlib.import_module(_step_of(keras.backend.backend()), __package__)
    accumulating = sharing.on_same_layers(sharing.subclass(type(model), methods(type(model), step)), model)
    # By `vars`, as Keras' own __setattr__ would track these objects as part of the model.
    vars(accumulating)[OPTIONS] = options
    vars(accumulating)[survey.PLANS] = {}
    vars(accumulating)[recompiling.SOURCE] = recompiling.source_of(model)
    return accumulating


def _step_of(backend: str) -> str:
    if backend in STEPS:
        return STEPS[backend]
    raise InputError(
        f"Keras' backend {backend} cannot train. Set KERAS_BACKEND to tensorflow, jax or torch before Keras "
        "is imported."
    )


def methods(cls: type, step: Any) -> dict[str, Any]:
    """Return the methods that an accumulating model adds; `cls` is the user's class."""

    def new(_: type, *args: Any, **kwargs: Any) -> Any:
        return cls(*args, **kwargs)  # `from_config` and `clone_model` make a model of the user's class

    def train_step(self: Any, *arguments: Any) -> Any:
        options = vars(self)[OPTIONS]
        # Again: a new compile() may have another optimizer, and layers may have been unfrozen.
        refusals.check_optimizer(self)
        refusals.check_layers(self, options)
        return step.train_step(self, options, *arguments)

    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self).save(*args, **kwargs)

    def reduce(self: Any) -> Any:
        return plain(self).__reduce__()

    def compile_again(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.compile(self, *args, **kwargs)
        recompiling.accept_current(self)

    def make_train_function(self: Any, force: bool = False) -> Any:
        recompiling.check(self)
        before = self.train_function
        cls.make_train_function(self, force)
        if self.train_function is not before:  # Keras keeps a function that is still valid
            self.train_function = _prepared(self, step, self.train_function)
        return self.train_function

    def build_before_tracing(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        step.build(self, iterator, data_batch)

    return {
        "__new__": new,
        "train_step": train_step,
        "compile": compile_again,
        "make_train_function": make_train_function,
        "save": save,
        "__reduce__": reduce,
        "_maybe_symbolic_build": build_before_tracing,  # of the TensorFlow trainer
        ORIGINAL: cls,
    }


def _prepared(model: Any, step: Any, function: Any) -> Any:
    """Wrap Keras' train function: adapt it to the backend, and check the first batch before it runs."""
    options = vars(model)[OPTIONS]
    function = step.train_function(function) if hasattr(step, "train_function") else function
    return first_check.checked(model, options, step, function)


def is_accumulating(model: Any) -> bool:
    """Return True if `accumulate` returned the model."""
    return OPTIONS in getattr(model, "__dict__", {})


def plain(model: Any) -> Any:
    """Return a model of the user's class on the same layers, without accumulation."""
    other = sharing.on_same_layers(getattr(type(model), ORIGINAL), model)
    for name in (OPTIONS, survey.PLANS, recompiling.SOURCE):
        vars(other).pop(name)
    return other
