# Keras is an extra. Where it is not installed, pyright finds neither it nor anything in it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""`accumulate`: a model whose batches of `fit` are worked through in micro-batches."""

from __future__ import annotations

import importlib
from typing import Any

import keras

from ..errors import InputError, explain
from . import refusals, sharing
from .options import BatchNorm, LossWeight, NonFinite, Options, check

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
) -> Any:
    """TODO."""
    options = check(Options(microbatch_size, loss_weight, batchnorm, nonfinite))
    refusals.check_model(plain(model) if is_accumulating(model) else model)
    model = plain(model) if is_accumulating(model) else model
    refusals.check_optimizer(model)
    refusals.check_layers(model, options)
    step = importlib.import_module(_step_of(keras.backend.backend()), __package__)
    twin = sharing.on_same_layers(sharing.subclass(type(model), methods(type(model), step)), model)
    vars(twin)[OPTIONS] = options
    return twin


def _step_of(backend: str) -> str:
    if backend in STEPS:
        return STEPS[backend]
    raise InputError(
        explain(
            f"Keras' backend {backend}",
            "it cannot train",
            "set KERAS_BACKEND to tensorflow, jax or torch before Keras is imported",
        )
    )


def methods(cls: type, step: Any) -> dict[str, Any]:
    """What the class of an accumulating model has of its own; `cls` is the user's class."""

    def train_step(self: Any, *arguments: Any) -> Any:
        options = vars(self)[OPTIONS]
        refusals.check_optimizer(self)
        refusals.check_layers(self, options)
        return step.train_step(self, options, *arguments)

    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self).save(*args, **kwargs)

    def reduce(self: Any) -> Any:
        return plain(self).__reduce__()

    def build_before_tracing(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        return self._symbolic_build(iterator=iterator, data_batch=data_batch)

    return {
        "train_step": train_step,
        "save": save,
        "__reduce__": reduce,
        "_maybe_symbolic_build": build_before_tracing,
        ORIGINAL: cls,
    }


def is_accumulating(model: Any) -> bool:
    """Whether a model is one that `accumulate` returned."""
    return OPTIONS in getattr(model, "__dict__", {})


def plain(model: Any) -> Any:
    """The model of the user's class on the same layers, without accumulation."""
    other = sharing.on_same_layers(getattr(type(model), ORIGINAL), model)
    vars(other).pop(OPTIONS)
    return other
