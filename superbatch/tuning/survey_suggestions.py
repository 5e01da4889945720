"""Learning rates suggested by a survey: three rules, each with its interval, or no suggestion and the reason.

The log loss of the points, without the first five and the last three, is smoothed by local quadratics over a
fifth of the curve. On that:

* `onset`: where the falling curve nearest to it has lost a fifth of its fall. The default.
* `minimum`: a tenth of where it is lowest.
* `steepest`: where it falls fastest per decade, close to where training breaks down: an extra.

None looks behind the lowest point: what falls there is a network that recovers from an explosion.

Nothing is suggested where the curve is *flat*: more than 5 of 100 curves of its own noise, in another order,
fall as far. A rule suggests nothing where the curve is too *noisy* for it: the middle 90 % of 100 repeats
with the signs of the noise redrawn span more than 0.3 decades (a wild bootstrap, Wu 1986, Ann. Stat.
14:1261).
Error rates by simulation are in tests/core/test_survey_coverage.py.

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
"""Points that are left out at the ends: training has hardly begun; the loss has exploded already."""

LEAST = 8
"""Points that must be left."""

REPEATS = 100
BY_CHANCE = 0.05
"""Share of curves of noise alone that may fall as far as a curve from which something is suggested."""

WIDEST = 0.3
"""Decades, a factor of 2: a suggestion that noise moves further is none."""

ONSET = 0.2
"""Share of the fall after which it counts as begun."""

_MIDDLE = (0.05, 0.95)

_ROUNDING = 1e-9
"""Of a loss: what it falls by less is none."""


def suggest(axis: Sequence[float], losses: Sequence[float]) -> Suggestions:
    """Suggest places of a survey's axis.

    Args:
        axis: increasing, positive and evenly spaced on a logarithmic axis, one value per point.
        losses: of each point, not smoothed.

    Returns:
        Three suggestions with their ranges; None where noise leaves a place open, and all None, with the
        reason, where nothing is suggested. The same curve gives the same answer: random numbers have a fixed
        seed.

    Examples:
        A loss that falls evenly over the decades to 1e-1 and rises behind it:

        >>> axis = [10 ** (t / 20 - 4) for t in range(100)]
        >>> found = suggest(axis, [math.exp(abs(math.log10(x) + 1)) for x in axis])
        >>> [f"{value:.2g}" for value in (found.onset, found.minimum)]
        ['0.00063', '0.01']
    """
    xs, kept = axis[FIRST : len(axis) - LAST], losses[FIRST : len(axis) - LAST]
    if len(kept) < LEAST:
        return _none(
            f"{len(axis)} points are too few: the first {FIRST} and the last {LAST} are left out, "
            f"and {LEAST} must remain"
        )
    # Noise and fall of a loss are shares of it; a log-likelihood below zero has no logarithm.
    logs = [math.log(loss) for loss in kept] if min(kept) > 0 else list(kept)
    fit = local_fit(len(logs), max(3, round(len(axis) / 10)))
    values = fit.values(logs)
    least = _ROUNDING * (1.0 if min(kept) > 0 else max(map(abs, kept)))
    if max(values) - min(values) <= least:
        return _none("the loss did not move: survey up to a higher value")
    logs = _below_the_explosion(logs, values)
    values = fit.values(logs)
    if _fall(values) <= least:
        return _none("the loss never fell: begin lower")
    noise, random = fit.residuals(logs, values), Random(0)
    if _flat(fit, values, noise, random):
        return _none(
            "the loss fell no further than noise alone may make it fall: take more points or larger batches, "
            "or average several surveys"
        )
    found = _places(values, fit.slopes(logs))
    return _with_ranges(xs, found, _repeats(fit, values, noise, random))


def still_falling(smooth: Sequence[float]) -> bool:
    """Return whether a curve is lowest at its end, among the points left out: then the ramp ended too low.

    Args:
        smooth: the smoothed losses.

    Examples:
        >>> still_falling([5.0, 4.0, 3.0, 2.0, 1.0, 1.1]), still_falling([5.0, 4.0, 1.0, 2.0, 3.0, 4.0])
        (True, False)
    """
    return bool(smooth) and list(smooth).index(min(smooth)) >= max(1, len(smooth) - LAST)


class _Places(NamedTuple):
    """Points of the curve by each rule."""

    onset: int
    lowest: int
    steepest: int


def _places(values: Sequence[float], slopes: Sequence[float]) -> _Places:
    lowest = values.index(min(values))
    down = falling(values[: lowest + 1])
    begun = down[0] - ONSET * (down[0] - down[-1])
    onset = next(i for i, each in enumerate(down) if each <= begun)
    before = slopes[: lowest + 1]
    return _Places(onset, lowest, before.index(min(before)))


def _below_the_explosion(logs: Sequence[float], values: Sequence[float]) -> list[float]:
    """Lower what lies behind the lowest point to the highest loss before it.

    Where training breaks down losses jump by factors. A smooth curve cannot follow them, and what it misses
    by would be taken for noise, at points that no rule reads.
    """
    lowest = values.index(min(values))
    highest = max(logs[: lowest + 1])
    return [*logs[: lowest + 1], *(min(each, highest) for each in logs[lowest + 1 :])]


def _fall(values: Sequence[float]) -> float:
    lowest = values.index(min(values))
    return max(values[: lowest + 1]) - values[lowest]


def _flat(fit: LocalFit, values: Sequence[float], noise: Sequence[float], random: Random) -> bool:
    """True if the curve's own noise in another order falls as far too often."""
    fall, order, as_far = _fall(values), list(noise), 0
    for _ in range(REPEATS):
        random.shuffle(order)
        as_far += _fall(fit.values(order)) >= fall
    return as_far > BY_CHANCE * REPEATS


def _repeats(fit: LocalFit, values: Sequence[float], noise: Sequence[float], random: Random) -> list[_Places]:
    """Places on curves as they might have come out: the noise keeps its size at each point, not its sign."""
    found: list[_Places] = []
    for _ in range(REPEATS):
        again = [v + math.copysign(r, random.random() - 0.5) for v, r in zip(values, noise, strict=True)]
        found.append(_places(fit.values(again), fit.slopes(again)))
    return found


def _with_ranges(xs: Sequence[float], found: _Places, repeats: Sequence[_Places]) -> Suggestions:
    """Values and ranges of each rule; a value only where its range is narrow enough."""
    suggested: list[float | None] = []
    ranges: list[Range] = []
    for rule, place in enumerate(found):
        share = 0.1 if rule == _Places._fields.index("lowest") else 1.0
        order = sorted(each[rule] for each in repeats)
        low, high = (xs[order[round(q * (len(order) - 1))]] * share for q in _MIDDLE)
        narrow = math.log10(high / low) <= WIDEST
        suggested.append(xs[place] * share if narrow else None)
        ranges.append((low, high))
    reason = None
    if suggested == [None] * len(suggested):
        reason = (
            f"noise moves every suggestion by more than a factor of {10**WIDEST:.0f}: take larger batches or "
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
