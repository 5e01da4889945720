"""Measurements of micro-batches of one shape, and the largest size to try next.

Bytes count from the beginning of a window, when there are no gradients yet. `total` is the room
at that point, once all optimizer state exists. Every measured micro-batch gives its need and the room
there was:

    first of a window:  needed = measured + gradients that its successors find   total = free
    a later one:        needed = measured + gradients                            total = free + gradients
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from superbatch.results.memory import How, Peak
from superbatch.tuning.search import APART, MemoryCurve, corrected, fit_curve

# Nothing measured: the prediction may be wrong by so much and the micro-batch still fits.
_UNMEASURED = 0.5

# The same with one small micro-batch measured, which shows the memory that is needed once.
_MEASURED = 0.6

# From a measured micro-batch the next one goes this much of the way to the limit; to a near limit in one go,
# and to one that is not near if the measurements rise as predicted.
_STRIDE = 0.75
_NEAR = 0.15
_STRAIGHT = 0.05
_FAR = 0.35
_ROUGH = 0.02
_BEYOND = 0.1  # a size larger than all others by this share shows the memory that such sizes keep


@dataclass
class SizeHistory:
    """Measurements of micro-batches of one shape.

    Attributes:
        peaks: predicted, ascending in samples.
        how: they were predicted.
        curve: predicted bytes of a micro-batch, by samples.
        first: predicted bytes of a window's first micro-batch, before there are gradients.
        gradients: bytes of a window's gradients.
        needed: bytes of real ones, by samples.
        rough: sizes among these of first micro-batches of windows, in which gradients are a guess.
        runs: how many were measured, by samples.
        measured: their peaks beyond the memory in use before each, by samples, for people.
        sizes: that are timed, ascending.
        timings: seconds per sample, by target size, in order.
        size: the size that was settled on; 0 before.
        total: bytes that there was room for then.
        largest: the largest size that there is room for, as last estimated; 0 before.
        kept_beyond: bytes that the last size beyond all others kept, and by how many samples it was beyond.
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

    @property
    def tried(self) -> int:
        """The largest size that was run; 0 before."""
        return max(self.needed, default=0)

    def demand(self) -> MemoryCurve:
        """Memory that micro-batches need: the prediction, corrected by the measurements."""
        return corrected(self.curve, list(self.needed.items()))

    def missing(self, samples: int) -> int:
        """Return the memory that the first micro-batch of a window does not need yet: that of gradients."""
        # Not more than the gradients, however far the two predicted curves are apart.
        return min(self.gradients, max(0, self.curve.at(samples) - self.first.at(samples)))

    def note_kept(self, samples: int, kept: int) -> None:
        """Record the memory that a size beyond all others keeps, before it is given to `note`."""
        by = samples - max(self.runs, default=0)
        # A slightly larger size alone shows nothing: it is added to those before.
        (before, more) = (0, 0) if by > _BEYOND * samples else self.kept_beyond
        self.kept_beyond = before + kept, more + by

    def keeps_beyond(self, samples: int) -> int:
        """The bytes that a size is taken to keep because it is beyond all others: libraries' buffers grow.

        They grow in steps, so a size that is a little beyond is taken to keep as much as the last one did,
        and one that is far beyond more in proportion; at most twice as much after the very first size, which
        kept most of it for all sizes.
        """
        (kept, by), most = self.kept_beyond, max(self.runs, default=0)
        growth = max(1.0, (samples - most) / by)
        return int(kept * (growth if len(self.runs) > 1 else min(growth, 2.0))) if samples > most else 0

    def note(self, samples: int, peak: int | None, *, first: bool, kept: int = 0) -> None:
        """Note a real micro-batch.

        Args:
            samples: of it.
            peak: its measured peak beyond the memory in use before it; None where it cannot be known.
            first: whether it was the first one of its window.
            kept: bytes that stay in use from now on, such as kernels that were made for this size.
        """
        runs = self.runs[samples] = self.runs.get(samples, 0) + 1
        if peak is None:
            # Without a measurement the estimate takes its place.
            self.needed.setdefault(samples, self.demand().at(samples))
            return
        self.measured[samples] = peak
        exact = self.needed.keys() - self.rough
        # A measurement that includes all gradients is known up to this size: it is the better one.
        if first and samples <= max(exact, default=0):
            return
        needed = peak - kept + (self.missing(samples) if first else self.gradients)
        # The first run of a size has needs of its own; afterwards the highest counts.
        self.needed[samples] = max(needed, self.needed.get(samples, 0)) if runs > 2 else needed
        if first:
            self.rough.add(samples)
            # The gradients made meanwhile hide smaller amounts, and so the slope from there.
            self._drop(other for other in self.rough if other < samples and self._hidden(other))
            return
        self.rough.discard(samples)
        # Between a guess and a measurement there is no slope, unless the guess is a small part of both.
        self._drop(other for other in self.rough if self.missing(other) > _ROUGH * needed)

    def _hidden(self, samples: int) -> bool:
        return self.first.at(samples) < 2 * self.gradients

    def _drop(self, sizes: Iterable[int]) -> None:
        for size in list(sizes):
            self.rough.discard(size)
            del self.needed[size]


def known_from(peaks: Sequence[Peak], how: How) -> SizeHistory:
    """Begin with predicted peaks.

    Args:
        peaks: of at least one size.
        how: they were predicted.

    Returns:
        The history with predictions alone.

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
        >>> known = known_from([peak], "fake tensors")
        >>> known.curve.at(8), known.missing(8)
        (500, 50)
    """
    ordered = sorted(peaks, key=lambda peak: peak.samples)
    return SizeHistory(
        peaks=ordered,
        how=how,
        curve=fit_curve([(peak.samples, max(peak.forward, peak.backward)) for peak in ordered]),
        first=fit_curve([(peak.samples, peak.first) for peak in ordered]),
        gradients=ordered[0].gradients,
    )


def reach(
    known: SizeHistory, *, total: int, top: int, at_first: int, each: int = 0, ratio: float = 0.0
) -> int:
    """The largest micro-batch that may be run next.

    A micro-batch far beyond everything measured rests on the prediction alone, so sizes rise in strides: the
    first one is to need at most half of the total by the prediction, the next ones go three quarters of the
    way to the limit, or all of it where the measurements rise as predicted.

    Args:
        known: history of this shape.
        total: bytes that there is room for.
        top: bytes that may be used of these: the margin is the difference.
        at_first: bytes that kernels and threads may take at their first use, which no prediction knows.
        each: bytes that stay in use with each new size.
        ratio: how much micro-batches of other shapes needed for each byte predicted; 0 if none was measured.

    Returns:
        Samples, at least 1: nothing smaller exists.

    Examples:
        >>> peak = Peak(
        ...     samples=10,
        ...     bytes=100,
        ...     phase="forward",
        ...     first=100,
        ...     forward=100,
        ...     backward=100,
        ...     optimizer=0,
        ...     gradients=0,
        ...     optimizer_state=0,
        ...     activations=100,
        ... )
        >>> known = known_from([peak], "fake tensors")
        >>> reach(known, total=1000, top=980, at_first=0)
        50
        >>> known.note(50, 500, first=True)
        >>> reach(known, total=1000, top=980, at_first=0), reach(known, total=1000, top=600, at_first=0)
        (86, 60)
    """
    if not known.needed:
        # Another shape was measured here: that has shown how far predictions are off.
        share = 0.8 / max(ratio, 1.0) if ratio else _UNMEASURED
        return max(1, known.curve.largest(int(min(top, share * total)) - at_first, most_of(known)))
    demand, highest = known.demand(), max(known.needed.values())
    # One small micro-batch has shown the memory that is needed once, such as kernels.
    if highest < 0.3 * total:
        budget = _MEASURED * total
    elif top - highest <= _NEAR * total or (highest > _FAR * total and _rises_as_predicted(known, each)):
        budget = top
    else:
        budget = highest + _STRIDE * (top - highest)
    return max(1, demand.largest(int(min(top, budget)), most_of(known)))


def _rises_as_predicted(known: SizeHistory, each: int) -> bool:
    low, high = min(known.needed), known.tried
    # Sizes that are near each other show no slope.
    if low > APART * high:
        return False
    rise = known.curve.at(high) - known.curve.at(low)
    return abs(known.needed[high] - known.needed[low] - rise) <= _STRAIGHT * rise + each


def most_of(known: SizeHistory) -> int:
    """Return the largest size that a curve is used for: far beyond the predictions it says nothing."""
    return 16 * max(known.curve.points[-1][0], known.tried)


def state_of(known: SizeHistory) -> dict[str, Any]:
    """Plain containers from which `known_of` makes the same again.

    Peaks are left out: only reports show them.
    """
    # Without `runs`: a resumed run measures each size anew, maybe on another machine.
    return {
        "how": known.how,
        "curve": [list(point) for point in known.curve.points],
        "first": [list(point) for point in known.first.points],
        "gradients": known.gradients,
        "needed": dict(known.needed),
        "sizes": list(known.sizes),
        "timings": {size: list(seconds) for size, seconds in known.timings.items()},
        "size": known.size,
        "total": known.total,
        "largest": known.largest,
    }


def known_of(state: dict[str, Any]) -> SizeHistory:
    """Restore a history from the result of `state_of`.

    Examples:
        >>> curve = fit_curve([(1, 10), (2, 20)])
        >>> known = SizeHistory(peaks=[], how="fake tensors", curve=curve, first=curve, gradients=3, size=7)
        >>> known_of(state_of(known)) == known
        True
    """
    return SizeHistory(
        peaks=[],
        how=state["how"],
        curve=fit_curve([(n, size) for n, size in state["curve"]]),
        first=fit_curve([(n, size) for n, size in state["first"]]),
        gradients=state["gradients"],
        needed=dict(state["needed"]),
        sizes=list(state["sizes"]),
        timings={size: list(seconds) for size, seconds in state["timings"].items()},
        size=state["size"],
        total=state["total"],
        largest=state["largest"],
    )
