"""Warnings about mistakes that show only over several windows; each warning is given once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..warn import warn

_WINDOWS = 10  # consecutive windows of one micro-batch, before the warning


class SlipWatch:
    """Warns of schedulers that the user's loop steps too, and of batches that are never split.

    Args:
        schedulers: the schedulers that the accumulator steps.
        microbatch_size: the option; batches are watched only if it is an int.

    Attributes:
        watches: False once there is nothing left to warn of; the engine then makes no calls.

    Examples:
        >>> watch = SlipWatch([], 8)
        >>> watch.open([7, 7, 6])
        >>> watch.close()
    """

    def __init__(self, schedulers: Sequence[Any], microbatch_size: object) -> None:
        self._schedulers = schedulers
        # Steps of each scheduler at the end of the last window; empty before the first one, because a state
        # may be loaded before it.
        self._counts: list[int | None] = []
        self._opened: list[int | None] = []  # steps at the beginning of the open window
        self._size = microbatch_size if isinstance(microbatch_size, int) else None
        self._unsplit = 0  # number of batches so far; the first that is split ends the watch
        self._set_watches()

    def open(self, samples: Sequence[int] | None) -> None:
        """Compare the schedulers' counts with those after the last window, and count unsplit batches.

        Args:
            samples: number of samples of each micro-batch; None for a `Window`, whose micro-batches are the
                loader's.
        """
        if self._schedulers:
            # One or two steps since the last window are the user's; a loaded state makes a larger jump.
            self._compare(self._counts, least=1, most=2)
            self._opened = self._read()
        if self._size is not None:
            self._count_unsplit(samples, self._size)

    def _count_unsplit(self, samples: Sequence[int] | None, size: int) -> None:
        if samples is None or len(samples) > 1:
            self._size = None  # a batch was split, so the watch ends
            self._set_watches()
            return
        self._unsplit += 1
        if self._unsplit == _WINDOWS:
            self._size = None
            self._set_watches()
            warn(
                f"The first {_WINDOWS} batches were one micro-batch each ({samples[0]} samples, "
                f"microbatch_size={size}), so nothing was accumulated. If the loader yields micro-batches, "
                "write: for window in windows(loader, accumulation_steps=8): accumulate(window)."
            )

    def close(self) -> None:
        """Record the schedulers' counts at the end of a window, which has stepped each scheduler once."""
        if self._schedulers:
            # The window makes one step itself; a second one is the user's.
            self._compare(self._opened, least=2, most=math.inf)
            self._counts = self._read()

    def _compare(self, counts: list[int | None], *, least: int, most: float) -> None:
        now = self._read()
        if counts == now:
            return
        # Not strict, because `counts` is empty before the first window.
        pairs = zip(counts, now, strict=False)
        if any(a is not None and b is not None and least <= b - a <= most for a, b in pairs):
            self._schedulers, self._counts, self._opened = (), [], []
            self._set_watches()
            warn(
                "scheduler.step() was called outside of the Accumulator, which also steps the scheduler, so "
                "the learning rate changes twice per update. Remove the call, or do not pass scheduler=."
            )

    def _set_watches(self) -> None:
        self.watches = bool(self._schedulers) or self._size is not None

    def _read(self) -> list[int | None]:
        return list(map(_count, self._schedulers))


def _count(scheduler: Any) -> int | None:
    """Return the number of steps of a scheduler, or None if it does not count them."""
    inner = getattr(scheduler, "_schedulers", None)
    # A ChainedScheduler has no count of its own, so the count of its first scheduler is used.
    found = getattr(scheduler, "last_epoch", None)
    return _count(inner[0]) if found is None and inner else found
