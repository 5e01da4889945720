"""Learning rates suggested by a survey: three rules, each with an interval, or the reason for no suggestion.

The logarithms of the losses, without the first five and the last three, are smoothed by local quadratic fits
over a fifth of the curve. Three rules pick a point of the smoothed curve:

* `onset`, the default: the point at which the nearest non-increasing curve has made a fifth of its fall.
* `minimum`: a tenth of the value at the lowest point.
* `steepest`: the point of the fastest fall per decade. It is close to the breakdown of training, so it is
  only for comparison.

No rule reads points after the lowest one: a fall there is a network that recovers from a breakdown.

Two tests withhold suggestions. A curve is *flat* if more than 5 of 100 permutations of its residuals fall as
far as the curve itself; then no rule suggests a value. The test for noise repeats each rule on 100 curves
with random signs of the residuals (a wild bootstrap, Wu 1986, Ann. Stat. 14:1261). A curve is too *noisy* for
a rule if the middle 90 % of the resulting points span more than 0.3 decades. Error rates by simulation are in
tests/core/test_survey_coverage.py.

Reference: L. N. Smith, 2015, arXiv:1506.01186.
"""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from ..results.survey import Range, Suggestions
from .local_fit import LocalFit, falling, local_fit

FIRST, LAST = 5, 3
"""Points left out at the start (training has hardly begun) and at the end (it may have broken down)."""

LEAST = 8
"""Fewest points that must remain."""

REPEATS = 100
"""Number of permutations in the test for a flat curve, and of repeats in the test for a noisy one."""

BY_CHANCE = 0.05
"""A curve is flat if more than this share of its permuted residuals fall as far."""

WIDEST = 0.3
"""Widest range of a suggestion, in decades: a factor of 2."""

ONSET = 0.2
"""Share of the total fall that has happened at `onset`."""

_MIDDLE = (0.05, 0.95)

_ROUNDING = 1e-9
"""Smallest fall that is not rounding, relative to the loss."""


def suggest(axis: Sequence[float], losses: Sequence[float]) -> Suggestions:
    """Suggest positions on the axis of a survey.

    The result is the same for the same curve: random numbers have a fixed seed.

    Args:
        axis: position of each point: positive, increasing, evenly spaced in the logarithm.
        losses: loss of each point, not smoothed.

    Returns:
        Three suggestions with their ranges. A suggestion is None if noise makes its range too wide. All three
        are None, with a reason, if the curve is too short, flat, or too noisy for each rule.

    Examples:
        A loss that falls evenly per decade up to 1e-1, and rises after it:

        >>> axis = [10 ** (t / 20 - 4) for t in range(100)]
        >>> found = suggest(axis, [math.exp(abs(math.log10(x) + 1)) for x in axis])
        >>> [f"{value:.2g}" for value in (found.onset, found.minimum)]
        ['0.00063', '0.01']
    """
    xs, inner = axis[FIRST : len(axis) - LAST], losses[FIRST : len(axis) - LAST]
    if len(inner) < LEAST:
        return _none(
            f"{len(axis)} points are too few: the first {FIRST} and the last {LAST} are left out, "
            f"and {LEAST} must remain"
        )
    # Noise and falls are proportional to a positive loss, so logarithms are compared. A log-likelihood may be
    # negative and is compared as it is.
    logs = [math.log(loss) for loss in inner] if min(inner) > 0 else list(inner)
    fit = local_fit(len(logs), max(3, round(len(axis) / 10)))
    values = fit.values(logs)
    least = _ROUNDING * (1.0 if min(inner) > 0 else max(map(abs, inner)))
    if max(values) - min(values) <= least:
        return _none("the loss did not change: survey up to a higher value")
    logs = _without_breakdown(logs, values)
    values = fit.values(logs)
    if _fall(values) <= least:
        return _none("the loss never fell: start the survey at a lower value")
    residuals, random = fit.residuals(logs, values), Random(0)
    if _flat(fit, values, residuals, random):
        return _none(
            "the loss fell no further than noise alone can explain: use more points or larger batches, or "
            "average several surveys"
        )
    points = _points_of(values, fit.slopes(logs))
    return _with_ranges(xs, points, _repeats(fit, values, residuals, random))


def still_falling(smooth: Sequence[float]) -> bool:
    """Return True if the curve is lowest in its last points, so that the ramp should go higher.

    Args:
        smooth: the smoothed losses.

    Examples:
        >>> still_falling([5.0, 4.0, 3.0, 2.0, 1.0, 1.1]), still_falling([5.0, 4.0, 1.0, 2.0, 3.0, 4.0])
        (True, False)
    """
    return bool(smooth) and list(smooth).index(min(smooth)) >= max(1, len(smooth) - LAST)


class _Points(NamedTuple):
    """Index of the point that each rule picks."""

    onset: int
    lowest: int
    steepest: int


def _points_of(values: Sequence[float], slopes: Sequence[float]) -> _Points:
    lowest = values.index(min(values))
    # The smoothed curve may rise in between; the nearest curve that never does has one point of onset.
    down = falling(values[: lowest + 1])
    level = down[0] - ONSET * (down[0] - down[-1])
    onset = next(i for i, value in enumerate(down) if value <= level)
    before = slopes[: lowest + 1]
    return _Points(onset, lowest, before.index(min(before)))


def _without_breakdown(logs: Sequence[float], values: Sequence[float]) -> list[float]:
    """Limit losses after the lowest point to the highest loss before it.

    When training breaks down, losses jump by large factors. A smooth curve cannot follow a jump, and its
    residuals would count as noise, although no rule reads these points.
    """
    lowest = values.index(min(values))
    highest = max(logs[: lowest + 1])
    return [*logs[: lowest + 1], *(min(each, highest) for each in logs[lowest + 1 :])]


def _fall(values: Sequence[float]) -> float:
    """Return the fall from the highest point before the minimum to the minimum."""
    lowest = values.index(min(values))
    return max(values[: lowest + 1]) - values[lowest]


def _flat(fit: LocalFit, values: Sequence[float], residuals: Sequence[float], random: Random) -> bool:
    """Return True if random permutations of the residuals fall as far as the curve too often."""
    fall, order, as_far = _fall(values), list(residuals), 0
    for _ in range(REPEATS):
        random.shuffle(order)
        as_far += _fall(fit.values(order)) >= fall
    return as_far > BY_CHANCE * REPEATS


def _repeats(
    fit: LocalFit, values: Sequence[float], residuals: Sequence[float], random: Random
) -> list[_Points]:
    """Return the points of each rule on curves with random signs of the residuals: a wild bootstrap."""
    repeats: list[_Points] = []
    for _ in range(REPEATS):
        # Signs only: the noise may differ in size from point to point.
        curve = [v + math.copysign(r, random.random() - 0.5) for v, r in zip(values, residuals, strict=True)]
        repeats.append(_points_of(fit.values(curve), fit.slopes(curve)))
    return repeats


def _with_ranges(xs: Sequence[float], points: _Points, repeats: Sequence[_Points]) -> Suggestions:
    """Return the range of each rule, and its value if the range is narrow enough."""
    suggested: list[float | None] = []
    ranges: list[Range] = []
    for rule, point in enumerate(points):
        # The loss is still lowest when training has almost broken down; a tenth of that value is safe.
        share = 0.1 if rule == _Points._fields.index("lowest") else 1.0
        order = sorted(each[rule] for each in repeats)
        low, high = (xs[order[round(q * (len(order) - 1))]] * share for q in _MIDDLE)
        narrow = math.log10(high / low) <= WIDEST
        suggested.append(xs[point] * share if narrow else None)
        ranges.append((low, high))
    reason = None
    if suggested == [None] * len(suggested):
        reason = (
            f"noise moves every suggestion by more than a factor of {10**WIDEST:.0f}: use larger batches or "
            "more points, or average several surveys"
        )
    return Suggestions(
        onset=suggested[0],
        minimum=suggested[1],
        steepest=suggested[2],
        onset_range=ranges[0],
        minimum_range=ranges[1],
        steepest_range=ranges[2],
        reason=reason,
    )


def _none(reason: str) -> Suggestions:
    return Suggestions(onset=None, minimum=None, steepest=None, reason=reason)
