"""Dispatch mode of a block, for operations that have real tensors only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.calls import is_collective, mapped, written_by
from ..ir.conjugates import lazy_conjugation
from ..ir.recorder import Recorder
from .dispatch import dispatch
from .tensor import VirtualTensor

_VIRTUAL = (VirtualTensor,)  # `types` of nearly all calls, which need no search for async results


class Watching(TorchDispatchMode):
    """Dispatch mode that makes pending writes before a buffer is read, and copies tensors before a write.

    Args:
        recording: returns the recording of the block; None before its first batch.
        before_first_batch: takes the tensors that are about to be written before the first batch.
    """

    def __init__(
        self, recording: Callable[[], Recorder | None], before_first_batch: Callable[[Iterable[Tensor]], None]
    ) -> None:
        super().__init__()
        self._recording = recording
        self._before_first_batch = before_first_batch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # compiled models run eagerly in a block anyway, and torch's check costs 2 us

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the operation, or run it on real tensors after pending writes to its arguments."""
        kwargs = kwargs or {}
        recording = self._recording()
        if recording is None:
            if func._schema.is_mutable:
                self._before_first_batch(written_by(func, args, kwargs))
            return _on_real_tensors(func, args, kwargs)
        # Otherwise an AsyncCollectiveTensor that wraps a virtual tensor would be taken for a real tensor.
        if types != _VIRTUAL and any(hasattr(kind, "trigger_wait") for kind in types):
            args, kwargs = _arrived(args), dict(zip(kwargs, _arrived(kwargs.values()), strict=True))
            types = (*types, VirtualTensor) if _any_virtual((*args, *kwargs.values())) else types
        if is_collective(func):
            assert recording.ranks is not None  # set when the recording begins
            return recording.ranks.user_collective(recording, func, args, kwargs)
        if VirtualTensor in types:
            return dispatch(recording, func, args, kwargs)
        recording.make_writes((*args, *kwargs.values()))
        for arg in args:
            mapped(arg, recording.register_leaves)
        if func._schema.is_mutable:
            recording.readings.copy_before(func, args, kwargs)
        return _on_real_tensors(func, args, kwargs)


def _on_real_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Under a dispatch mode torch excludes the Conjugate key, which complex tensors need.
    if args and isinstance(args[0], Tensor) and args[0].is_complex():
        with lazy_conjugation():
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def _arrived(args: Iterable[Any]) -> tuple[Any, ...]:
    """Return the arguments with each `AsyncCollectiveTensor` replaced by the virtual tensor that it wraps."""

    def one(item: Any) -> Any:
        # Functional collectives return it to wait at the first use, but in a block they are complete.
        wrapped = getattr(item, "elem", None)
        return wrapped if isinstance(wrapped, VirtualTensor) else item

    return tuple(mapped(arg, one) for arg in args)


def _any_virtual(args: Iterable[Any]) -> bool:
    return any(
        isinstance(item, VirtualTensor)
        for arg in args
        for item in (arg if isinstance(arg, (list, tuple)) else (arg,))
    )
