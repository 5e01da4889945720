"""Higher threshold of Python's garbage collector while a block is open.

The collector traverses new objects whenever 700 (Python 3.13: 2000) more were allocated than freed. A block
allocates thousands that live to its end and are not garbage, and the traversal took 5 to 10 % of an update.
The collector stays enabled, because it has to free reference cycles of the program's forward.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from superbatch.torch.interrupts import DeferredInterrupts

OBJECTS = 50_000  # more than a block of a large model allocates, at a few hundred bytes each


class _Threshold:
    """Threshold of the process, which is raised while a block is open in any thread."""

    def __init__(self) -> None:
        # An RLock, because this thread can acquire it again if an exception interrupts the release.
        self._lock = threading.RLock()
        # Counted, because of two overlapping blocks the second would restore the threshold of the first.
        self._blocks = 0
        self._found = self._set = gc.get_threshold()

    def begin(self) -> None:
        with DeferredInterrupts(), self._lock:
            if not self._blocks:
                self._found = gc.get_threshold()
                least, *rest = self._found
                if 0 < least < OBJECTS:  # 0 if the program has disabled the collector
                    gc.set_threshold(OBJECTS, *rest)
                self._set = gc.get_threshold()
            self._blocks += 1

    def end(self) -> None:
        with DeferredInterrupts(), self._lock:
            self._blocks -= 1
            # A threshold that the program has set in the block stays.
            if not self._blocks and gc.get_threshold() == self._set:
                gc.set_threshold(*self._found)


_THRESHOLD = _Threshold()


@contextmanager
def rarely_collecting() -> Iterator[None]:
    """Raise the threshold of the garbage collector in the context; it stays enabled or disabled.

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
