"""Dispatch mode of a block: it sees operations on real tensors, which reach no virtual tensor."""

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

_VIRTUAL = (VirtualTensor,)  # `types` of nearly all calls: one comparison skips the search for async results


class Watching(TorchDispatchMode):
    """Dispatch mode that makes pending writes before a buffer is used, and copies before an in-place write.

    Args:
        recording: returns the recording of the block; None before its first batch.
        before: receives the tensors that are written before the first batch.
    """

    def __init__(
        self, recording: Callable[[], Recorder | None], before: Callable[[Iterable[Tensor]], None]
    ) -> None:
        super().__init__()
        self._recording = recording
        self._before = before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # compiled models run eagerly in a block, and torch's check costs 2 us per operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the operation, or run it on real tensors after the writes that it depends on."""
        kwargs = kwargs or {}
        recording = self._recording()
        if recording is None:
            if func._schema.is_mutable:
                self._before(written_by(func, args, kwargs))
            return _on_real_tensors(func, args, kwargs)
        # An AsyncCollectiveTensor around a virtual one would be taken for a real tensor.
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
    # Under a dispatch mode torch excludes the Conjugate key: only complex tensors need it.
    if args and isinstance(args[0], Tensor) and args[0].is_complex():
        with conjugates_seen():
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def _arrived(args: Iterable[Any]) -> tuple[Any, ...]:
    """Return the arguments with each `AsyncCollectiveTensor` replaced by the virtual tensor that it wraps."""

    def one(item: Any) -> Any:
        # Functional collectives return it to wait at the first use; in a block they have been waited for.
        wrapped = getattr(item, "elem", None)
        return wrapped if isinstance(wrapped, VirtualTensor) else item

    return tuple(mapped(arg, one) for arg in args)


def _any_virtual(args: Iterable[Any]) -> bool:
    return any(
        isinstance(item, VirtualTensor)
        for arg in args
        for item in (arg if isinstance(arg, (list, tuple)) else (arg,))
    )
