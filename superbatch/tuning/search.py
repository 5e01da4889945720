# pyright: strict
"""Choice of the micro-batch size: the largest under a limit of memory, and the fastest of those.

Two questions, answered from measurements that a caller makes:

* memory: a few points (samples, bytes) become a `MemoryCurve`, which is read backwards for the largest size
  under a limit. `corrected` bends a predicted curve through what was really measured, so that each real
  micro-batch tells how far the next one may go.
* time: `next_trial` says which size to time next, `fastest` which one won. The timings themselves are the
  only state, a plain mapping from size to seconds per sample, so a search can be stored and resumed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf

from ..batch.split import positive_int
from ..errors import InputError

# A size is preferred to a larger one only if it is faster by this share: less is within the noise, and a
# larger micro-batch means fewer of them.
FASTER = 0.03

# Timings of a size beside its first one, which is left out: kernels are chosen and caches filled there.
ENOUGH = 3
MOST = 12

# Sizes that are this close are worth telling apart.
NEAR = 1.1

# Two sizes that say how memory rises: the smaller one at most this part of the other.
APART = 0.7

# Contenders are timed in turns of this many micro-batches: changing the size each time would time the change.
_TURN = 4


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Peak memory as a function of the samples of a micro-batch: straight between known points.

    Between two points it is the line through them; after the last one the last line continues; before the
    first one it is the first line, never below 0. With a single point memory is taken to be proportional
    after it, and constant before it: both are at least the truth for a fixed part and a part proportional to
    the samples. It never falls as samples grow.

    Attributes:
        points: (samples, bytes), ascending in both.
        error: how far the points are from a straight line, relative: the largest difference between an inner
            point and the line through its neighbours. 0 for one or two points.

    Examples:
        >>> curve = fit_curve([(1, 110), (3, 130)])
        >>> curve.at(2), curve.at(10), curve.largest(155, most=100)
        (120, 200, 5)
    """

    points: tuple[tuple[int, int], ...]
    error: float

    def at(self, samples: int) -> int:
        """The bytes of a micro-batch, rounded up.

        Args:
            samples: its samples, at least 1.

        Returns:
            Bytes.

        Examples:
            >>> fit_curve([(4, 40)]).at(8), fit_curve([(4, 40)]).at(1)
            (80, 40)
        """
        points = self.points
        if len(points) == 1:
            first, size = points[0]
            return size if samples <= first else -(-size * samples // first)
        right = min(max(bisect_left(points, (samples,)), 1), len(points) - 1)
        (n0, b0), (n1, b1) = points[right - 1], points[right]
        return max(0, b0 + -(-(b1 - b0) * (samples - n0) // (n1 - n0)))

    def largest(self, limit: int, most: int) -> int:
        """The largest micro-batch under a limit.

        Args:
            limit: bytes that its peak may take.
            most: the largest size that is asked for.

        Returns:
            Samples, at most `most`; 0 if not even one sample is under the limit.

        Examples:
            >>> fit_curve([(1, 60), (2, 70)]).largest(50, most=8)
            0
        """
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.at(middle) <= limit else (low, middle - 1)
        return low


def fit_curve(points: Sequence[tuple[int, int]]) -> MemoryCurve:
    """Make a curve through points.

    Args:
        points: (samples, bytes), in any order, samples at least 1. Of several points for one size the highest
            counts; where bytes fall as samples grow, the earlier maximum stays.

    Returns:
        The curve and its error.

    Raises:
        InputError: when there is no point, or samples are no positive int.

    Examples:
        >>> fit_curve([(8, 180), (1, 110), (4, 150)]).points
        ((1, 110), (4, 150), (8, 180))
        >>> round(fit_curve([(1, 110), (4, 150), (8, 180)]).error, 3)  # the outer two say 140 for 4
        0.067
    """
    if not points:
        raise InputError("There is no point to make a curve from. Measure or predict at least one size.")
    highest: dict[int, int] = {}
    for samples, size in points:
        samples = positive_int("samples", samples)
        highest[samples] = max(highest.get(samples, 0), size)
    rising: list[tuple[int, int]] = []
    for samples in sorted(highest):
        rising.append((samples, max(highest[samples], rising[-1][1] if rising else 0)))
    return MemoryCurve(tuple(rising), _bend(rising))


def _bend(points: list[tuple[int, int]]) -> float:
    """The largest relative distance of an inner point from the line through its neighbours."""
    worst = 0.0
    for (n0, b0), (n1, b1), (n2, b2) in zip(points, points[1:], points[2:], strict=False):
        line = b0 + (b2 - b0) * (n1 - n0) / (n2 - n0)
        worst = max(worst, abs(line - b1) / max(b1, 1))
    return worst


def corrected(curve: MemoryCurve, measured: Sequence[tuple[int, int]]) -> MemoryCurve:
    """Bend a predicted curve through what was measured.

    With p the prediction and m the measurements: after the largest measured size b the curve rises like the
    prediction, ``m(b) + s (p(n) - p(b))``. The slope s is measured between b and the largest measured size
    up to 0.7 b, and taken to be 0.9 at least; with no such pair it is ``m(b) / p(b)``, between 1 and 1.5.
    (What was needed once, and is in one measurement only, must not pass for a rise or for the lack of one.)
    Before the smallest measured size a the curve continues along the line through a and the next one, or, if
    that one is nearer than a / 0.7, falls like the prediction, by ``min(1, m(a) / p(a)) (p(a) - p(n))``: two
    sizes that are close to each other say little of how memory rises.

    Args:
        curve: the prediction.
        measured: (samples, bytes) of real micro-batches; empty for none.

    Returns:
        A curve that goes through the measured points (the highest one of each size).

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
    slope = min(max(1.0, bytes_last / at_last), 1.5)
    if before:
        first, bytes_first = before[-1]
        if curve.at(last) > curve.at(first):
            slope = max(0.9, (bytes_last - bytes_first) / (curve.at(last) - curve.at(first)))
    # A curve is known by its corners; one far point more carries the last line of the prediction on.
    corners = [samples for samples, _ in curve.points if samples > last]
    corners.append(2 * max(last, curve.points[-1][0]))
    above = [(n, bytes_last + ceil(slope * (curve.at(n) - at_last))) for n in corners]
    return fit_curve([*_below(curve, points), *points, *above])


def _below(curve: MemoryCurve, points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Corners before the first point, where the first two are too close to make a line."""
    first, size = points[0]
    if len(points) < 2 or first <= APART * points[1][0]:
        return []
    at_first = max(curve.at(first), 1)
    fall = min(1.0, size / at_first)
    corners = {1, *(samples for samples, _ in curve.points)}
    return [(n, max(0, size - floor(fall * (at_first - curve.at(n))))) for n in sorted(corners) if n < first]


def halvings(largest: int, *, smallest: int = 1) -> list[int]:
    """Sizes to time: the largest, its half, its quarter and so on, ascending.

    Args:
        largest: the largest size, at least 1.
        smallest: no size is below this one, except the largest itself.

    Returns:
        The sizes, rounded up as a near-equal split does.

    Examples:
        >>> halvings(100, smallest=10)
        [13, 25, 50, 100]
    """
    sizes = [positive_int("largest", largest)]
    pieces = 2
    while sizes[-1] > 1 and -(-largest // pieces) >= smallest:
        sizes.append(-(-largest // pieces))
        pieces *= 2
    return sizes[::-1]


def time_per_sample(timings: Sequence[float]) -> float:
    """The seconds per sample of a size: the lower quartile of its timings without the first one.

    What else runs on a machine only ever adds time, so the lower half of the timings is nearer to the truth.

    Args:
        timings: seconds per sample of micro-batches of one size, in order; at least one.

    Returns:
        Seconds; of a single timing, this one.

    Examples:
        >>> time_per_sample([9.0, 1.2, 1.0, 5.0, 1.1, 1.3])
        1.1
    """
    counted = sorted(timings[1:] or timings)
    return counted[(len(counted) - 1) // 4]


def fastest(timings: Mapping[int, Sequence[float]]) -> int:
    """The fastest size; a larger one wins unless it is slower by more than 3 %.

    Args:
        timings: seconds per sample of micro-batches, by size; at least one size with a timing.

    Returns:
        The size.

    Raises:
        InputError: when nothing was timed.

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
    """Return the size to time next.

    Sizes are timed in the given order, each a few times, until two in a row are worse than the best by more
    than 3 %. Then the sizes within 10 % of the best are timed in turns, so that a disturbance of the machine
    falls on all of them, until each has 12 timings beside its first.

    Args:
        sizes: the sizes, in the order in which they are tried.
        timings: seconds per sample of micro-batches so far, by size, in order.

    Returns:
        The size, or None when the search is over: then `fastest` tells the result.

    Examples:
        >>> next_trial([32, 64], {}), next_trial([32, 64], {32: [2.0, 1.0, 1.0, 1.0]})
        (32, 64)
        >>> next_trial([32, 64], {32: [1.0] * 4, 64: [1.05] * 8})  # too close to tell: in turns
        32
        >>> next_trial([32, 64], {32: [1.0] * 4, 64: [2.0] * 4}) is None
        True
    """
    best, worse = inf, 0
    for size in sizes:
        seconds = timings.get(size, ())
        if not _measured(seconds, best):
            return size
        here = time_per_sample(seconds)
        worse = worse + 1 if here * (1 - FASTER) > best else 0
        best = min(best, here)
        if worse == 2:
            break
    near = [size for size in sizes if timings.get(size) and time_per_sample(timings[size]) <= NEAR * best]
    unsure = [size for size in near if len(timings[size]) <= MOST] if len(near) > 1 else []
    return min(unsure, key=lambda size: len(timings[size]) // _TURN, default=None)


def _measured(seconds: Sequence[float], best: float) -> bool:
    """Return True if a size has been timed often enough for a first verdict; a hopeless one is left early."""
    if len(seconds) > ENOUGH:
        return True
    return len(seconds) >= 3 and min(seconds[1:]) > 1.3 * best
