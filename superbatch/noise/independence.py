"""Test that the micro-batches of a window are independent draws, as every noise scale assumes.

Noise shared by all micro-batches of a window counts as signal, and their differences do not show it. The
losses of whole windows do. Let l_t be the mean loss of a window, and v_t the variance of l_t expected from
the spread of its micro-batches. Three windows form a triple::

    d_1 = (|l_1 - l_2|^2 + |l_2 - l_3|^2) / 4,   d_2 = |l_1 - l_3|^2 / 2
    e_1 = (v_1 + 2 v_2 + v_3) / 4,               e_2 = (v_1 + v_3) / 2
    F_1 = mean d_1 / mean e_1,   F_2 = mean d_2 / mean e_2,   F_0 = mean (4 d_1 - d_2) / 3 / mean e_1

For independent draws at constant parameters all three ratios are 1. A linear trend of the loss adds four
times as much to d_2 as to d_1, so it cancels in F_0. A loss that alternates from update to update has
d_2 < d_1.

* *Shared*: the lower ends of all three intervals are above 1.1, and the loss does not move significantly.
* *Even*: the upper ends of the intervals of F_1 and F_2 are below 0.9.
* Otherwise there is no verdict.

The loss moves significantly if the lower end of the interval of ``F_2 - F_1`` is above 0, and ``2 F_0 - F_2
<= 1.1``. This includes a loss that rises and falls within a few updates, such as after a restart of the
learning rate: it is not linear, so a part of it stays in F_0. Shared noise gives F_2 = F_1 = F_0, so
``2 F_0 - F_2 = F_0`` stays above 1.1. A random walk of the loss has ``2 F_0 - F_2 <= 1``, and so has a
stationary loss whose successive windows have a correlation of 0.6 or more.

At constant parameters, gradients can replace losses (`superbatch.torch.tuning.independence`). They detect
more. In training their noise moves the parameters, which raises F_1 by about rate x curvature. Error rates
and power by simulation are in tests/core/test_noise_independence.py.
"""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..results.noise import Independence
from .interval import CONFIDENCE, fieller, student_quantile

SHARED, EVEN = 1.1, 0.9
"""Limits of the verdicts: the lower ends must be above the first, or the upper ends below the second."""

FEWEST_TRIPLES = 20
"""Fewest triples for a verdict."""

MEMORY = 0.9
"""Decay factor of the scale that divides triples; it follows losses that become less noisy in training."""

JUMP = 1e4
"""The test restarts at a triple whose expected variance exceeds the scale by this factor.

At the start, losses may differ by rounding only: the last layer is zero, or a warm-up starts at rate 0.
Triples divided by so small a scale would outweigh all later ones.
"""

NOTHING = 1e-6
"""An expected variance below this share of d_1 is rounding and counts as 0, as for copies of one sample."""

_LARGEST = 1e100
"""Largest scaled value of a triple; sums of squares of larger ones would overflow."""

_KINDS = ((1.0, 0.0, 0), (0.0, 1.0, 1), (4 / 3, -1 / 3, 0))
"""F_1, F_2 and F_0: coefficients of d_1 and d_2 in the numerator; 0 for the denominator e_1, 1 for e_2."""

_MOVES = (-1.0, 1.0, 0)
"""F_2 - F_1 with the denominator e_1, in the same form."""

_STILL = (8 / 3, -5 / 3)
"""2 F_0 - F_2 with the denominator e_1: coefficients of d_1 and d_2. A moving loss makes it small."""


class IndependenceTest:
    """Running test over triples of windows, with a state of 17 numbers and at most two windows.

    Args:
        means: means of d_1, d_2, e_1, e_2, in units of the scale.
        products: sums of products of deviations from these means, the upper triangle by rows.
        waiting: mean loss and expected variance of windows whose triple is not complete.
        scale: recent average of e_1.
        centre: mean loss of the previous window; None before the first.
        count: number of triples.

    Raises:
        ValueError: `means`, `products` or `waiting` has the wrong length.

    Examples:
        >>> import random
        >>> test, normal = IndependenceTest(), random.Random(0).gauss
        >>> for _ in range(300):  # mean losses have the variance 3; 1 is expected from their micro-batches
        ...     test.add(normal(0, 3**0.5), 1.0)
        >>> test.result().verdict
        'shared'
    """

    def __init__(
        self,
        means: Sequence[float] = (0.0,) * 4,
        products: Sequence[float] = (0.0,) * 10,
        waiting: Sequence[Sequence[float]] = (),
        scale: float = 0.0,
        centre: float | None = None,
        count: int = 0,
    ) -> None:
        if (len(means), len(products)) != (4, 10) or len(waiting) > 2:
            raise ValueError(
                f"Got {len(means)} means, {len(products)} products and {len(waiting)} windows. Pass 4 "
                "means, 10 products and at most 2 windows."
            )
        self._means, self._products = list(means), list(products)
        self._waiting = [(mean, explained) for mean, explained in waiting]
        self._scale, self._count = scale, count
        self._centre = centre

    @property
    def centre(self) -> float:
        """Return the last window's loss, around which to compute the spread of the next window.

        The estimate of the expected variance is unbiased around any number that is known before the window.
        With unequal weights, a number far from the loss makes the estimate noisy.
        """
        return 0.0 if self._centre is None else self._centre

    def add(self, mean: float, explained: float) -> None:
        """Add one window; ignore it if a number is not finite.

        Args:
            mean: mean loss of the window.
            explained: variance of this mean expected from the spread of the micro-batches; an unbiased
                estimate, so it may be negative.
        """
        if not (math.isfinite(mean) and math.isfinite(explained)):
            return
        first, self._centre = self._centre is None, mean
        if first:  # its spread was computed around 0, not around a loss
            return
        if len(self._waiting) < 2:
            self._waiting.append((mean, explained))
            return
        (a, va), (b, vb) = self._waiting
        self._waiting = []  # triples share no window, so their noise is independent
        # Products, because `**` raises an OverflowError for floats.
        squares = ((a - b) * (a - b), (b - mean) * (b - mean), (a - mean) * (a - mean))
        self.add_triple(squares, (va, vb, explained))

    def add_triple(self, squares: tuple[float, float, float], explained: tuple[float, float, float]) -> None:
        """Add three windows, given by squared distances, for instance between their gradients.

        Args:
            squares: squared distances between the first and the second window, the second and the third, and
                the first and the third.
            explained: variance of each window expected from the spread of its micro-batches.
        """
        (ab, bc, ac), (va, vb, vc) = squares, explained
        self._add_values((ab + bc) / 4, ac / 2, (va + 2 * vb + vc) / 4, (va + vc) / 2)

    def result(self, drawn: float = 0.0) -> Independence:
        """Return the verdict on all triples so far.

        Args:
            drawn: share of the data that one window draws without replacement. The variance between such
                windows is lower by this share.
        """
        if self._count < FEWEST_TRIPLES:
            return Independence(verdict=None, ratio=None, low=0.0, high=math.inf, triples=self._count)
        quantile = student_quantile((1 + CONFIDENCE) / 2, self._count - 1)
        ends = [self._interval(*kind, quantile) for kind in _KINDS]
        low = min(low for low, _ in ends)
        high = max(high for _, high in ends[:2])
        d_1, d_2, e_1, e_2 = self._means
        # 2 F_0 - F_2 alone is not enough: with few triples of shared noise it can be small by chance.
        moves = _STILL[0] * d_1 + _STILL[1] * d_2 <= SHARED * e_1
        moves = moves and self._interval(*_MOVES, quantile)[0] > 0
        verdict = "even" if high < EVEN * (1 - min(drawn, 1.0)) else None
        if low > SHARED and not moves:
            verdict = "shared"
        if min(e_1, e_2) < 0:  # weights depend on losses, so the expected variance is no reference
            verdict = None
        ratio = self._ratio() if e_1 > 0 else math.inf if verdict else None
        return Independence(verdict=verdict, ratio=ratio, low=low, high=high, triples=self._count)

    def state(self) -> dict[str, Any]:
        """Return the state as plain containers of numbers."""
        return {
            "means": list(self._means),
            "products": list(self._products),
            "waiting": [list(pair) for pair in self._waiting],
            "scale": self._scale,
            "centre": self._centre,
            "count": self._count,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> IndependenceTest:
        """Create a test from the result of `state`."""
        centre = state["centre"]
        means, products = ([float(each) for each in state[name]] for name in ("means", "products"))
        return cls(
            means,
            products,
            state["waiting"],
            float(state["scale"]),
            None if centre is None else float(centre),
            int(state["count"]),
        )

    def _add_values(self, *triple: float) -> None:
        """Add d_1, d_2, e_1 and e_2 of one triple, divided by the scale."""
        if not all(map(math.isfinite, triple)):  # the means would stay not finite
            return
        least = NOTHING * triple[0]
        triple = (*triple[:2], *(0.0 if abs(each) < least else each for each in triple[2:]))
        explained = max(triple[2], least)
        if explained > JUMP * self._scale:
            # The decision to discard earlier triples depends on this one, which is independent of them.
            self._means, self._products, self._count = [0.0] * 4, [0.0] * 10, 0
            self._scale = explained
        if not self._scale:  # all losses so far are equal
            return
        # The scale is known before the triple, so dividing by it does not bias the ratios of means. Without
        # it, the first windows of a training, whose losses are the noisiest, would outweigh all others.
        scaled = [each / self._scale for each in triple]
        if max(map(abs, scaled)) > _LARGEST:
            return
        if explained:  # a zero would lower the scale and give the next triples too much weight
            self._scale = MEMORY * self._scale + (1 - MEMORY) * explained
        # Welford's update of means and products, which is stable for large means.
        self._count += 1
        before = [each - mean for each, mean in zip(scaled, self._means, strict=True)]
        self._means = [mean + off / self._count for mean, off in zip(self._means, before, strict=True)]
        after = [each - mean for each, mean in zip(scaled, self._means, strict=True)]
        pairs = ((i, j) for i in range(4) for j in range(i, 4))
        self._products = [
            old + before[i] * after[j] for old, (i, j) in zip(self._products, pairs, strict=True)
        ]

    def _ratio(self) -> float:
        """Return the smaller of F_1 and F_0; a falling loss makes only F_1 large."""
        d_1, d_2, e_1, _ = self._means
        return min(d_1, (4 * d_1 - d_2) / 3) / e_1

    def _covariance(self, i: int, j: int) -> float:
        """Return the covariance of the means i and j."""
        low, high = min(i, j), max(i, j)
        # Position in the upper triangle of a 4 x 4 matrix, stored by rows.
        return self._products[4 * low - low * (low - 1) // 2 + high - low] / (self._count - 1) / self._count

    def _interval(self, one: float, two: float, denominator: int, quantile: float) -> tuple[float, float]:
        """Return the interval of ``(one d_1 + two d_2) / e``, where e is e_1 (0) or e_2 (1)."""
        cov, e = self._covariance, 2 + denominator
        return fieller(
            one * self._means[0] + two * self._means[1],
            self._means[e],
            s_xx=one * one * cov(0, 0) + 2 * one * two * cov(0, 1) + two * two * cov(1, 1),
            s_yy=cov(e, e),
            s_xy=one * cov(0, e) + two * cov(1, e),
            quantile=quantile,
        )
