"""Measurements of micro-batches of one shape, and the largest size to try next.

Bytes are counted from the beginning of a window, when there are no gradients yet. `total` is the free memory
at that point, once all optimizer state exists; `needed` is what a micro-batch needs of it. Every measured
micro-batch gives both numbers:

    first of a window:  needed = measured + gradients that do not exist yet      total = free
    a later one:        needed = measured + gradients                            total = free + gradients
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from superbatch.results.memory import How, Peak
from superbatch.tuning.search import APART, MemoryCurve, corrected, fit_curve

# Share of the total that the first trial may need by the prediction: it may need twice as much and still fit.
_UNMEASURED = 0.5

# The same share after one small micro-batch, which has measured the memory that is allocated only once.
_MEASURED = 0.6

# The next trial goes this share of the way from the largest measured size to the limit. It goes all the way
# if less than _NEAR of the total is left, or if over _FAR is in use and the slope errs by at most _STRAIGHT.
_STRIDE = 0.75
_NEAR = 0.15
_FAR = 0.35
_STRAIGHT = 0.05

_ROUGH = 0.02  # largest share of estimated bytes in a value that is compared with exact ones
_BEYOND = 0.1  # a size larger than all others by this share shows how much memory a larger size keeps

# Attributes that are saved as they are.
_SAVED = ("how", "gradients", "needed", "sizes", "timings", "size", "total", "largest")


@dataclass
class SizeHistory:
    """Measurements of micro-batches of one shape.

    Attributes:
        peaks: predicted peaks, ascending in samples.
        how: kind of the prediction.
        curve: predicted bytes of a micro-batch, by samples.
        first: predicted bytes of a window's first micro-batch, when there are no gradients yet.
        gradients: bytes of a window's gradients.
        needed: bytes that real micro-batches needed, by samples.
        rough: sizes whose `needed` was measured in the first micro-batch of a window, with the bytes of
            gradients estimated.
        runs: number of measured micro-batches, by samples.
        measured: measured peaks beyond the memory in use before, by samples; for reports.
        sizes: sizes to time, ascending.
        timings: seconds per sample, by target size, in order.
        size: final size of the search; 0 during the search.
        total: available bytes when the search ended.
        largest: last estimate of the largest size that fits; 0 before the first estimate.
        kept_beyond: bytes kept by the last size that exceeded all earlier ones, and the number of samples
            by which it exceeded them.
    """

    peaks: list[Peak]
    how: How
    curve: MemoryCurve
    first: MemoryCurve
    gradients: int
    needed: dict[int, int] = field(default_factory=dict[int, int])
    rough: set[int] = field(default_factory=set[int])
    runs: dict[int, int] = field(default_factory=dict[int, int])
    measured: dict[int, int] = field(default_factory=dict[int, int])
    sizes: list[int] = field(default_factory=list[int])
    timings: dict[int, list[float]] = field(default_factory=dict[int, "list[float]"])
    size: int = 0
    total: int = 0
    largest: int = 0
    kept_beyond: tuple[int, int] = (0, 1)

    @classmethod
    def predicted(cls, peaks: Sequence[Peak], how: How) -> SizeHistory:
        """Return a history with predicted peaks only.

        Examples:
            >>> peak = Peak(
            ...     samples=8,
            ...     bytes=700,
            ...     phase="backward",
            ...     first=450,
            ...     forward=400,
            ...     backward=500,
            ...     optimizer=300,
            ...     gradients=100,
            ...     optimizer_state=200,
            ...     activations=300,
            ... )
            >>> history = SizeHistory.predicted([peak], "fake tensors")
            >>> history.curve.at(8), history.missing(8)
            (500, 50)
        """
        ordered = sorted(peaks, key=lambda peak: peak.samples)
        return cls(
            peaks=ordered,
            how=how,
            curve=fit_curve([(peak.samples, max(peak.forward, peak.backward)) for peak in ordered]),
            first=fit_curve([(peak.samples, peak.first) for peak in ordered]),
            gradients=ordered[0].gradients,
        )

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> SizeHistory:
        """Restore a history from the result of `state_dict`.

        Examples:
            >>> curve = fit_curve([(1, 10), (2, 20)])
            >>> before = SizeHistory([], "fake tensors", curve, curve, gradients=3, size=7)
            >>> SizeHistory.from_state(before.state_dict()) == before
            True
        """
        curves = {name: fit_curve([(n, size) for n, size in state[name]]) for name in ("curve", "first")}
        return cls(peaks=[], **curves, **{name: deepcopy(state[name]) for name in _SAVED})

    def state_dict(self) -> dict[str, Any]:
        """Return the history as plain containers, without peaks, which only reports show."""
        # Without `runs`: a resumed run, maybe on another machine, measures each size again.
        curves = {"curve": self.curve, "first": self.first}
        points = {name: [list(point) for point in curve.points] for name, curve in curves.items()}
        return {**points, **{name: deepcopy(getattr(self, name)) for name in _SAVED}}

    @property
    def tried(self) -> int:
        """Return the largest size that was run; 0 before any run."""
        return max(self.needed, default=0)

    def demand(self) -> MemoryCurve:
        """Return the memory curve of micro-batches: the prediction, corrected by measurements."""
        return corrected(self.curve, list(self.needed.items()))

    def missing(self, samples: int) -> int:
        """Return the bytes of gradients, which the first micro-batch of a window does not need yet."""
        # At most the gradients, even if the difference of the two predicted curves is larger.
        return min(self.gradients, max(0, self.curve.at(samples) - self.first.at(samples)))

    def record_kept(self, samples: int, kept: int) -> None:
        """Record the memory that a size larger than all others keeps; call it before `record`."""
        by = samples - max(self.runs, default=0)
        # Small increments are accumulated, because each alone is too small to measure.
        (before, more) = (0, 0) if by > _BEYOND * samples else self.kept_beyond
        self.kept_beyond = before + kept, more + by

    def keeps_beyond(self, samples: int) -> int:
        """Return an estimate of the bytes that a size larger than all others keeps in buffers of libraries.

        Buffers grow in steps, so a slightly larger size is estimated to keep as much as the last one, and a
        much larger one in proportion. After the very first size the estimate is at most twice the bytes that
        it kept, because most of these bytes serve all sizes.
        """
        (kept, by), most = self.kept_beyond, max(self.runs, default=0)
        growth = max(1.0, (samples - most) / by)
        return int(kept * (growth if len(self.runs) > 1 else min(growth, 2.0))) if samples > most else 0

    def record(self, samples: int, peak: int | None, *, first: bool, kept: int = 0) -> None:
        """Record a real micro-batch.

        Args:
            samples: number of its samples.
            peak: measured peak beyond the memory in use before; None if it could not be measured.
            first: it was the first one of its window.
            kept: bytes that stay in use, such as kernels compiled for this size.
        """
        runs = self.runs[samples] = self.runs.get(samples, 0) + 1
        if peak is None:
            # Without a measurement, use the estimate.
            self.needed.setdefault(samples, self.demand().at(samples))
            return
        self.measured[samples] = peak
        exact = self.needed.keys() - self.rough
        # A measurement of this or a larger size with all gradients exists, and is more precise.
        if first and samples <= max(exact, default=0):
            return
        needed = peak - kept + (self.missing(samples) if first else self.gradients)
        # The second run replaces the first, which may need extra memory; afterwards the maximum counts.
        self.needed[samples] = max(needed, self.needed.get(samples, 0)) if runs > 2 else needed
        if first:
            self.rough.add(samples)
            # A smaller size gives no slope if gradients may have exceeded the rest of its memory.
            self._drop(other for other in self.rough if other < samples and self._is_hidden(other))
            return
        self.rough.discard(samples)
        # The slope between a rough value and an exact one is useless, unless the estimated part is small.
        self._drop(other for other in self.rough if self.missing(other) > _ROUGH * needed)

    def next_largest(
        self, *, total: int, usable: int, at_first: int, kernels: int = 0, ratio: float = 0.0
    ) -> int:
        """Return the largest micro-batch that may run next.

        A micro-batch much larger than all measured ones relies on the prediction alone, so sizes grow in
        steps. The first one may need half of the total by the prediction. The next ones go three quarters of
        the way to the limit, or all the way if the measurements rise as predicted.

        Args:
            total: available bytes.
            usable: bytes of these that may be used; the difference is the margin.
            at_first: bytes that kernels and threads may allocate at their first use, which predictions do not
                include.
            kernels: bytes that each new size keeps.
            ratio: measured bytes per predicted byte for other shapes; 0 if none was measured.

        Returns:
            Number of samples, at least 1.

        Examples:
            >>> line = fit_curve([(1, 10), (10, 100)])
            >>> history = SizeHistory([], "fake tensors", line, line, gradients=0)
            >>> history.next_largest(total=1000, usable=980, at_first=0)
            50
            >>> history.record(50, 500, first=True)
            >>> [history.next_largest(total=1000, usable=usable, at_first=0) for usable in (980, 600)]
            [86, 60]
        """
        if not self.needed:
            # Measurements of another shape have shown the error of predictions.
            share = 0.8 / max(ratio, 1.0) if ratio else _UNMEASURED
            return max(1, self.curve.largest(int(min(usable, share * total)) - at_first, self.farthest()))
        highest = max(self.needed.values())
        # One small micro-batch has measured the memory that is allocated only once, e.g. for kernels.
        if highest < 0.3 * total:
            budget = _MEASURED * total
        elif usable - highest <= _NEAR * total or (
            highest > _FAR * total and self._rises_as_predicted(kernels)
        ):
            budget = usable
        else:
            budget = highest + _STRIDE * (usable - highest)
        return max(1, self.demand().largest(int(min(usable, budget)), self.farthest()))

    def farthest(self) -> int:
        """Return the largest size for which the curve is used; farther from the points it is unreliable."""
        return 16 * max(self.curve.points[-1][0], self.tried)

    def _rises_as_predicted(self, kernels: int) -> bool:
        low, high = min(self.needed), self.tried
        # Two sizes that are close to each other give no reliable slope.
        if low > APART * high:
            return False
        rise = self.curve.at(high) - self.curve.at(low)
        return abs(self.needed[high] - self.needed[low] - rise) <= _STRAIGHT * rise + kernels

    def _is_hidden(self, samples: int) -> bool:
        """Return whether the gradients that a first micro-batch makes may exceed its other memory."""
        return self.first.at(samples) < 2 * self.gradients

    def _drop(self, sizes: Iterable[int]) -> None:
        for size in list(sizes):
            self.rough.discard(size)
            del self.needed[size]
