# pyright: strict
"""Choice of the micro-batch size: the largest size within a memory limit, and the fastest of those below.

The caller makes the measurements:

* Memory: points (samples, bytes) become a `MemoryCurve`, whose `largest` is the largest size within a limit.
  `corrected` adapts a predicted curve to measured micro-batches, so each of them tightens the prediction for
  the next one.
* Time: `next_trial` returns the size to time next, `fastest` the best size. The only state is a mapping from
  size to seconds per sample, so a search can be stored and resumed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf

from ..batch.split import positive_int
from ..errors import InputError

# A size is preferred to a larger one only if it is faster by this share. Smaller differences are noise, and
# larger micro-batches have less overhead.
FASTER = 0.03

# Timings needed for a first comparison, and the most timings of a size. Both exclude its first timing, in
# which kernels are chosen and caches filled.
ENOUGH = 3
MOST = 12

# Sizes within this factor of the best time are timed further.
NEAR = 1.1

# The slope of memory is taken from two sizes only if the smaller is at most this share of the larger.
APART = 0.7

# Candidates are timed alternately, this many micro-batches at a time, because a change of size itself takes
# time.
_TURN = 4


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Peak memory as a function of the samples of a micro-batch: linear interpolation between points.

    The first and the last line continue beyond the points, but never below 0 bytes. With a single point, the
    curve is constant before it and proportional after it: upper bounds if memory is a constant plus a part
    proportional to the samples. The curve never falls as samples grow.

    Attributes:
        points: (samples, bytes), ascending in both.
        error: largest relative difference between an inner point and the line through its neighbours; 0 for
            one or two points.

    Examples:
        >>> curve = fit_curve([(1, 110), (3, 130)])
        >>> curve.at(2), curve.at(10), curve.largest(155, most=100)
        (120, 200, 5)
    """

    points: tuple[tuple[int, int], ...]
    error: float

    def at(self, samples: int) -> int:
        """Return the peak memory of a micro-batch in bytes, rounded up.

        Examples:
            >>> fit_curve([(4, 40)]).at(8), fit_curve([(4, 40)]).at(1)
            (80, 40)
        """
        points = self.points
        if len(points) == 1:
            first, size = points[0]
            return size if samples <= first else -(-size * samples // first)  # -(-a // b) rounds a / b up
        right = min(max(bisect_left(points, (samples,)), 1), len(points) - 1)
        (n0, b0), (n1, b1) = points[right - 1], points[right]
        return max(0, b0 + -(-(b1 - b0) * (samples - n0) // (n1 - n0)))

    def largest(self, limit: int, most: int) -> int:
        """Return the largest micro-batch within a memory limit, at most `most`; 0 if one sample exceeds it.

        Examples:
            >>> fit_curve([(1, 60), (2, 70)]).largest(50, most=8)
            0
        """
        low, high = 0, most  # bisection: the curve never falls
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.at(middle) <= limit else (low, middle - 1)
        return low


def fit_curve(points: Sequence[tuple[int, int]]) -> MemoryCurve:
    """Return the curve through points.

    Args:
        points: (samples, bytes), in any order; samples at least 1. Of several points for one size the highest
            counts. A point below that of a smaller size is raised to it.

    Raises:
        InputError: there is no point, or a number of samples is not a positive int.

    Examples:
        >>> fit_curve([(8, 180), (1, 110), (4, 150)]).points
        ((1, 110), (4, 150), (8, 180))
        >>> round(fit_curve([(1, 110), (4, 150), (8, 180)]).error, 3)  # the line through the others: 140 at 4
        0.067
    """
    if not points:
        raise InputError("A memory curve needs at least one point. Measure or predict at least one size.")
    highest: dict[int, int] = {}
    for samples, size in points:
        samples = positive_int("samples", samples)
        highest[samples] = max(highest.get(samples, 0), size)
    # More samples never need less memory, so a lower measurement is noise, or lacks a workspace.
    rising: list[tuple[int, int]] = []
    for samples in sorted(highest):
        rising.append((samples, max(highest[samples], rising[-1][1] if rising else 0)))
    return MemoryCurve(tuple(rising), _bend(rising))


def _bend(points: list[tuple[int, int]]) -> float:
    """Return the largest relative distance of an inner point from the line through its neighbours."""
    worst = 0.0
    for (n0, b0), (n1, b1), (n2, b2) in zip(points, points[1:], points[2:], strict=False):
        line = b0 + (b2 - b0) * (n1 - n0) / (n2 - n0)
        worst = max(worst, abs(line - b1) / max(b1, 1))
    return worst


def corrected(curve: MemoryCurve, measured: Sequence[tuple[int, int]]) -> MemoryCurve:
    """Adapt a predicted curve to measured micro-batches.

    Let p be the prediction and m the measurements.

    * Above the largest measured size b, the curve rises in proportion to the prediction:
      ``m(b) + s (p(n) - p(b))``. The factor s is measured between b and the largest measured size up to
      0.7 b, and is at least 0.9. Without such a size, s is ``m(b) / p(b)``, limited to 1 to 1.5.
    * Below the smallest measured size a, the curve continues the line through a and the next measured size.
      If that size is below a / 0.7, the curve falls in proportion to the prediction instead, by
      ``min(1, m(a) / p(a)) (p(a) - p(n))``.

    Two sizes closer than the factor 0.7 give no slope: memory that only one of the two measurements needed,
    such as a workspace, would distort it.

    Args:
        curve: the predicted curve.
        measured: (samples, bytes) of real micro-batches; may be empty.

    Returns:
        A curve through the highest measured point of each size; `curve` itself without measurements.

    Examples:
        >>> predicted = fit_curve([(1, 100), (100, 10_000)])
        >>> corrected(predicted, [(10, 1500)]).at(100)  # 1500 + 1.5 x 9000
        15000
        >>> corrected(predicted, [(10, 1500), (50, 5500)]).at(100)  # 5500 + 1.0 x 5000
        10500
    """
    if not measured:
        return curve
    points = fit_curve(measured).points
    (last, bytes_last), before = points[-1], [point for point in points if point[0] <= APART * points[-1][0]]
    at_last = max(curve.at(last), 1)
    # One measurement may include memory that is needed only once, so its excess is extrapolated up to 1.5.
    slope = min(max(1.0, bytes_last / at_last), 1.5)
    if before:
        first, bytes_first = before[-1]
        if curve.at(last) > curve.at(first):
            slope = max(0.9, (bytes_last - bytes_first) / (curve.at(last) - curve.at(first)))
    # The prediction is linear between its points; one more point beyond them continues its last line.
    corners = [samples for samples, _ in curve.points if samples > last]
    corners.append(2 * max(last, curve.points[-1][0]))
    above = [(n, bytes_last + ceil(slope * (curve.at(n) - at_last))) for n in corners]
    return fit_curve([*_below(curve, points), *points, *above])


def _below(curve: MemoryCurve, points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return points below the first measured size, if the first two sizes are too close to give a slope."""
    first, size = points[0]
    if len(points) < 2 or first <= APART * points[1][0]:
        return []
    at_first = max(curve.at(first), 1)
    fall = min(1.0, size / at_first)
    corners = {1, *(samples for samples, _ in curve.points)}
    return [(n, max(0, size - floor(fall * (at_first - curve.at(n))))) for n in sorted(corners) if n < first]


def halvings(largest: int, *, smallest: int = 1) -> list[int]:
    """Return the sizes to time, ascending: the largest size, its half, its quarter and so on, rounded up.

    `smallest` is the lower limit of all but `largest` itself.

    Raises:
        InputError: `largest` is not a positive int.

    Examples:
        >>> halvings(100, smallest=10)
        [13, 25, 50, 100]
    """
    sizes = [positive_int("largest", largest)]
    parts = 2
    while sizes[-1] > 1 and -(-largest // parts) >= smallest:
        sizes.append(-(-largest // parts))
        parts *= 2
    return sizes[::-1]


def time_per_sample(timings: Sequence[float]) -> float:
    """Return the seconds per sample of a size: the lower quartile of its timings, without the first one.

    Other processes on the machine can only add time, so the lower timings are more accurate.

    A single timing is returned as it is.

    Examples:
        >>> time_per_sample([9.0, 1.2, 1.0, 5.0, 1.1, 1.3])
        1.1
    """
    counted = sorted(timings[1:] or timings)
    return counted[(len(counted) - 1) // 4]


def fastest(timings: Mapping[int, Sequence[float]]) -> int:
    """Return the fastest size, or a larger one that is slower by at most 3 %.

    Raises:
        InputError: there is no timing.

    Examples:
        >>> fastest({256: [1.0, 1.0], 128: [0.82, 0.82], 64: [0.81, 0.81]})
        128
    """
    times = {size: time_per_sample(seconds) for size, seconds in timings.items() if seconds}
    if not times:
        raise InputError("There is no timing. Time at least one micro-batch.")
    best = min(times.values())
    return max(size for size, seconds in times.items() if seconds * (1 - FASTER) <= best)


def next_trial(sizes: Sequence[int], timings: Mapping[int, Sequence[float]]) -> int | None:
    """Return the size to time next; None if the search is over, whose result `fastest` returns.

    First, sizes are timed in the given order, a few times each, until two in a row are slower than the best
    by more than 3 %. Then the sizes within 10 % of the best are timed alternately, so that a disturbance of
    the machine affects all of them, until each has 12 timings after its first.

    Examples:
        >>> next_trial([32, 64], {}), next_trial([32, 64], {32: [2.0, 1.0, 1.0, 1.0]})
        (32, 64)
        >>> next_trial([32, 64], {32: [1.0] * 4, 64: [1.05] * 8})  # close: timed alternately
        32
        >>> next_trial([32, 64], {32: [1.0] * 4, 64: [2.0] * 4}) is None
        True
    """
    best, slower = inf, 0  # slower: sizes in a row that were slower than the best
    for size in sizes:
        seconds = timings.get(size, ())
        if not _timed_enough(seconds, best):
            return size
        time = time_per_sample(seconds)
        slower = slower + 1 if time * (1 - FASTER) > best else 0
        best = min(best, time)
        if slower == 2:
            break
    near = [size for size in sizes if timings.get(size) and time_per_sample(timings[size]) <= NEAR * best]
    # A single size near the best needs no further timing: it has won.
    unfinished = [size for size in near if len(timings[size]) <= MOST] if len(near) > 1 else []
    return min(unfinished, key=lambda size: len(timings[size]) // _TURN, default=None)


def _timed_enough(seconds: Sequence[float], best: float) -> bool:
    """Return True if a size has enough timings for a first comparison; a very slow size needs fewer."""
    if len(seconds) > ENOUGH:
        return True
    return len(seconds) >= 3 and min(seconds[1:]) > 1.3 * best
