"""Learning rates suggested by a survey: three rules, on the smoothed curve without its ends.

The first five points and the last three are left out.

* `valley`: the middle of the longest descent, on the logarithmic axis. The default. On digits it moves by 0.1
  decades from seed to seed.
* `minimum`: a tenth of where the curve is lowest. 0.1 decades.
* `steepest`: where the loss falls fastest per decade: an extra, close to where training breaks down (on
  digits 1.2, with the lowest point at 1.7). 0.1 decades; 0.2 with noisy batches: average several surveys.

None looks behind the lowest point: what falls there is a network that recovers from an explosion.

Reference: L. N. Smith, 2015, arXiv:1506.01186; the names are fastai's.
"""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Sequence

from ..results.survey import Suggestions

FIRST, LAST = 5, 3
"""Points that are left out at the ends: the smoothing has seen little; the loss has exploded already."""

_LEAST = 4

_ROUNDING = 1e-9
"""Of a loss: what it falls by less is none."""

BY_CHANCE = 7.0
"""A curve of noise alone falls by less in 9 of 10 surveys or more, in units of the smoothed noise."""


def suggest(axis: Sequence[float], smooth: Sequence[float]) -> Suggestions:
    """Suggest places of a survey's axis.

    Args:
        axis: increasing and positive, one value per point.
        smooth: the smoothed loss of each point.

    Returns:
        Three suggestions; all None, with the reason, where the curve shows nothing.

    Examples:
        A loss that falls evenly over the decades to 1e-1 and rises behind it:

        >>> axis = [10 ** (t / 20 - 4) for t in range(100)]
        >>> found = suggest(axis, [abs(math.log10(x) + 1) for x in axis])
        >>> [f"{value:.2g}" for value in (found.valley, found.minimum)]
        ['0.004', '0.01']
    """
    kept = list(zip(axis, smooth, strict=True))[FIRST : len(axis) - LAST]
    if len(kept) < _LEAST:
        return _none(f"{len(axis)} points are too few: the first {FIRST} and the last {LAST} are left out")
    xs, losses = [x for x, _ in kept], [loss for _, loss in kept]
    lowest = losses.index(min(losses))
    if max(losses) - losses[lowest] <= _ROUNDING * abs(losses[lowest]):
        return _none("the loss did not move: survey up to a higher value")
    if max(losses[: lowest + 1]) - losses[lowest] <= _ROUNDING * abs(losses[lowest]):
        return _none("the loss never fell: begin lower")
    return Suggestions(
        valley=valley(xs[: lowest + 1], losses[: lowest + 1]),
        minimum=xs[lowest] / 10,
        steepest=steepest(xs[: lowest + 2], losses[: lowest + 2]),
        reason=None,
    )


def valley(xs: Sequence[float], losses: Sequence[float]) -> float:
    """Return the middle of the longest descent.

    The descent is the longest subsequence of falling losses: points in between may rise, as noise makes
    them. It ends where it ends, and begins as many points earlier as it is long.

    Args:
        xs: increasing.
        losses: one per x; at least one falls below an earlier one.

    Returns:
        One of the xs.

    Examples:
        >>> valley([1.0, 2.0, 4.0, 8.0, 16.0], [5.0, 4.0, 4.5, 3.0, 9.0])
        4.0
    """
    # lengths[i]: of the longest falling subsequence that ends at i.
    lengths: list[int] = []
    for i, loss in enumerate(losses):
        lengths.append(1 + max((lengths[j] for j in range(i) if losses[j] > loss), default=0))
    longest = max(lengths)
    end = lengths.index(longest)
    return xs[end - longest // 2]


def steepest(xs: Sequence[float], losses: Sequence[float]) -> float:
    """Return the position of the least ``d loss / d log x``, by central differences.

    On the *linear* axis, ``d loss / d x``, the answer would be near the first point of any curve: the same
    fall is over a thousand times smaller a distance there.

    Args:
        xs: increasing and positive.
        losses: one per x, at least three.

    Returns:
        One of the xs.

    Examples:
        >>> steepest([1.0, 10.0, 100.0, 1000.0], [9.0, 8.0, 2.0, 1.0])
        10.0
    """
    slopes = [
        (losses[i + 1] - losses[i - 1]) / math.log(xs[i + 1] / xs[i - 1]) for i in range(1, len(xs) - 1)
    ]
    return xs[1 + slopes.index(min(slopes))]


def still_falling(smooth: Sequence[float]) -> bool:
    """Return whether a curve is lowest at its end, among the points left out: then the ramp ended too low.

    Args:
        smooth: the smoothed losses.

    Examples:
        >>> still_falling([5.0, 4.0, 3.0, 2.0, 1.0, 1.1]), still_falling([5.0, 4.0, 1.0, 2.0, 3.0, 4.0])
        (True, False)
    """
    return bool(smooth) and list(smooth).index(min(smooth)) >= max(1, len(smooth) - LAST)


def by_chance(losses: Sequence[float], smooth: Sequence[float], beta: float) -> bool:
    """Return whether noise alone may have made the fall that is suggested from.

    The noise of a window is estimated from the bends of the losses from point to point,
    ``sd = sqrt(mean((l_(t-1) - 2 l_t + l_(t+1))^2) / 6)``; smoothing leaves
    ``sqrt((1 - beta) / (1 + beta))`` of it.

    Args:
        losses: of the windows.
        smooth: their debiased means.
        beta: of the smoothing.

    Examples:
        >>> from superbatch.tuning.survey import Sweep
        >>> sweep = Sweep("lr", 1e-9, 1e-6, 40)
        >>> _ = [sweep.add(2.3 + 0.1 * math.sin(100 * t * t)) for t in range(40)]
        >>> flat = sweep.report()
        >>> flat.suggestion is not None, by_chance(flat.losses, flat.smooth, flat.beta)
        (True, True)
    """
    kept, curve = losses[FIRST : len(losses) - LAST], smooth[FIRST : len(smooth) - LAST]
    if len(kept) < _LEAST:
        return False
    lowest = curve.index(min(curve))
    near = kept[: max(lowest, 2) + 1]
    bends = [a - 2 * b + c for a, b, c in zip(near, near[1:], near[2:], strict=False)]
    noise = math.sqrt(math.fsum(bend * bend for bend in bends) / (6 * len(bends)))
    return max(curve[: lowest + 1]) - curve[lowest] < BY_CHANCE * noise * math.sqrt((1 - beta) / (1 + beta))


def _none(reason: str) -> Suggestions:
    return Suggestions(valley=None, minimum=None, steepest=None, reason=reason)
