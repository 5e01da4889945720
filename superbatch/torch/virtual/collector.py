"""Higher threshold of Python's garbage collector while a block is open.

The collector runs whenever 700 (Python 3.13: 2000) more objects were allocated than freed, and traverses
them. A block allocates thousands that live to its end, none of them garbage: the traversal took 5 to 10 % of
an update. The collector stays enabled: reference cycles of the program's forward must still be freed.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from superbatch.torch.interrupts import DeferredInterrupts

OBJECTS = 50_000  # above the objects of a block of a large model, at some hundred bytes each


class _Threshold:
    """Threshold of the process, raised while a block is open in any thread."""

    def __init__(self) -> None:
        # An RLock: if an exception interrupts its release, this thread can acquire it again.
        self._lock = threading.RLock()
        # Counted: of two overlapping blocks the second would restore the threshold that the first one set.
        self._blocks = 0
        self._found = self._set = gc.get_threshold()

    def begin(self) -> None:
        with DeferredInterrupts(), self._lock:
            if not self._blocks:
                self._found = gc.get_threshold()
                least, *rest = self._found
                if 0 < least < OBJECTS:  # 0: the program has disabled it
                    gc.set_threshold(OBJECTS, *rest)
                self._set = gc.get_threshold()
            self._blocks += 1

    def end(self) -> None:
        with DeferredInterrupts(), self._lock:
            self._blocks -= 1
            # Unchanged only: a threshold that the program set in the block is its own.
            if not self._blocks and gc.get_threshold() == self._set:
                gc.set_threshold(*self._found)


_THRESHOLD = _Threshold()


@contextmanager
def rarely_collecting() -> Iterator[None]:
    """Raise the threshold of the garbage collector inside the context; `gc.enable` and `gc.disable` stay.

    Examples:
        >>> before = gc.get_threshold()
        >>> with rarely_collecting():
        ...     gc.get_threshold()[0] >= OBJECTS
        True
        >>> gc.get_threshold() == before
        True
    """
    _THRESHOLD.begin()
    try:
        yield
    finally:
        _THRESHOLD.end()
