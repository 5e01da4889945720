"""Python's garbage collector, called less often while the operations of a block are alive.

The collector runs whenever 700 more objects (2000 since Python 3.13) were made than freed, and looks at all
of them. A block makes thousands of objects that live until its end, and none of them is garbage: the looking
took 5 to 10 percent of an update. So the threshold is raised. The collector stays on, so that a program whose
forward leaves cycles behind is bounded in its memory.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from superbatch.torch.interrupts import DeferredInterrupts

OBJECTS = 50_000  # more than the blocks of large models make, at some hundred bytes each


class _Threshold:
    """The threshold of the process, raised while a block is open in any thread.

    Each of two blocks that overlap would restore what it found: the second one finds what the first has set.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # else an error on the way out of its block stops this thread
        self._blocks = 0
        self._found = self._set = gc.get_threshold()

    def begin(self) -> None:
        with DeferredInterrupts(), self._lock:
            if not self._blocks:
                self._found = gc.get_threshold()
                least, *rest = self._found
                if 0 < least < OBJECTS:  # 0: the program has turned it off
                    gc.set_threshold(OBJECTS, *rest)
                self._set = gc.get_threshold()
            self._blocks += 1

    def end(self) -> None:
        with DeferredInterrupts(), self._lock:
            self._blocks -= 1
            if (
                not self._blocks and gc.get_threshold() == self._set
            ):  # or the program has set another meanwhile
                gc.set_threshold(*self._found)


_THRESHOLD = _Threshold()


@contextmanager
def rarely_collecting() -> Iterator[None]:
    """Let the collector wait for more objects than usual.

    ``gc.enable()`` and ``gc.disable()`` are the program's, here as elsewhere: whether it runs is not touched.

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
