"""Deferral of signals (Ctrl-C, and those that a cluster sends) during code that must not be interrupted."""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager
from importlib import import_module
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

try:  # the C functions, because those of `signal` spend 5 us per call on enums
    _signals: Any = import_module("_signal")
except ImportError:  # not CPython
    _signals = signal

_SIGNALS = [int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]

T = TypeVar("T")


class DeferredInterrupts:
    """Context that defers SIGINT, SIGTERM and SIGUSR1; their handlers are called at its end.

    Programs save a checkpoint on SIGTERM or SIGUSR1 when a cluster stops them. Python calls handlers only in
    the main thread, so the context does nothing in other threads. A handler that is not a Python function
    (the system's default, "ignore") stays in place. Several signals of one kind call the handler once. The
    handlers are restored also if the block raises.

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

    __slots__ = ("_handlers", "_note", "_waiting")

    def __enter__(self) -> DeferredInterrupts:
        self._waiting: dict[int, FrameType | None] = {}
        self._handlers: list[tuple[int, Any]] = []
        self._note = self._defer
        try:
            for number in _SIGNALS:
                handler = _signals.getsignal(number)
                if callable(handler):  # not SIG_DFL, SIG_IGN, or one of C code
                    self._handlers.append((number, handler))
                    _signals.signal(number, self._note)
        except BaseException as error:
            if isinstance(error, ValueError) and threading.current_thread() is not threading.main_thread():
                self._handlers = []  # only the main thread may set handlers; asking first is slower
            else:
                self.__exit__(None, None, None)
                raise
        return self

    def _defer(self, number: int, frame: FrameType | None) -> None:
        self._waiting[number] = frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        handlers = self._handlers[::-1]  # SIGINT's handler last, because it usually raises
        for number, handler in handlers:
            if _signals.getsignal(number) is self._note:  # a handler that the block has set stays
                _signals.signal(number, handler)
        # self._note refers to self: the cycle would keep the frames, and with them tensors.
        waiting, self._note, self._waiting = self._waiting, None, {}
        for number, handler in handlers:
            if number in waiting:
                handler(number, waiting.pop(number))


class EnteredOrLeft(Generic[T]):
    """Wrapper of a context, such as a mode of torch, that an interrupt cannot stop halfway.

    An interrupt before `__exit__` begins leaves the context entered, as in all of Python. The owner can then
    call `close`.

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
