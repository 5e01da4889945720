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

# Methods that make an update, of the TensorFlow, JAX and torch trainers. `accumulate` replaces them.
OVERRIDES = ("train_step", "compute_loss_and_updates", "make_train_function")
LOOPS = {  # for a user who keeps an own train step
    "tensorflow": "superbatch.tensorflow.Accumulator",
    "jax": "superbatch.jax.value_and_grad",
    "torch": "superbatch.torch.Accumulator",
}


def check_model(model: Any) -> None:
    """Raise unless the model is a compiled Keras model with Keras' own train step.

    Raises:
        InputError: it is not a Keras model, is not compiled, or overrides the train step.
    """
    if not isinstance(model, keras.Model):
        raise InputError(
            f"model is a {type(model).__module__}.{type(model).__qualname__}, not a Keras model. Pass a "
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
                f"The model {model.name!r} overrides {method}, which accumulate would replace. Override "
                "compute_loss instead and pass loss_weight=, or accumulate in your own loop with "
                f"{LOOPS[keras.backend.backend()]}."
            )


def check_layers(model: Any, options: Options) -> None:
    """Raise for layers that couple the samples of a batch, or that carry a state between forwards.

    Raises:
        CoupledSamplesError: the model has BatchNormalization in training, and ``batchnorm="error"``.
        InputError: the forward of a layer depends on its previous forward, or a BatchNormalization with
            ``batchnorm="per_microbatch"`` has a mask.
    """
    _check_forwards(model)
    if options.batchnorm == "per_microbatch":
        _check_masks(model)
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
    """Raise for layers whose forward depends on the previous forward, that of another micro-batch."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.SpectralNormalization):
            raise InputError(
                f"The model has SpectralNormalization ({layer.name}), which overwrites its weights in every "
                "forward, so the next micro-batch would use other weights. Take it out of the model, or "
                "train with whole batches."
            )
        if getattr(layer, "stateful", False):
            raise InputError(
                f"The model has a stateful layer ({layer.name}), whose state has one entry for each row of "
                "the batch, but a micro-batch has fewer rows. Pass stateful=False to the layer, or train "
                "with whole batches."
            )
    # A forward normalises by the averages that the previous forward updated. So it is not enough to correct
    # them after the last micro-batch, as batchnorm.py does. Old versions of Keras have no `renorm`.
    renormed = [layer.name for layer in batchnorms(model) if getattr(layer, "renorm", False)]
    if renormed:
        raise InputError(
            f"The model has BatchNormalization with renorm=True ({', '.join(renormed)}), which updates its "
            "averages in every forward and normalises by them, so micro-batches would use other averages "
            "than the whole batch. Pass renorm=False to the layer, freeze it (layer.trainable = False), or "
            "train with whole batches."
        )


def _check_masks(model: Any) -> None:
    """Raise for BatchNormalization with a mask, whose moments are means over the unmasked positions."""
    # `batchnorm.py` weights the moments of micro-batches by their rows. It cannot read the masks.
    masked = [layer.name for layer in batchnorms(model) if _has_mask(layer)]
    if masked:
        raise InputError(
            f"The model has BatchNormalization with a mask ({', '.join(masked)}), whose moving statistics "
            "would count rows instead of unmasked positions. Use LayerNormalization, freeze it "
            "(layer.trainable = False), or leave the mask out (mask_zero=False)."
        )


def _has_mask(layer: Any) -> bool:
    """Return whether a layer of a functional model gets a mask; False for a layer that it does not show."""
    try:
        output = layer.output
    except (AttributeError, ValueError):  # a layer of a model with its own `call`, or called several times
        return False
    # The layer passes its mask on; on its input Keras has removed it.
    return getattr(output, "_keras_mask", None) is not None


def batchnorms(model: Any) -> list[Any]:
    """Return the BatchNormalization layers that are not frozen."""
    return [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    ]


def check_optimizer(model: Any) -> None:
    """Raise if the model has no optimizer, or one that accumulates gradients itself.

    Raises:
        OptimizerError: there is none, or `gradient_accumulation_steps` of the optimizer is set.
    """
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if optimizer is None:
        raise OptimizerError(
            f"The model {model.name!r} was compiled without an optimizer. Pass one: "
            "model.compile(optimizer=...)."
        )
    steps = optimizer.gradient_accumulation_steps
    if steps:
        raise OptimizerError(
            f"The optimizer has gradient_accumulation_steps={steps}, so it would make one update for {steps} "
            "batches; accumulate makes one update for each batch. Leave gradient_accumulation_steps out."
        )
