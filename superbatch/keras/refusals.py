# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Models that cannot be accumulated exactly, or not by us: each text says what to do."""

from __future__ import annotations

from typing import Any

import keras

from ..errors import CoupledSamplesError, InputError, OptimizerError, explain
from .options import Options

# The methods that make an update; the second is of the JAX trainer.
OVERRIDES = ("train_step", "compute_loss_and_updates", "make_train_function")
LOOPS = {
    "tensorflow": "superbatch.tensorflow.Accumulator",
    "jax": "superbatch.jax.value_and_grad",
    "torch": "superbatch.torch.Accumulator",
}


def check_model(model: Any) -> None:
    """Refuse what is no compiled Keras model, and a model with a train step of its own.

    Raises:
        InputError: it is such.
    """
    if not isinstance(model, keras.Model):
        raise InputError(
            explain(
                f"a {type(model).__module__}.{type(model).__qualname__}",
                "only a keras.Model has fit",
                "pass a keras.Model",
            )
        )
    if not model.compiled:
        raise InputError(
            explain(
                f"the model {model.name!r}, which is not compiled",
                "the update is that of its compiled loss and optimizer",
                "call model.compile(...) first",
            )
        )
    for method in OVERRIDES:
        if method in vars(model) or getattr(type(model), method, None) is not getattr(
            keras.Model, method, None
        ):
            raise InputError(
                f"The model {model.name!r} has a {method} of its own, which accumulate would replace. "
                "Override compute_loss instead, and pass loss_weight=; or keep your loop and accumulate in "
                f"it, with {LOOPS[keras.backend.backend()]}."
            )


def check_layers(model: Any, options: Options) -> None:
    """Refuse layers that couple the samples of a batch, or that change themselves in each forward.

    Raises:
        CoupledSamplesError: there is a BatchNormalization in training, and nothing was said about it.
        InputError: there is a layer whose forward depends on the one before it.
    """
    _check_forwards(model)
    if options.batchnorm == "per_microbatch":
        return
    names = [layer.name for layer in batchnorms(model)]
    if names:
        raise CoupledSamplesError(
            explain(
                f"a model with BatchNormalization in training: {', '.join(names)}",
                "it normalises each sample by its micro-batch, so that micro-batches cannot give the "
                "gradient of the batch",
                "use GroupNormalization or LayerNormalization, freeze it (layer.trainable = False), or pass "
                'batchnorm="per_microbatch" to train with the statistics of micro-batches',
            )
        )


def _check_forwards(model: Any) -> None:
    """Refuse layers of which k micro-batches are k forwards, each from where the one before it ended."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.SpectralNormalization):
            raise InputError(
                explain(
                    f"a model with SpectralNormalization: {layer.name}",
                    "every forward overwrites its weights: the next micro-batch would see others",
                    "take it out of the model, or train with whole batches",
                )
            )
        if getattr(layer, "stateful", False):
            raise InputError(
                explain(
                    f"a model with a stateful layer: {layer.name}",
                    "its state has one entry for each row of a batch, and a micro-batch has other rows",
                    "pass stateful=False to the layer, or train with whole batches",
                )
            )


def batchnorms(model: Any) -> list[Any]:
    """The layers that normalise by the batch they see, and are not frozen."""
    return [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    ]


def check_optimizer(model: Any) -> None:
    """Refuse to accumulate twice.

    Raises:
        OptimizerError: the model's optimizer accumulates by itself.
    """
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if optimizer is None:
        raise OptimizerError(
            explain(
                f"the model {model.name!r} without an optimizer", "nothing would be updated", "compile it"
            )
        )
    steps = optimizer.gradient_accumulation_steps
    if steps:
        raise OptimizerError(
            explain(
                f"an optimizer with gradient_accumulation_steps={steps}",
                "it would make one update of several batches, each of which is a whole batch here",
                "leave gradient_accumulation_steps out",
            )
        )
