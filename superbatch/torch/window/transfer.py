"""Transfer of micro-batches to the model's device: each is copied while the previous one is computed.

Large copies run in a separate stream, from pinned memory. The copy of micro-batch i+1 begins once the work
on micro-batch i is launched, so the device computes while the host pins memory. The device holds the inputs
of at most two micro-batches: before this copy the host waits until micro-batch i-1 is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from superbatch.batch.tree import map_arrays

from ..memory.out_of_memory import out_of_memory

LARGE = 1 << 20
"""Bytes on the host from which a micro-batch is copied in a separate stream.

The events of that stream take longer than the copy of fewer bytes: on an H100 a window of 128 micro-batches
of 8 KiB took 203 ms with them and 184 ms without.
"""


def to_device(microbatch: Any, device: torch.device | None) -> Any:
    """Return a micro-batch with its tensors on a device; copies from pinned memory are asynchronous.

    Examples:
        >>> to_device({"x": torch.zeros(2)}, torch.device("cpu"))["x"].device.type
        'cpu'
    """
    if device is None:
        return microbatch
    kind = type(microbatch)
    if kind is tuple or kind is dict:
        leaves = microbatch.values() if kind is dict else microbatch
        # Often all tensors are on the device already, and the general walk is slow.
        if all(type(leaf) is Tensor and leaf.device == device for leaf in leaves):
            return microbatch
    return map_arrays(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, microbatch
    )


class SideStream:
    """A CUDA stream for copies that overlap with the computation; other devices copy in the usual way."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._stream: Any = None
        self._copy_source: tuple[Any, Tensor] | None = None

    def beside(self, *, after_computation: bool = False) -> AbstractContextManager[Any]:
        """Return a context whose copies overlap with the computation.

        Args:
            after_computation: make the copies wait for the computation launched so far, whose results they
                copy.
        """
        if not has_streams(self._device):
            return nullcontext()
        # Made at the first copy, because a CUDA context costs memory.
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        if after_computation:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def event(self) -> Any:
        """Return an event after the copies so far; None if there is no stream yet."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def hold(self, source: Tensor) -> None:
        """Keep a tensor while it is copied; the next call of `hold` frees it.

        That call makes the computation, not the host, wait for the copy. With `Tensor.record_stream` the host
        would run ahead and run out of memory, because tensors that wait for their copy stay allocated.
        """
        # The event comes after the copy from `source`, which is already launched.
        held, event = self._copy_source, self.event()
        self._copy_source = None if event is None else (event, source)
        if held is not None:
            torch.cuda.current_stream(self._device).wait_event(held[0])

    def follow(self, other: SideStream) -> None:
        """Make the next copies wait for all copies launched so far in another stream."""
        event = other.event()
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def join(self) -> None:
        """Make the computation wait for all copies launched so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._copy_source = None

    def hand_over(self, copy: Any) -> None:
        """Make the computation wait for a copy, and keep the copy's memory until it was read."""
        if self._stream is None:
            return
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for leaf in tree_leaves(copy):
            if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
                # Otherwise the allocator could reuse the memory before the computing stream has read it.
                leaf.record_stream(computing)


class Transfer:
    """Returns micro-batches on a device, and copies the next one during the computation.

    Args:
        device: the device; None leaves micro-batches where they are.

    Examples:
        >>> transfer = Transfer(torch.device("meta"))
        >>> batches = [torch.zeros(2), torch.zeros(3)]
        >>> transfer.take(batches, 0).device.type
        'meta'
        >>> transfer.launched(batches, 0)
        >>> transfer.take(batches, 1).shape
        torch.Size([3])
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._side = SideStream(device)
        self._prefetched: list[tuple[Any, Any]] = []  # at most one pair: micro-batch on the host, its copy
        self._launched: Any = None  # event after the work on the last micro-batch

    def take(self, microbatches: Sequence[Any], index: int) -> Any:
        """Return micro-batch `index` on the device; `microbatches` are on the host."""
        device = self._device
        if device is None:
            return microbatches[index]
        # The CPU has no streams, so nothing is prefetched.
        if device.type == "cpu":
            return to_device(microbatches[index], device)
        source, copy = self._prefetched.pop() if self._prefetched else (None, None)
        if source is not microbatches[index]:  # the first micro-batch, or one that was cut again since
            return self._copied(microbatches[index])
        self._side.hand_over(copy)
        return copy

    def launched(self, microbatches: Sequence[Any], index: int) -> None:
        """Begin to copy the next micro-batch, after the work on micro-batch `index` was launched."""
        device = self._device
        if device is None or device.type == "cpu" or index + 1 >= len(microbatches):
            return
        following = microbatches[index + 1]
        # After a second backward of this micro-batch, the copy has already begun.
        if self._prefetched and self._prefetched[0][0] is following:
            return
        if has_streams(device):
            if _bytes_on_host(following) < LARGE:
                return
            before, self._launched = self._launched, torch.cuda.Event()
            self._launched.record(torch.cuda.current_stream(device))
            if before is not None:  # otherwise the inputs of all micro-batches would fill the device
                before.synchronize()
        # Frees the copy of a micro-batch that was cut again since.
        self._prefetched.clear()
        try:
            with self._side.beside():
                self._prefetched.append((following, self._copied(following)))
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            # `take` copies later, when this micro-batch is freed and there may be room.

    def forget(self) -> None:
        """Free the prefetched micro-batch, which will not be used."""
        self._prefetched.clear()
        self._launched = None

    def _copied(self, microbatch: Any) -> Any:
        device = self._device
        if has_streams(device):
            # A copy from pageable memory would block the host, and the device would run out of work.
            microbatch = map_arrays(pinned, microbatch)
        return to_device(microbatch, device)


def _bytes_on_host(microbatch: Any) -> int:
    tensors = (leaf for leaf in tree_leaves(microbatch) if isinstance(leaf, Tensor))
    return sum(tensor.nbytes for tensor in tensors if tensor.is_cpu)


def has_streams(device: torch.device | None) -> bool:
    """Return whether copies to a device can overlap with its computation, in a CUDA stream.

    Examples:
        >>> has_streams(torch.device("cuda", 1)), has_streams(torch.device("mps")), has_streams(None)
        (True, False, False)
    """
    return device is not None and device.type == "cuda"


def pinned(leaf: Any) -> Any:
    """Return a host tensor's copy in pinned memory, which a device copies faster.

    Returns any other object unchanged, and also a tensor for which there is no pinned memory.
    """
    if not (isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout is torch.strided):
        return leaf
    try:
        return leaf.pin_memory()
    except RuntimeError as error:  # pinned memory is limited (ulimit -l)
        if not out_of_memory(error):
            raise
        return leaf


def empty_on_host(like: Tensor) -> Tensor:
    """Return an empty tensor on the host with the shape and dtype of another, pinned if possible.

    Examples:
        >>> empty_on_host(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """
    try:
        return torch.empty_like(like, device="cpu", pin_memory=has_streams(like.device))
    except RuntimeError as error:
        # For a tensor of the CPU nothing was pinned, so memory has really run out.
        if not has_streams(like.device) or not out_of_memory(error):
            raise
        return torch.empty_like(like, device="cpu")
