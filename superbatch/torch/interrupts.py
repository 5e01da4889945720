"""Interrupts (SIGINT, Ctrl-C) deferred while something must not be cut in two."""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager
from importlib import import_module
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

try:  # the functions below `signal`'s own, which spend 5 us per call on enums
    _signals: Any = import_module("_signal")
except ImportError:  # no CPython
    _signals = signal

_INTERRUPT = int(signal.SIGINT)

T = TypeVar("T")


class DeferredInterrupts:
    """Context in which SIGINT waits; what the program's handler does with it happens at the end.

    Python calls handlers in the main thread alone, so other threads need no such context, and change nothing.
    A handler that is no Python function (the system's default, "ignore") stays in place. Several interrupts
    count as one. The handler is restored also where the block raises.

    Examples:
        >>> done = []
        >>> try:
        ...     with DeferredInterrupts():
        ...         signal.raise_signal(signal.SIGINT)
        ...         done.append("the whole block")
        ... except KeyboardInterrupt:
        ...     done.append("then the interrupt")
        >>> done
        ['the whole block', 'then the interrupt']
    """

    __slots__ = ("_frame", "_handler", "_note", "_waiting")

    def __enter__(self) -> DeferredInterrupts:
        self._waiting, self._frame = False, None
        handler = _signals.getsignal(_INTERRUPT)
        self._handler: Any = handler if callable(handler) else None  # not SIG_DFL, SIG_IGN, or one of C code
        if self._handler is not None:
            self._note = self._defer
            try:
                _signals.signal(_INTERRUPT, self._note)
            except ValueError:  # in another thread; to ask first takes longer
                self._handler = self._note = None
                if threading.current_thread() is threading.main_thread():
                    raise
        return self

    def _defer(self, number: int, frame: FrameType | None) -> None:
        self._waiting, self._frame = True, frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        handler = self._handler
        if handler is None:
            return
        if _signals.getsignal(_INTERRUPT) is self._note:  # else the block has set another one, which stays
            _signals.signal(_INTERRUPT, handler)
        frame, self._note, self._frame = self._frame, None, None  # a cycle, and frames hold tensors
        if self._waiting:
            handler(_INTERRUPT, frame)


class EnteredOrLeft(Generic[T]):
    """Context that an interrupt finds entered or left, never between, as torch's modes need it.

    An interrupt before `__exit__` has begun leaves it entered, as it does every context of Python. Its owner
    may call `close` then.

    Args:
        context: entered once.

    Examples:
        >>> import contextlib, io
        >>> with EnteredOrLeft(contextlib.closing(io.StringIO())) as file:
        ...     file.closed
        False
        >>> file.closed
        True
    """

    def __init__(self, context: AbstractContextManager[T]) -> None:
        self._context, self._entered = context, False

    def __enter__(self) -> T:
        try:
            with DeferredInterrupts():
                value = self._context.__enter__()
                self._entered = True
        except BaseException:
            self.close()
            raise
        return value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        with DeferredInterrupts():
            if not self._entered:
                return None
            self._entered = False
            return self._context.__exit__(kind, error, traceback)

    def close(self) -> None:
        """Leave the context if it is still entered."""
        self.__exit__(None, None, None)
