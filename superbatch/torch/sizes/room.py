"""Memory available to micro-batches (the room), from the limit and from measured micro-batches."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from superbatch.results.memory import Limit
from superbatch.tuning.search import fit_curve

from ..memory.ledger import Ledger
from .instruments import Instruments
from .trials import SizeHistory, most_of, reach

# Share of the room that is left free under limits at which the system ends the process. Under limits at which
# an allocation fails, such as RLIMIT_AS, the run can recover.
DEADLY = 0.10
LEAST_MARGIN = 2**19

# Memory that kernels, threads and libraries allocate at their first use; predictions do not include it.
AT_FIRST = {"cpu": 128 * 2**20, "cuda": 256 * 2**20}

# A heap that holds freed memory is fragmented, and may need a multiple of the tensors' bytes: with glibc's
# malloc, whose mmap threshold is dynamic, up to 2.5 times was measured on a conv net, a transformer and an
# MLP. This cannot be predicted, so measurements are not used. With MALLOC_MMAP_THRESHOLD_=65536 there are no
# holes.
HOLES = 3.0
_HOLED = 0.25
_LEAST_HOLES = 2**24

# Factors of growth of the room from which a search starts again: for the fastest size, and for the largest
# one before any run; and for the largest one later.
_MUCH = 1.25
_MORE = 1.05
_LESS = 0.9  # factor on the share of the room in use, after the allocator has had trouble
_CALM = 100  # windows without trouble, after which the full share is used again
_CLEANED = 2  # runs of each size: in the first, libraries also try out algorithms


class Room:
    """Bytes available to micro-batches, updated by every measured micro-batch.

    Args:
        device: device of the memory.
        optimizers: optimizers whose state may not exist yet.
        instruments: sources of measurements.
        margin: share of the room that is left free.
    """

    def __init__(
        self,
        device: torch.device,
        optimizers: Sequence[Optimizer],
        instruments: Instruments,
        *,
        margin: float,
    ) -> None:
        self._device, self._optimizers = device, tuple(optimizers)
        self._tools, self._margin = instruments, margin
        self.limit: Limit | None = None  # first reading
        self.total: int | None = None  # bytes available at the beginning of a window
        self.checked = 0.0  # time of the last reading, by time.perf_counter
        self._state = 0  # bytes of optimizer state that does not exist yet
        self._state_is_new = False  # the state exists, but the limit was not read since
        self._held = 0  # bytes of the last window's gradients, which are kept until the next window
        self._kept: list[int] = []  # bytes that new sizes below others have left in use: their kernels
        self._holed = False
        self._share = 1.0  # share of the total that may be used
        self._calm = 0  # windows since the last trouble
        self._retries = instruments.retries()  # retries of the allocator, except in first runs of a size

    # -- how large ---------------------------------------------------------------------------------------

    def top(self) -> int:
        """Return the bytes that micro-batches may use."""
        assert self.total is not None and self.limit is not None
        if self._holed:
            return int(self.total / HOLES)
        deadly = self._device.type == "cpu" and not self.limit.by.startswith("RLIMIT")
        margin = max(self._margin, DEADLY if deadly else 0.0)
        return int(self.total * self._share * (1 - margin)) - LEAST_MARGIN

    def _bound(self) -> int:
        """Return the bytes that a size in use may need, with a part of the margin, because readings vary."""
        assert self.total is not None
        return self.top() if self._holed else (2 * int(self.total * self._share) + self.top()) // 3

    def largest(self, known: SizeHistory) -> int:
        """Return the largest size that may run; a new size also needs room for the memory that it keeps.

        The result changes only after a new size was run, if it no longer fits, or if a clearly larger one
        fits, so that sizes do not change with every reading.
        """
        demand, bound, now = known.demand(), self._bound(), known.largest
        stays = now and demand.at(now) + self._keeps(known, now) <= bound
        run = max((size for size in known.runs if demand.at(size) <= bound), default=0)
        found = max(self._largest_new(known), run)
        # Before the first run, memory for kernels is still free, so the room seems larger than it is.
        if not stays or found > (_MORE if known.runs else _MUCH) * now:
            known.largest = found
        return known.largest

    def with_new(self, known: SizeHistory, sizes: Sequence[int]) -> int:
        """Return the largest of these sizes; a smaller one if the memory that new sizes keep does not fit."""
        keep = sum(self._keeps(known, size) for size in set(sizes))
        if known.demand().at(max(sizes)) + keep <= self._bound():
            return max(sizes)
        return self._largest_new(known)  # one new size at a time: the next search follows it

    def _largest_new(self, known: SizeHistory) -> int:
        """Return the largest size that fits, including the memory that it keeps if it is new."""
        demand, kernels, counts = known.demand(), self._kernels(known), not self._holed

        def needs(samples: int) -> int:
            return demand.at(samples) + max(kernels, counts * known.keeps_beyond(samples))

        return max(1, bisect_right(range(1, most_of(known) + 1), self.top(), key=needs))

    def _keeps(self, known: SizeHistory, samples: int) -> int:
        """Return an estimate of the bytes that a size keeps from its first run on."""
        if samples in known.runs or self._holed:
            return 0
        return max(self._kernels(known), known.keeps_beyond(samples))

    def _kernels(self, known: SizeHistory) -> int:
        """Return an estimate of the bytes that any new size keeps."""
        if self._holed or not known.runs:
            return 0
        return max(self._kept[-3:], default=known.kept_beyond[0])

    def reach(self, known: SizeHistory, others: Iterator[SizeHistory]) -> int:
        """Return the largest micro-batch that the measurements so far allow (see `trials.reach`)."""
        assert self.total is not None
        # The memory that a new size keeps is visible only in micro-batches after the first of a window.
        top = self._bound() if self._kept else self.top()
        ratios = [max(o.needed.values()) / max(1, o.curve.at(o.tried)) for o in others if o.needed]
        return reach(
            known,
            total=self.total,
            top=top,
            at_first=0 if ratios else AT_FIRST.get(self._device.type, 0),
            each=self._kernels(known),
            ratio=max(ratios, default=0.0),
        )

    def is_tight(self, known: SizeHistory) -> bool:
        """Return whether the allocator has retried since the last call, although there seems to be room.

        Then a smaller share of the room is used, until some windows had no retry. Retries in the first runs
        of a size do not count: the caches hold blocks of other sizes, and reaching the limit is part of the
        search.
        """
        retries = self._tools.retries()
        self._calm, is_tight = self._calm + 1, retries > self._retries
        self._retries = retries
        if is_tight:
            self._share, self._calm = self._share * _LESS, 0
            known.largest = 0
        elif self._share < 1.0 and self._calm >= _CALM:
            self._share, self._calm = min(1.0, self._share / _LESS), 0
            known.largest = 0
        return is_tight

    # -- the limit ---------------------------------------------------------------------------------------

    def read(self, known: SizeHistory) -> None:
        """Read the limit for the first time, and reserve memory for the state of the first update."""
        self.limit = self.limit or self._tools.limit()
        if known.peaks:
            self._state = known.peaks[0].optimizer_state
        else:
            made = any(len(state) for optimizer in self._optimizers for state in optimizer.state.values())
            self._state = 0 if made else 2 * known.gradients
        self.look(known, ())

    def look(self, known: SizeHistory, shapes: Iterable[SizeHistory]) -> None:
        """Read the limit between two windows."""
        self._note(known, self._tools.limit().bytes + self._held)
        if self._state_is_new:  # use the room even if it is only a little more than estimated
            self._state_is_new = False
            for shape in shapes:
                shape.largest = 0

    def updated(self, known: SizeHistory | None) -> None:
        """Record that an update was made, so that the optimizer's state exists."""
        if self._state:
            self._state_is_new, self.checked = True, -math.inf
        self._state = 0
        if known is not None and self._device.type == "cpu":
            self._held = known.gradients  # see update_rule.zero_grad

    def _note(self, known: SizeHistory, free: int) -> None:
        """Record the free memory at the beginning of a window; search anew if a size no longer fits."""
        self.total = free - self._state
        if known.demand().at(known.size or 1) > self._bound() or self.total > _MUCH * known.total:
            known.size = 0

    # -- measuring ---------------------------------------------------------------------------------------

    @contextmanager
    def measured(
        self, known: SizeHistory, samples: int, *, first: bool, timed: Callable[[Any, Any], None]
    ) -> Iterator[None]:
        """Measure one micro-batch inside the context.

        Args:
            known: history of its shape, which receives the result.
            samples: number of its samples.
            first: it is the first one of its window.
            timed: function that receives its start and end by the clock of the instruments.
        """
        tools, fresh = self._tools, samples not in known.runs
        if cleaned := known.runs.get(samples, 0) < _CLEANED:
            tools.clean()
        retries = tools.retries()
        free = tools.limit().bytes
        tools.meter.start()
        start = tools.now()
        yield
        end = tools.now()
        peak = tools.meter.stop()
        if cleaned:
            self._retries += tools.retries() - retries
        self.checked = time.perf_counter()
        if fresh and peak is not None and tools.holes() > max(_HOLED * peak, _LEAST_HOLES):
            self._holed = True
        kept = 0
        if fresh and not self._holed:
            kept = max(0, free - tools.limit().bytes - (known.gradients if first else 0))
            if samples > max(known.runs, default=0):
                known.note_kept(samples, kept)
            elif not first:
                self._kept.append(kept)
        if self._holed:
            known.needed = {size: known.curve.at(size) for size in known.needed}
            known.note(samples, None, first=first)
        else:
            known.note(samples, peak, first=first, kept=kept)
        if fresh:
            known.largest = 0
        self._note(known, (free if first else free + known.gradients) - kept)
        timed(start, end)

    @contextmanager
    def probed(self, known: SizeHistory, samples: int, *, first: bool) -> Iterator[None]:
        """Measure the tensors of a small micro-batch inside the context, for a model without a prediction.

        Two measurements give the curve. The first micro-batch of a window also makes the gradients, so it is
        not measured.

        Args:
            known: history of its shape.
            samples: number of its samples.
            first: it is the first one of its window.
        """
        ledger = Ledger(self._device, rounded=64)
        with ledger:
            yield
        if first:
            return
        known.measured[samples] = ledger.peak
        if len(known.measured) >= 2:
            known.curve = fit_curve([(n, peak + known.gradients) for n, peak in known.measured.items()])
            known.first = known.curve
            known.needed.update({n: known.curve.at(n) for n in known.measured})
