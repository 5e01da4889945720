# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Errors for models that `accumulate` cannot train exactly."""

from __future__ import annotations

from typing import Any

import keras

from ..errors import CoupledSamplesError, InputError, OptimizerError
from .options import Options

# The methods that make an update; the second is of the JAX trainer.
OVERRIDES = ("train_step", "compute_loss_and_updates", "make_train_function")
LOOPS = {
    "tensorflow": "superbatch.tensorflow.Accumulator",
    "jax": "superbatch.jax.value_and_grad",
    "torch": "superbatch.torch.Accumulator",
}


def check_model(model: Any) -> None:
    """Refuse anything but a compiled Keras model with Keras' own train step.

    Raises:
        InputError: it is no Keras model, is not compiled, or has a train step of its own.
    """
    if not isinstance(model, keras.Model):
        raise InputError(
            f"accumulate() was given a {type(model).__module__}.{type(model).__qualname__}. Pass a "
            "keras.Model."
        )
    if not model.compiled:
        raise InputError(
            f"The model {model.name!r} is not compiled, so it has no loss and no optimizer. Call "
            "model.compile(...) first."
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
        CoupledSamplesError: the model has BatchNormalization in training, and ``batchnorm="error"``.
        InputError: a layer's forward depends on its forward before.
    """
    _check_forwards(model)
    if options.batchnorm == "per_microbatch":
        return
    names = [layer.name for layer in batchnorms(model)]
    if names:
        raise CoupledSamplesError(
            f"The model has BatchNormalization in training ({', '.join(names)}), which normalises each "
            "sample by its micro-batch, so micro-batches cannot give the gradient of the batch. Use "
            "GroupNormalization or LayerNormalization, freeze it (layer.trainable = False), or pass "
            'batchnorm="per_microbatch" to train with the statistics of micro-batches.'
        )


def _check_forwards(model: Any) -> None:
    """Refuse layers whose forward depends on their forward before, that of another micro-batch."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.SpectralNormalization):
            raise InputError(
                f"The model has SpectralNormalization ({layer.name}), which overwrites its weights in every "
                "forward, so the next micro-batch would see others. Take it out of the model, or train with "
                "whole batches."
            )
        if getattr(layer, "stateful", False):
            raise InputError(
                f"The model has a stateful layer ({layer.name}), whose state has one entry for each row of a "
                "batch, and a micro-batch has other rows. Pass stateful=False to the layer, or train with "
                "whole batches."
            )
    # One forward normalises by the averages that the one before it left. Averaging after the last one, as
    # batchnorm.py does with the moving statistics, would come too late. Old versions of Keras have no renorm.
    renormed = [layer.name for layer in batchnorms(model) if getattr(layer, "renorm", False)]
    if renormed:
        raise InputError(
            f"The model has BatchNormalization with renorm=True ({', '.join(renormed)}), which updates its "
            "averages in every forward and normalises by them, so the next micro-batch would see others. "
            "Pass renorm=False to the layer, freeze it (layer.trainable = False), or train with whole "
            "batches."
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
            f"The model {model.name!r} has no optimizer, so nothing would be updated. Compile it with one."
        )
    steps = optimizer.gradient_accumulation_steps
    if steps:
        raise OptimizerError(
            f"The optimizer has gradient_accumulation_steps={steps}, so it would make one update of several "
            "batches, each of which is a whole batch here. Leave gradient_accumulation_steps out."
        )
