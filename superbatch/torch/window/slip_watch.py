"""Warnings about slips that show only over several windows; each is given once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..warn import warn

_WINDOWS = 10  # in a row that were one micro-batch each, before anything is said


class SlipWatch:
    """Sees schedulers that are stepped by hand too, and batches that are never split.

    Args:
        schedulers: that the accumulator steps.
        microbatch_size: the option; anything but an int is not watched.

    Attributes:
        watches: there is anything to see: a scheduler, or batches that may be too small.

    Examples:
        >>> watch = SlipWatch([], 8)
        >>> watch.open([7, 7, 6])
        >>> watch.close()
    """

    def __init__(self, schedulers: Sequence[Any], microbatch_size: object) -> None:
        self._schedulers = schedulers
        self._counts: list[int | None] = []  # none before a window: states may be loaded until then
        self._opened: list[int | None] = []
        self._size = microbatch_size if isinstance(microbatch_size, int) else None
        # In a row: one split batch ends the watch.
        self._unsplit = 0
        self._note_what_is_left()

    def open(self, samples: Sequence[int] | None) -> None:
        """Compare the schedulers' counts with those after the last window, and count unsplit batches.

        Args:
            samples: of each micro-batch; None for a `Window`, whose micro-batches are the loader's.
        """
        if self._schedulers:
            # One or two steps since the last window: scheduler.step() was called by hand as well.
            self._compare(self._counts, least=1, most=2)  # a state that was loaded goes further
            self._opened = self._read()
        if self._size is not None:
            self._see(samples, self._size)

    def _see(self, samples: Sequence[int] | None, size: int) -> None:
        if samples is None or len(samples) > 1:
            self._size = None  # something is accumulated: no more to see
            self._note_what_is_left()
            return
        self._unsplit += 1
        if self._unsplit == _WINDOWS:
            self._size = None
            self._note_what_is_left()
            warn(
                f"The first {_WINDOWS} batches were one micro-batch each ({samples[0]} samples, "
                f"microbatch_size={size}), so nothing was accumulated. If the loader yields micro-batches, "
                "write: "
                "for window in windows(loader, accumulation_steps=8): accumulate(window)."
            )

    def close(self) -> None:
        """Note the schedulers' counts at the end of a window, which steps each once."""
        if self._schedulers:
            # Inside a window exactly one step is ours.
            self._compare(self._opened, least=2, most=math.inf)
            self._counts = self._read()

    def _compare(self, counts: list[int | None], *, least: int, most: float) -> None:
        now = self._read()
        if counts == now:
            return
        # Not strict: a state may be loaded between the two, with other schedulers.
        pairs = zip(counts, now, strict=False)
        if any(a is not None and b is not None and least <= b - a <= most for a, b in pairs):
            self._schedulers, self._counts, self._opened = (), [], []
            self._note_what_is_left()
            warn(
                "scheduler.step() was called outside the Accumulator, which steps the scheduler once per "
                "update: "
                "the learning rate changes twice per update. Remove the call, or leave out scheduler=."
            )

    def _note_what_is_left(self) -> None:
        self.watches = bool(self._schedulers) or self._size is not None

    def _read(self) -> list[int | None]:
        return list(map(_count, self._schedulers))


def _count(scheduler: Any) -> int | None:
    """Return the number of steps of a scheduler; of a chained one, its first."""
    inner = getattr(scheduler, "_schedulers", None)
    # A ChainedScheduler has no count of its own.
    found = getattr(scheduler, "last_epoch", None)
    return _count(inner[0]) if found is None and inner else found
