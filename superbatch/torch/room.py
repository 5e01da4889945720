"""How much room there is for micro-batches, read from the limit and from what real ones leave of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from ..report.memory import Limit
from ..search import fit_curve
from .instruments import Instruments
from .ledger import Ledger
from .trials import Known, largest, reach

# What is left free of what there is room for. At a limit that an allocation hits, as RLIMIT_AS is hit, a
# failure can be recovered from; at others the system ends the process.
DEADLY = 0.10
LEAST_MARGIN = 2**19

# Kernels, threads and libraries take memory at their first use, which no prediction knows.
AT_FIRST = {"cpu": 128 * 2**20, "cuda": 256 * 2**20}

# A heap that keeps what is freed falls to pieces, and needs a multiple of the tensors' own bytes: up to 2.5
# was measured with glibc's malloc, whose threshold for mappings moves, on a conv net, a transformer, an MLP.
# There is no telling when, so measurements say nothing; with MALLOC_MMAP_THRESHOLD_=65536 there are no holes.
HOLES = 3.0
_HOLED = 0.25
_LEAST_HOLES = 2**24


class Room:
    """The bytes that there is room for, kept up to date by every measured micro-batch.

    Args:
        device: whose memory.
        optimizers: whose state may not exist yet.
        instruments: what to measure with.
        margin: the share that is left free.
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
        self.limit: Limit | None = None  # as it was first read
        self.total: int | None = None  # bytes that there is room for at the beginning of a window
        self.checked = 0.0  # when, by time.perf_counter
        self._state = 0  # bytes of optimizer state that does not exist yet
        self._held = 0  # bytes of the last window's gradients, which are kept until the next one
        self._each = 0  # bytes that stay in use with each new size: kernels that were made for it
        self._kernels: list[int] = []  # bytes that do so for the sizes that were run
        self._holed = False

    # -- how large ---------------------------------------------------------------------------------------

    def top(self) -> int:
        """How much may be used of what there is room for."""
        assert self.total is not None and self.limit is not None
        if self._holed:
            return int(self.total / HOLES)
        deadly = self._device.type == "cpu" and not self.limit.by.startswith("RLIMIT")
        return int(self.total * (1 - max(self._margin, DEADLY if deadly else 0.0))) - LEAST_MARGIN

    def largest(self, known: Known) -> int:
        """The largest size that fits, as far as is known; a size that was not run yet costs its kernels."""
        size = largest(known, self.top())
        return size if size <= known.tried else max(known.tried, largest(known, self.top() - 2 * self._each))

    def with_new(self, known: Known, sizes: Sequence[int]) -> int:
        """The largest of these sizes, or less if there is no room for it and for kernels of new ones."""
        new = sum(size not in known.runs for size in set(sizes))
        if not known.runs or self._holed:
            return max(sizes)
        kernels = max(self._kernels[1:], default=self._each)
        budget = self.top() - new * kernels if new else self._bound()
        return max(1, min(max(sizes), largest(known, budget)))

    def _bound(self) -> int:
        """How much a size that was settled on may need: a part of the margin is left."""
        assert self.total is not None
        return self.total - (self.total - self.top()) // 3

    def largest_alone(self, known: Known) -> int:
        """The largest size that would fit if no other had been run: kernels of trials stay in memory."""
        # The first one includes what any size needs once; one size stays, whichever it is.
        kernels = min(self._kernels[1:], default=0) * len(self._kernels[1:])
        return max(self.largest(known), largest(known, self.top() + kernels))

    def reach(self, known: Known, others: Iterator[Known]) -> int:
        """The largest micro-batch that may be run next (see `trials.reach`)."""
        assert self.total is not None
        ratios = [max(o.needed.values()) / max(1, o.curve.at(o.tried)) for o in others if o.needed]
        return reach(
            known,
            total=self.total,
            top=self.top() - 2 * self._each,
            at_first=0 if ratios else AT_FIRST.get(self._device.type, 0),
            each=self._each,
            ratio=max(ratios, default=0.0),
        )

    # -- the limit ---------------------------------------------------------------------------------------

    def read(self, known: Known) -> None:
        """Read the limit for the first time, and leave room for the state that the first update makes."""
        self.limit = self.limit or self._tools.limit()
        if known.peaks:
            self._state = known.peaks[0].optimizer_state
        else:
            made = any(len(state) for optimizer in self._optimizers for state in optimizer.state.values())
            self._state = 0 if made else 2 * known.gradients
        self.look(known)

    def look(self, known: Known) -> None:
        """Read the limit between two windows."""
        self._note(known, self._tools.limit().bytes + self._held)

    def updated(self, known: Known | None) -> None:
        """Note that an update was made: the optimizer's state exists from now on."""
        self._state = 0
        if known is not None and self._device.type == "cpu":
            self._held = known.gradients  # see boundary.zero_grad

    def _note(self, known: Known, free: int) -> None:
        """Note what is free at the beginning of a window; a size that no longer fits is looked for anew."""
        self.total = free - self._state
        if not known.size:
            return
        if (
            known.demand().at(min(known.size, known.used or known.size)) > self._bound()
            or self.total > 1.25 * known.total
        ):
            known.size = 0

    # -- measuring ---------------------------------------------------------------------------------------

    @contextmanager
    def measured(
        self, known: Known, samples: int, *, first: bool, timed: Callable[[Any, Any], None]
    ) -> Iterator[None]:
        """Measure one micro-batch.

        Args:
            known: what is known of its shape, where the result is noted.
            samples: of it.
            first: whether it is the first one of its window.
            timed: is told when it began and ended, by the clock of the instruments.
        """
        tools, fresh = self._tools, samples not in known.runs
        free = tools.limit().bytes
        tools.meter.start()
        start = tools.now()
        yield
        end = tools.now()
        peak = tools.meter.stop()
        self.checked = time.perf_counter()
        if fresh and peak is not None and tools.holes() > max(_HOLED * peak, _LEAST_HOLES):
            self._holed = True
        kept = 0
        if fresh and not self._holed:
            kept = max(0, free - tools.limit().bytes - (known.gradients if first else 0))
            if not first:
                self._kernels.append(kept)
                self._each = kept
        if self._holed:
            known.needed = {size: known.curve.at(size) for size in known.needed}
            known.note(samples, None, first=first)
        else:
            known.note(samples, peak, first=first, kept=kept)
        self._note(known, (free if first else free + known.gradients) - kept)
        timed(start, end)

    @contextmanager
    def probed(self, known: Known, samples: int, *, first: bool) -> Iterator[None]:
        """Measure a small micro-batch of a model that cannot be predicted, by the tensors that it makes.

        Two of them make the curve. The first one of a window makes the gradients too, and is left out.

        Args:
            known: of its shape.
            samples: of it.
            first: whether it is the first one of its window.
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
