# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""`accumulate`: a model whose batches of `fit` are processed in micro-batches."""

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
    """Return the model, with every batch of `fit` processed in micro-batches: one batch is one update.

    With the mean ``l_ij`` of the j-th loss over micro-batch i, which counts ``w_ij`` (rows, unmasked tokens,
    a sum of sample weights: what Keras divides this loss by), its factor ``f_j`` in `compile`, and
    regularizers R::

        L = sum_j f_j sum_i (w_ij / W_j) l_ij + R,     W_j = sum_i w_ij

    That is the loss of the whole batch, and the optimizer is called once with its gradient. What is defined
    per update therefore stays as it is: schedules, clipping, moving averages of weights, constraints,
    callbacks, `steps_per_epoch`. Metrics are updated per micro-batch: the same sums, if they are of samples.

    The returned model is a second object of (a subclass of) the same class on the same layers, weights,
    optimizer and metrics, compiled as the first was. The first is not changed, and trains as before. What the
    returned model saves is a model of the first one's class.

    Args:
        model: a compiled `keras.Model`: functional, sequential or subclassed, on the backend tensorflow, jax
            or torch. Its class may override `compute_loss`, `compute_metrics` and `call`, but not
            `train_step`.
        microbatch_size: most rows of a micro-batch. A batch is cut near-equally, whatever its size.
        loss_weight: for losses that return one number, of which Keras does not know what it was divided by,
            and for an overridden `compute_loss`: a function ``(x, y, sample_weight) -> scalar`` of a
            micro-batch.
        batchnorm: what to do about BatchNormalization in training, which normalises by the micro-batch:
            ``"error"``, or ``"per_microbatch"``: accept that. Its moving statistics then make one step for
            each update, with mean and variance over all rows of the batch.
        nonfinite: ``"propagate"`` NaN and infinity; or ``"skip_microbatch"``: leave a micro-batch and its
            weight out if its loss or gradient is not finite.
        check: whether a few rows of the first batch are evaluated at once and in parts, before it is trained
            on: layers and losses that couple rows, and weights that do not fit the loss, are errors then.

    Returns:
        The model to call `fit` and `train_on_batch` of. Where a batch counts nothing (W is 0), it makes no
        update, and does not count in the mean loss of its epoch.

    Raises:
        InputError: an option is none, or the model is not compiled, has a `train_step` of its own, or a layer
            that is stateful or a SpectralNormalization; when training begins: a forward changes variables
            of layers, or the first model was compiled again.
        CoupledSamplesError: there is a BatchNormalization in training; when training begins: a layer or a
            loss couples rows.
        OptimizerError: the optimizer accumulates by itself.
        LossSpecError: when training begins: a loss returns one number and `loss_weight` is missing (or is
            given and not needed, or not the divisor of the loss), or its mean cannot be put together from
            micro-batches.
        SplitError: when training begins: arrays of a batch differ in length, are sparse or ragged.

    Examples:
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.Adam(0.1), loss="mse")
        >>> x = keras.ops.ones((100, 1))
        >>> history = accumulate(model, microbatch_size=8).fit(x, x, batch_size=50, verbose=0)
        >>> int(model.optimizer.iterations)  # 2 batches of 50, in micro-batches of 7 and 8
        2

    See Also:
        https://keras.io/guides/custom_train_step_in_tensorflow/ on what a train step is.
    """
    options = check_options(Options(microbatch_size, loss_weight, batchnorm, nonfinite, check))
    model = plain(model) if is_accumulating(model) else model
    refusals.check_model(model)
    refusals.check_optimizer(model)
    refusals.check_layers(model, options)
    step = importlib.import_module(_step_of(keras.backend.backend()), __package__)
    twin = sharing.on_same_layers(sharing.subclass(type(model), methods(type(model), step)), model)
    vars(twin)[OPTIONS] = options
    vars(twin)[survey.PLANS] = {}
    vars(twin)[recompiling.SOURCE] = recompiling.source_of(model)
    return twin


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
        refusals.check_optimizer(self)
        refusals.check_layers(self, options)
        return step.train_step(self, options, *arguments)

    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self).save(*args, **kwargs)

    def reduce(self: Any) -> Any:
        return plain(self).__reduce__()

    def compile_again(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.compile(self, *args, **kwargs)
        recompiling.note(self)

    def make_train_function(self: Any, force: bool = False) -> Any:
        recompiling.check(self)
        before = self.train_function
        cls.make_train_function(self, force)
        if self.train_function is not before:
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
    """Return Keras' function of a batch as the backend needs it, with the check of the first batch."""
    options = vars(model)[OPTIONS]
    function = step.train_function(function) if hasattr(step, "train_function") else function
    return first_check.checked(model, options, step, function)


def is_accumulating(model: Any) -> bool:
    """Return True if `accumulate` returned the model."""
    return OPTIONS in getattr(model, "__dict__", {})


def plain(model: Any) -> Any:
    """The model of the user's class on the same layers, without accumulation."""
    other = sharing.on_same_layers(getattr(type(model), ORIGINAL), model)
    for name in (OPTIONS, survey.PLANS, recompiling.SOURCE):
        vars(other).pop(name)
    return other
