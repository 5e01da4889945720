"""`torch.nn.SyncBatchNorm` in a block, whose own forward raises for tensors that are not on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..trace.tensor import VirtualTensor


def synchronised_layers(modules: Iterable[nn.Module]) -> list[nn.SyncBatchNorm]:
    """Return the SyncBatchNorm layers with torch's own forward, without subclasses that override it.

    Examples:
        >>> len(synchronised_layers([nn.SyncBatchNorm(2), nn.BatchNorm1d(2)]))
        1
    """
    return [
        module
        for module in modules
        if isinstance(module, nn.SyncBatchNorm) and type(module).forward is nn.SyncBatchNorm.forward
    ]


@contextmanager
def routed(layers: Iterable[nn.SyncBatchNorm]) -> Iterator[None]:
    """Replace the forward of the layers inside the context, so that they take virtual tensors.

    Examples:
        >>> layer = nn.SyncBatchNorm(2)
        >>> with routed([layer]):
        ...     "forward" in vars(layer)
        True
        >>> "forward" in vars(layer)
        False
    """
    own_forward = [layer for layer in layers if _has_own_forward(layer)]
    try:
        for layer in own_forward:
            layer.forward = _Forward(layer)  # an instance attribute, which `nn.Module.__call__` prefers
        yield
    finally:
        for layer in own_forward:
            vars(layer).pop("forward", None)


def _has_own_forward(layer: nn.SyncBatchNorm) -> bool:
    """Return whether the layer's forward is that of its class."""
    # A copy made in a block has the forward of its class as an instance attribute (`__deepcopy__`).
    own = type(layer).forward.__get__(layer)
    return vars(layer).get("forward", own) == own


class _Forward:
    """Forward of a SyncBatchNorm in a block; copies and pickles of the module get torch's own forward."""

    def __init__(self, layer: nn.SyncBatchNorm) -> None:
        self._layer = layer

    def __call__(self, input: Tensor) -> Tensor:
        layer = self._layer
        ranks = input.virtual.recording.ranks if isinstance(input, VirtualTensor) else None
        if ranks is None or not (layer.training and dist.is_available() and dist.is_initialized()):
            return type(layer).forward(layer, input)
        # From here like SyncBatchNorm.forward, but over the ranks of the block and without NCCL.
        layer._check_input_dim(input)
        layer._check_non_zero_input_channels(input)
        momentum = layer.momentum
        if layer.track_running_stats:
            assert layer.num_batches_tracked is not None
            layer.num_batches_tracked.add_(1)
            if momentum is None:  # a cumulative average
                momentum = 1.0 / float(layer.num_batches_tracked)
        running = (layer.running_mean, layer.running_var) if layer.track_running_stats else (None, None)
        with ranks.normalising_over(layer):
            # Not `nn.functional.batch_norm`, which raises on a rank with one value per channel.
            return torch.batch_norm(
                input, layer.weight, layer.bias, *running, True, momentum or 0.0, layer.eps, False
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the forward of the copied layer."""
        return deepcopy(self._layer, memo).__class__.forward.__get__(memo[id(self._layer)])

    def __reduce__(self) -> Any:
        """Pickle as the layer's own forward."""
        return getattr, (self._layer, "forward")
