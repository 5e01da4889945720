"""Memory budget of micro-batches, from the memory limit and from measured micro-batches."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from superbatch.results.memory import Limit
from superbatch.tuning.search import fit_curve

from ..memory.ledger import Ledger
from .instruments import Instruments
from .trials import SizeHistory

# Share of the budget that is left free under limits at which the system ends the process. Under limits at
# which an allocation fails, such as RLIMIT_AS, the run can recover.
DEADLY = 0.10
LEAST_MARGIN = 2**19

# Memory that kernels, threads and libraries allocate at their first use; predictions do not include it.
AT_FIRST = {"cpu": 128 * 2**20, "cuda": 256 * 2**20}

# A heap that holds freed memory is fragmented, and may need a multiple of the tensors' bytes. Up to 2.9 times
# was measured with glibc's malloc, whose mmap threshold is dynamic. This cannot be predicted, so measurements
# are not used. With MALLOC_MMAP_THRESHOLD_=65536 there are no holes.
HOLES = 3.0
_HOLED = 0.25  # share of a peak from which freed bytes count as holes
_LEAST_HOLES = 2**24

# Factors of growth of the budget from which a search starts again.
_MUCH = 1.25  # for the fastest size, and for the largest one before any run
_MORE = 1.05  # for the largest one later
_LESS = 0.9  # factor on the share of the budget in use, after the allocator has retried
_CALM = 100  # windows without a retry, after which the full share is used again
_CLEANED = 2  # runs of each size that begin with empty caches: in the first, libraries try out algorithms


class MemoryBudget:
    """Bytes available to micro-batches, updated by every measured micro-batch.

    Args:
        device: device of the memory.
        optimizers: optimizers whose state may not exist yet.
        instruments: sources of measurements.
        margin: share of the budget that is left free.
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
        self._instruments, self._margin = instruments, margin
        self.limit: Limit | None = None  # first reading
        self.total: int | None = None  # bytes available at the beginning of a window
        self.checked = 0.0  # time of the last reading, by time.perf_counter
        self._state = 0  # bytes of optimizer state that does not exist yet
        self._state_is_new = False  # the state exists, but the limit was not read since
        self._kept_gradients = 0  # bytes of the last window's gradients, which are kept until the next window
        self._measured_kernel_bytes: list[int] = []  # kept for kernels by each new size below the largest
        self._holed = False
        self._share = 1.0  # share of the total that may be used
        self._calm = 0  # windows since the last retry
        self._retries = instruments.retries()  # retries of the allocator, except in first runs of a size

    # -- how large ---------------------------------------------------------------------------------------

    def usable(self) -> int:
        """Return the bytes that micro-batches may use."""
        assert self.total is not None and self.limit is not None
        if self._holed:
            return int(self.total / HOLES)
        deadly = self._device.type == "cpu" and not self.limit.by.startswith("RLIMIT")
        margin = max(self._margin, DEADLY if deadly else 0.0)
        return int(self.total * self._share * (1 - margin)) - LEAST_MARGIN

    def _usable_by_known_sizes(self) -> int:
        """Return the bytes that a size in use may need; usually more than `usable`, because readings vary."""
        assert self.total is not None
        return self.usable() if self._holed else (2 * int(self.total * self._share) + self.usable()) // 3

    def largest(self, history: SizeHistory) -> int:
        """Return the largest size that may run; a new size also needs room for the memory that it keeps.

        The result changes only after a new size was run, if it no longer fits, or if a clearly larger one
        fits. So sizes do not change with every reading of the memory.
        """
        demand, bound, now = history.demand(), self._usable_by_known_sizes(), history.largest
        still_fits = now and demand.at(now) + self._kept_by_next_run(history, now) <= bound
        run = max((size for size in history.runs if demand.at(size) <= bound), default=0)
        found = max(self._largest_new(history), run)
        # Before the first run, memory for kernels is still free, so the budget seems larger than it is.
        if not still_fits or found > (_MORE if history.runs else _MUCH) * now:
            history.largest = found
        return history.largest

    def with_new(self, history: SizeHistory, sizes: Sequence[int]) -> int:
        """Return the largest of these sizes if it fits beside what new sizes keep; else a smaller one."""
        keep = sum(self._kept_by_next_run(history, size) for size in set(sizes))
        if history.demand().at(max(sizes)) + keep <= self._usable_by_known_sizes():
            return max(sizes)
        return self._largest_new(history)  # one new size at a time: the next search follows it

    def _largest_new(self, history: SizeHistory) -> int:
        """Return the largest size that fits together with the memory that a new size keeps."""
        demand = history.demand()

        def needs(samples: int) -> int:
            return demand.at(samples) + self._kept_by_new_size(history, samples)

        return max(1, bisect_right(range(1, history.farthest() + 1), self.usable(), key=needs))

    def _kept_by_next_run(self, history: SizeHistory, samples: int) -> int:
        """Return an estimate of the bytes that the next run of a size keeps; 0 after its first run."""
        return 0 if samples in history.runs else self._kept_by_new_size(history, samples)

    def _kept_by_new_size(self, history: SizeHistory, samples: int) -> int:
        """Return an estimate of the bytes that a new size keeps from its first run on."""
        return 0 if self._holed else max(self._kernel_bytes(history), history.keeps_beyond(samples))

    def _kernel_bytes(self, history: SizeHistory) -> int:
        """Return an estimate of the bytes that any new size keeps for its kernels."""
        if self._holed or not history.runs:
            return 0
        return max(self._measured_kernel_bytes[-3:], default=history.kept_beyond[0])

    def next_largest(self, history: SizeHistory, others: Iterator[SizeHistory]) -> int:
        """Return the largest size that the measurements allow next (see `SizeHistory.next_largest`)."""
        assert self.total is not None
        # The memory that a new size keeps is visible only in micro-batches after the first of a window.
        usable = self._usable_by_known_sizes() if self._measured_kernel_bytes else self.usable()
        ratios = [max(o.needed.values()) / max(1, o.curve.at(o.tried)) for o in others if o.needed]
        return history.next_largest(
            total=self.total,
            usable=usable,
            at_first=0 if ratios else AT_FIRST.get(self._device.type, 0),
            kernels=self._kernel_bytes(history),
            ratio=max(ratios, default=0.0),
        )

    def is_tight(self, history: SizeHistory) -> bool:
        """Return whether the allocator has retried since the last call, although the budget seems enough.

        Then a smaller share of the budget is used, until enough windows had no retry. Retries in the first
        runs of a size do not count: the caches hold blocks of other sizes, and the search reaches the limit.
        """
        retries = self._instruments.retries()
        self._calm, is_tight = self._calm + 1, retries > self._retries
        self._retries = retries
        if is_tight:
            self._share, self._calm = self._share * _LESS, 0
            history.largest = 0
        elif self._share < 1.0 and self._calm >= _CALM:
            self._share, self._calm = min(1.0, self._share / _LESS), 0
            history.largest = 0
        return is_tight

    # -- the limit ---------------------------------------------------------------------------------------

    def read(self, history: SizeHistory) -> None:
        """Read the limit for the first time, and estimate the optimizer state of the first update."""
        self.limit = self.limit or self._instruments.limit()
        if history.peaks:
            self._state = history.peaks[0].optimizer_state
        else:
            made = any(len(state) for optimizer in self._optimizers for state in optimizer.state.values())
            self._state = 0 if made else 2 * history.gradients
        self.read_again(history, ())

    def read_again(self, history: SizeHistory, shapes: Iterable[SizeHistory]) -> None:
        """Read the limit between two windows."""
        self._set_total(history, self._instruments.limit().bytes + self._kept_gradients)
        if self._state_is_new:  # use the budget even if it is only a little more than estimated
            self._state_is_new = False
            for shape in shapes:
                shape.largest = 0

    def updated(self, history: SizeHistory | None) -> None:
        """Record that an update was made, so that the optimizer's state exists."""
        if self._state:
            self._state_is_new, self.checked = True, -math.inf
        self._state = 0
        if history is not None and self._device.type == "cpu":
            self._kept_gradients = history.gradients  # see update_rule.zero_grad

    def _set_total(self, history: SizeHistory, free: int) -> None:
        """Set the total from the free memory at the beginning of a window.

        The search starts again if the size in use no longer fits, or if the budget is much larger.
        """
        self.total = free - self._state
        if (
            history.demand().at(history.size or 1) > self._usable_by_known_sizes()
            or self.total > _MUCH * history.total
        ):
            history.size = 0

    def end_search(self, history: SizeHistory, size: int) -> None:
        """Record the size that a search has found, and the budget at its end."""
        assert self.total is not None
        history.size, history.total = size, self.total

    # -- measuring ---------------------------------------------------------------------------------------

    @contextmanager
    def measured(self, history: SizeHistory, samples: int, *, first: bool) -> Iterator[None]:
        """Measure one micro-batch (`first`: of its window) inside the context, and record its memory."""
        instruments, fresh = self._instruments, samples not in history.runs
        if cleaned := history.runs.get(samples, 0) < _CLEANED:
            instruments.clean()
        retries = instruments.retries()
        free = instruments.limit().bytes
        instruments.meter.start()
        yield
        peak = instruments.meter.stop()
        if cleaned:
            self._retries += instruments.retries() - retries
        self.checked = time.perf_counter()
        if fresh and peak is not None and instruments.holes() > max(_HOLED * peak, _LEAST_HOLES):
            self._holed = True
        kept = 0
        if fresh and not self._holed:
            kept = max(0, free - instruments.limit().bytes - (history.gradients if first else 0))
            if samples > max(history.runs, default=0):
                history.record_kept(samples, kept)
            elif not first:
                self._measured_kernel_bytes.append(kept)
        if self._holed:
            history.needed = {size: history.curve.at(size) for size in history.needed}
            history.record(samples, None, first=first)
        else:
            history.record(samples, peak, first=first, kept=kept)
        if fresh:
            history.largest = 0
        self._set_total(history, (free if first else free + history.gradients) - kept)

    @contextmanager
    def probed(self, history: SizeHistory, samples: int, *, first: bool) -> Iterator[None]:
        """Measure the tensors of a small micro-batch inside the context, for a model without a prediction.

        Two measurements give the curve. The first micro-batch of a window is not measured, because it also
        makes the gradients.
        """
        ledger = Ledger(self._device, rounded=64)
        with ledger:
            yield
        if first:
            return
        history.measured[samples] = ledger.peak
        if len(history.measured) >= 2:
            history.curve = fit_curve([(n, peak + history.gradients) for n, peak in history.measured.items()])
            history.first = history.curve
            history.needed.update({n: history.curve.at(n) for n in history.measured})
