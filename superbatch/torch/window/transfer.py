"""Moving micro-batches to the model's device: the next one is on its way while one is worked on.

The copies run in a stream of their own, from pinned memory; the part for CUDA was not run on a GPU. A copy
begins once the work on the micro-batch before it is launched, so that the device does not wait for the host
to pin. The inputs of two micro-batches are in the device's memory at a time: the host waits until the last
micro-batch but one is through, while the device still has the whole of the last one to do.
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
        # The usual case of micro-batches that are on the device already.
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
        self._held: tuple[Any, Tensor] | None = None

    def beside(self, *, after_computation: bool = False) -> AbstractContextManager[Any]:
        """Return a context whose copies run beside the computation.

        Args:
            after_computation: what was computed until now is what is to be copied.
        """
        if not has_streams(self._device):
            return nullcontext()
        # Made at the first copy: a CUDA context costs memory.
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        if after_computation:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def event(self) -> Any:
        """Return an event behind the copies until now; None where there is no such stream."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def hold(self, source: Tensor) -> None:
        """Keep a tensor that is being copied until the next one is, and its copy is through.

        The computation waits then, and not the host. With `Tensor.record_stream` the host would run ahead and
        find no memory free that is still to be copied from.
        """
        # The event is taken before the hold: it lies behind the copy from `source`.
        held, event = self._held, self.event()
        self._held = None if event is None else (event, source)
        if held is not None:
            torch.cuda.current_stream(self._device).wait_event(held[0])

    def follow(self, other: SideStream) -> None:
        """Let copies from now on wait for those of another stream until now."""
        event = other.event()
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def join(self) -> None:
        """Let the computation wait for all copies until now."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._held = None

    def hand_over(self, copy: Any) -> None:
        """Let the computation wait for the copy, and keep its memory until the computation is through."""
        if self._stream is None:
            return
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for leaf in tree_leaves(copy):
            if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
                # The caching allocator must not reuse the memory before the computing stream has read it.
                leaf.record_stream(computing)


class Transfer:
    """Hands out micro-batches on a device, and has the next one copied meanwhile.

    Args:
        device: where to; None leaves micro-batches where they are.

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
        self._ahead: list[tuple[Any, Any]] = []  # at most one: where it came from, and the copy
        self._launched: Any = None  # the event behind the work on the last micro-batch

    def take(self, microbatches: Sequence[Any], index: int) -> Any:
        """Return a micro-batch on the device.

        Args:
            microbatches: on the host.
            index: of the one that is worked on next.
        """
        device = self._device
        if device is None:
            return microbatches[index]
        # No streams on the CPU: the copy is made when it is asked for.
        if device.type == "cpu":
            return to_device(microbatches[index], device)
        source, copy = self._ahead.pop() if self._ahead else (None, None)
        if source is not microbatches[index]:  # the first one, or cut differently meanwhile
            return self._copied(microbatches[index])
        self._side.hand_over(copy)
        return copy

    def launched(self, microbatches: Sequence[Any], index: int) -> None:
        """Have the next micro-batch copied: the work on this one is launched.

        Args:
            microbatches: as for `take`.
            index: of the one that is worked on.
        """
        device = self._device
        if device is None or device.type == "cpu" or index + 1 >= len(microbatches):
            return
        following = microbatches[index + 1]
        # It was begun at the first backward.
        if self._ahead and self._ahead[0][0] is following:  # a second backward of this micro-batch
            return
        if has_streams(device):
            before, self._launched = self._launched, torch.cuda.Event()
            self._launched.record(torch.cuda.current_stream(device))
            if before is not None:  # or the inputs of all micro-batches would pile up
                before.synchronize()
        # A copy of a micro-batch that was cut differently since is of no use.
        self._ahead.clear()
        try:
            with self._side.beside():
                self._ahead.append((following, self._copied(following)))
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            # There may be room once this micro-batch is gone: `take` copies then.

    def forget(self) -> None:
        """Free what is on its way: it will not be taken."""
        self._ahead.clear()
        self._launched = None

    def _copied(self, microbatch: Any) -> Any:
        device = self._device
        if has_streams(device):
            # From pageable memory a copy would wait for the device, and the device for it.
            microbatch = map_arrays(pinned, microbatch)
        return to_device(microbatch, device)


def has_streams(device: torch.device | None) -> bool:
    """Return whether copies to a device run beside its computation here.

    Examples:
        >>> has_streams(torch.device("cuda", 1)), has_streams(torch.device("mps")), has_streams(None)
        (True, False, False)
    """
    return device is not None and device.type == "cuda"


def pinned(leaf: Any) -> Any:
    """Return a tensor of the host's memory in memory that a GPU copies from by itself; else what is given.

    What is given is returned too where no more memory can be pinned: the copy from there is slower.
    """
    if not (isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout is torch.strided):
        return leaf
    try:
        return leaf.pin_memory()
    # Locked memory is limited (ulimit -l), and pageable memory only is slower.
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return leaf


def empty_on_host(like: Tensor) -> Tensor:
    """Return an empty tensor of the host's memory for the numbers of one on a device, pinned where possible.

    Examples:
        >>> empty_on_host(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """
    try:
        return torch.empty_like(like, device="cpu", pin_memory=has_streams(like.device))
    except RuntimeError as error:
        # On the CPU a failure to allocate is a real one.
        if not has_streams(like.device) or not out_of_memory(error):
            raise
        return torch.empty_like(like, device="cpu")
