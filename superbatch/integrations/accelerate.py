"""Exact gradients in a training loop with Accelerate: a `Gradient` for an Accelerator."""

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
    """Return a `Gradient` that replaces the forward and ``accelerator.backward`` of a loop.

    The loop still clips and calls the prepared optimizer and scheduler. Call the gradient with a batch, or
    with the batches of the prepared loader that make one update: ``for window in windows(loader, 4)``.

    Args:
        accelerator: an Accelerator with ``gradient_accumulation_steps=1``. Call the gradient outside
            ``accelerator.accumulate()``.
        model: model or list of models returned by ``accelerator.prepare``; `loss_fn` calls it.
        loss_fn: as in `Gradient`; a prepared model still uses the autocast of Accelerate.
        coupled: return a `WholeGradient`, for batches whose samples influence each other.
        options: options of `Gradient` except `backward` and `scaler`, which come from Accelerate.

    Raises:
        InputError: the model was not prepared, or Accelerate shards it or divides losses by its own
            accumulation steps. The gradient raises it too, when it is called inside ``accumulate()``.
    """
    check_version("accelerate")
    _refuse(accelerator)
    # Preparing wraps a model in DistributedDataParallel; one that unwraps to itself was not prepared.
    models = [model] if isinstance(model, nn.Module) else model
    if accelerator.num_processes > 1 and any(each is accelerator.unwrap_model(each) for each in models):
        raise InputError(
            "The model was not prepared, so gradients would not be reduced over the processes. Pass the "
            "model that accelerator.prepare() returned."
        )

    def backward(loss: Any, **kwargs: Any) -> None:
        _refuse(accelerator)  # its settings may have changed since the gradient was made
        accelerator.backward(loss, **kwargs)

    kind: Any = WholeGradient if coupled else Gradient
    return kind(model, loss_fn, backward=backward, scaler=accelerator.scaler, **options)


def _refuse(accelerator: Accelerator) -> None:
    """Raise for settings of Accelerate with which gradients are sharded, divided twice or not applied."""
    kind = accelerator.distributed_type.value
    # "MULTI_GPU", "MULTI_CPU" and the like are DistributedDataParallel; other kinds shard the model.
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise InputError(
            f"Accelerate runs with {kind}, which superbatch.integrations does not support. Launch it without "
            "sharding (DistributedDataParallel)."
        )
    steps = accelerator.gradient_accumulation_steps
    if steps != 1:
        raise InputError(
            f"With gradient_accumulation_steps={steps}, Accelerate would divide each loss a second time. "
            f"Leave it at 1 and iterate over superbatch.torch.windows(loader, {steps})."
        )
    if not accelerator.sync_gradients:
        raise InputError(
            "accelerator.sync_gradients is False, so the prepared optimizer would skip its step. Call the "
            "Gradient outside accelerator.accumulate()."
        )
