"""Exact gradients in a loop of Accelerate, which keeps its step: a `Gradient` from an Accelerator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from accelerate import Accelerator
from torch import nn

from ..errors import InputError
from ..torch import Gradient, WholeGradient
from .versions import check_version


def make_gradient(
    accelerator: Accelerator,
    model: nn.Module | Sequence[nn.Module],
    loss_fn: Callable[[Any], Any],
    *,
    coupled: bool = False,
    **options: Any,
) -> Gradient | WholeGradient:
    """Return a `Gradient` that takes the place of the forward and ``accelerator.backward`` of a loop.

    Clipping, the prepared optimizer and the prepared scheduler stay the loop's. Call it with a batch, or with
    the batches of the prepared loader that make one update: ``for window in windows(loader, 4)``.

    Args:
        accelerator: with ``gradient_accumulation_steps=1``, and each call outside of ``accumulate()``.
        model: as ``accelerator.prepare`` returned it, or a list of several; `loss_fn` calls it.
        loss_fn: as `Gradient`'s; autocast and casts of a prepared model stay Accelerate's.
        coupled: samples of a batch influence each other: return a `WholeGradient`.
        options: as `Gradient`'s, but for `backward` and `scaler`, which are Accelerate's.

    Raises:
        InputError: Accelerate shards the model, or divides losses by accumulation steps of its own.
    """
    check_version("accelerate")
    _refuse(accelerator)
    models = [model] if isinstance(model, nn.Module) else model
    if accelerator.num_processes > 1 and any(each is accelerator.unwrap_model(each) for each in models):
        raise InputError(
            "The model was not prepared, so each of several processes would have a gradient of its own. Pass "
            "the model that accelerator.prepare() returned."
        )

    def backward(loss: Any, **kwargs: Any) -> None:
        _refuse(accelerator)  # its settings may have changed since
        accelerator.backward(loss, **kwargs)

    kind: Any = WholeGradient if coupled else Gradient
    return kind(model, loss_fn, backward=backward, scaler=accelerator.scaler, **options)


def _refuse(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise InputError(
            f"Accelerate runs with {kind}, with which gradients cannot be accumulated here. Launch it for "
            "several processes without sharding (DistributedDataParallel)."
        )
    steps = accelerator.gradient_accumulation_steps
    if steps != 1:
        raise InputError(
            f"gradient_accumulation_steps={steps} divides each loss, which is multiplied by its share of the "
            f"batch already. Leave it at 1, and iterate over superbatch.torch.windows(loader, {steps})."
        )
    if not accelerator.sync_gradients:
        raise InputError(
            "accelerator.sync_gradients is False, so the prepared optimizer would leave its step out. Call "
            "the gradient outside of accelerator.accumulate()."
        )
