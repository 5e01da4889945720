"""Moving micro-batches to the model's device: the next one is on its way while one is worked on.

The copies run in a stream of their own, from pinned memory; the part for CUDA was not run on a GPU. One
micro-batch more than the one worked on is in the device's memory meanwhile: its inputs, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..tree import map_arrays


def to_device(microbatch: Any, device: torch.device | None) -> Any:
    """Move the tensors of a micro-batch; copies from pinned memory do not wait.

    Examples:
        >>> to_device({"x": torch.zeros(2)}, torch.device("cpu"))["x"].device.type
        'cpu'
    """
    if device is None:
        return microbatch
    kind = type(microbatch)
    if kind is tuple or kind is dict:  # mostly of tensors that are there already
        leaves = microbatch.values() if kind is dict else microbatch
        if all(type(leaf) is Tensor and leaf.device == device for leaf in leaves):
            return microbatch
    return map_arrays(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, microbatch
    )


class SideStream:
    """Copies to a device beside its computation; on other devices than CUDA they are ordinary ones.

    Args:
        device: where to.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._stream: Any = None

    def beside(self, *, after_computation: bool = False) -> AbstractContextManager[Any]:
        """Return a context whose copies run beside the computation.

        Args:
            after_computation: what was computed until now is what is to be copied.
        """
        if self._device is None or self._device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        if after_computation:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def hand_over(self, copy: Any) -> None:
        """Let the computation wait for the copy, and keep its memory until the computation is through."""
        if self._stream is None:
            return
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for leaf in tree_leaves(copy):
            if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
                leaf.record_stream(computing)


class Transfer:
    """Hands out micro-batches on a device, and has the next one copied meanwhile.

    Args:
        device: where to; None leaves micro-batches where they are.

    Examples:
        >>> transfer = Transfer(torch.device("meta"))
        >>> batches = [torch.zeros(2), torch.zeros(3)]
        >>> transfer.take(batches, 0).device.type, transfer.take(batches, 1).shape
        ('meta', torch.Size([3]))
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._side = SideStream(device)
        self._ahead: list[tuple[Any, Any]] = []  # at most one: where it came from, and the copy

    def take(self, microbatches: Sequence[Any], index: int) -> Any:
        """Return a micro-batch on the device.

        Args:
            microbatches: on the host.
            index: of the one that is worked on next.
        """
        device = self._device
        if device is None or device.type == "cpu":
            return to_device(microbatches[index], device)
        source, copy = self._ahead.pop() if self._ahead else (None, None)
        if source is not microbatches[index]:  # the first one, or cut otherwise meanwhile
            copy = to_device(microbatches[index], device)
        else:
            self._side.hand_over(copy)
        if index + 1 < len(microbatches):
            with self._side.beside():
                self._ahead.append((microbatches[index + 1], self._copied(microbatches[index + 1])))
        return copy

    def forget(self) -> None:
        """Let go of what is on its way: it will not be taken."""
        self._ahead.clear()

    def _copied(self, microbatch: Any) -> Any:
        device = self._device
        if device is not None and device.type == "cuda":
            # From pageable memory a copy would wait for the device, and the device for it.
            microbatch = map_arrays(pinned, microbatch)
        return to_device(microbatch, device)


def pinned(leaf: Any) -> Any:
    """Return a tensor of the host's memory in memory that a GPU copies from by itself; else what is given."""
    on_host = isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout is torch.strided
    return leaf.pin_memory() if on_host else leaf
