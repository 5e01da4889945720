"""Dispatch mode of a block, which sees operations on real tensors too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.calls import is_collective, mapped, written_by
from ..ir.conjugates import conjugates_seen
from ..ir.recorder import Recorder
from .dispatch import dispatch
from .tensor import VirtualTensor

_VIRTUAL = (VirtualTensor,)  # the types of nearly all calls


class Watching(TorchDispatchMode):
    """Sees operations on real tensors too: buffers that wait to be written are so before they are used.

    Args:
        recording: returns that of the block; None before there is a batch.
        before: receives what is written before there is a batch.
    """

    def __init__(
        self, recording: Callable[[], Recorder | None], before: Callable[[Iterable[Tensor]], None]
    ) -> None:
        super().__init__()
        self._recording = recording
        self._before = before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # compiled models run eagerly here; this would cost 2 us for each operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the operation, or do it after what has to come before it."""
        kwargs = kwargs or {}
        recording = self._recording()
        if recording is None:
            if func._schema.is_mutable:
                self._before(written_by(func, args, kwargs))
            return _on_real_tensors(func, args, kwargs)
        if types != _VIRTUAL and any(hasattr(kind, "trigger_wait") for kind in types):
            args, kwargs = _arrived(args), dict(zip(kwargs, _arrived(kwargs.values()), strict=True))
            types = (*types, VirtualTensor) if _any_virtual((*args, *kwargs.values())) else types
        if is_collective(func):
            assert recording.across is not None  # set when the recording begins
            return recording.across.user_collective(recording, func, args, kwargs)
        if VirtualTensor in types:
            return dispatch(recording, func, args, kwargs)
        recording.settle_writes((*args, *kwargs.values()))
        for arg in args:
            mapped(arg, recording.note_leaf)
        if func._schema.is_mutable:
            recording.readings.before(func, args, kwargs)
        return _on_real_tensors(func, args, kwargs)


def _on_real_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args and isinstance(args[0], Tensor) and args[0].is_complex():
        with conjugates_seen():
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def _arrived(args: Iterable[Any]) -> tuple[Any, ...]:
    """Return the virtual tensors in the place of those that wait for a collective which gives them.

    Torch's functional collectives return an `AsyncCollectiveTensor`, which waits when it is first used. In a
    block a collective has been waited for; what wraps its result would be taken for a real tensor, and its
    rows for numbers that do not depend on what was recorded.
    """

    def one(item: Any) -> Any:
        wrapped = getattr(item, "elem", None)
        return wrapped if isinstance(wrapped, VirtualTensor) else item

    return tuple(mapped(arg, one) for arg in args)


def _any_virtual(args: Iterable[Any]) -> bool:
    return any(
        isinstance(item, VirtualTensor)
        for arg in args
        for item in (arg if isinstance(arg, (list, tuple)) else (arg,))
    )
