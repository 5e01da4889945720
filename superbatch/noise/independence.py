"""Test of the assumption behind a noise scale: the micro-batches of a window are independent draws.

Noise that all micro-batches of a window share is counted as signal, and nothing inside a window shows it. The
losses of windows do. With the mean loss l_t of a window and the variance v_t of that mean which the spread of
its micro-batches explains, three windows at a time::

    d_1 = (|l_1 - l_2|^2 + |l_2 - l_3|^2) / 4,   d_2 = |l_1 - l_3|^2 / 2
    e_1 = (v_1 + 2 v_2 + v_3) / 4,               e_2 = (v_1 + v_3) / 2
    F_1 = mean d_1 / mean e_1,   F_2 = mean d_2 / mean e_2,   F_0 = mean (4 d_1 - d_2) / 3 / mean e_1

All are 1 for independent draws at the same parameters. A loss that falls adds four times as much to d_2 as to
d_1, so that F_0 has none of it; one that swings from update to update has d_2 < d_1. *Shared*: the lower ends
of all three intervals are above 1.1, and the loss is not shown to move. *Even*: the upper ends of F_1 and F_2
are below 0.9. Otherwise there is no verdict.

A loss moves if the lower end of the interval of ``F_2 - F_1`` is above 0 and ``2 F_0 - F_2 <= 1.1``. So does
one that rises and falls again within a few updates, as after each restart of a learning-rate schedule: such
bumps are no straight lines, and F_0 keeps a part of them. Shared noise gives F_2 = F_1 = F_0. For a random
walk ``F_2 - F_0`` is at least ``F_0 - 1``, and so it is for a stationary process with a correlation of 0.6 or
more between successive windows.

Gradients take the place of losses where parameters rest (`superbatch.torch.tuning.independence`).
They see more, but while parameters move, their noise moves them, and F_1 rises by about rate x curvature.
Error rates and power by simulation are in tests/core/test_noise_independence.py.
"""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..results.noise import Independence
from .interval import CONFIDENCE, fieller, student_quantile

SHARED, EVEN = 1.1, 0.9

FEWEST_TRIPLES = 20

MEMORY = 0.9
"""Of the scale by which triples are weighed: losses become less noisy in the course of a training."""

JUMP = 1e4
"""Times the scale that a triple must explain to begin the test anew: what came before said nothing.

Such as micro-batches of one loss, where the last layer begins with zeros, or a rate that begins with 0: sums
in units of their rounding would outweigh all that follows, for ever.
"""

NOTHING = 1e-6
"""Of d_1: what micro-batches explain below this share is rounding. Copies of one sample explain nothing."""

_LARGEST = 1e100
"""Sums of squares of more would overflow."""

_KINDS = ((1.0, 0.0, 0), (0.0, 1.0, 1), (4 / 3, -1 / 3, 0))
"""F_1, F_2 and F_0: shares of d_1 and d_2 in the numerator, and which e is the denominator."""

_MOVES = (-1.0, 1.0, 0)
"""F_2 - F_1, over e_1: shares of d_1 and d_2."""

_STILL = (8 / 3, -5 / 3)
"""2 F_0 - F_2, over e_1: shares of d_1 and d_2. A moving loss makes it small."""


class IndependenceTest:
    """Sums over triples of windows: 18 numbers, and up to two windows that wait for a third.

    Args:
        means: of d_1, d_2, e_1, e_2, in units of the scale.
        products: sums of products of deviations from these means, the upper triangle by rows.
        waiting: mean loss and explained variance of the windows that wait.
        scale: a recent average of e_1.
        centre: mean loss of the window before.
        count: of triples.

    Raises:
        ValueError: there are more or fewer numbers than that.

    Examples:
        >>> import random
        >>> test, normal = IndependenceTest(), random.Random(0).gauss
        >>> for _ in range(300):  # a window's mean has a variance of 3, of which its micro-batches explain 1
        ...     test.add(normal(0, 3**0.5), 1.0)
        >>> test.judged().verdict
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
            raise ValueError(f"{len(means)} means, {len(products)} products and {len(waiting)} windows")
        self._means, self._products = list(means), list(products)
        self._waiting = [(mean, explained) for mean, explained in waiting]
        self._scale, self._count = scale, count
        self._centre = centre

    @property
    def centre(self) -> float:
        """The loss around which the spread of the next window is taken: that of the window before.

        Any number known before the window leaves the explained variance unbiased; one far off makes it noisy
        where weights are unequal.
        """
        return 0.0 if self._centre is None else self._centre

    def add(self, mean: float, explained: float) -> None:
        """Take in one window; one whose numbers are not finite is left out.

        Args:
            mean: its loss.
            explained: variance of that mean, by the spread of its micro-batches; unbiased, may be negative.
        """
        if not (math.isfinite(mean) and math.isfinite(explained)):
            return
        begun, self._centre = self._centre is not None, mean
        if not begun:  # its spread was taken around 0
            return
        if len(self._waiting) < 2:
            self._waiting.append((mean, explained))
            return
        (a, va), (b, vb) = self._waiting
        self._waiting = []  # the next triple has none of the noise of this one
        # Products, for a power of floats that overflows raises.
        squares = ((a - b) * (a - b), (b - mean) * (b - mean), (a - mean) * (a - mean))
        self.add_triple(squares, (va, vb, explained))

    def add_triple(self, squares: tuple[float, float, float], explained: tuple[float, float, float]) -> None:
        """Take in three windows by their distances, as of gradients.

        Args:
            squares: squared distances of the first and the second, the second and the third, and the first
                and the third.
            explained: variance of each that its micro-batches explain.
        """
        (ab, bc, ac), (va, vb, vc) = squares, explained
        self._take((ab + bc) / 4, ac / 2, (va + 2 * vb + vc) / 4, (va + vc) / 2)

    def judged(self, drawn: float = 0.0) -> Independence:
        """Return the verdict so far.

        Args:
            drawn: share of the data that one window draws without replacement: such windows are more even
                than chance by as much.
        """
        if self._count < FEWEST_TRIPLES:
            return Independence(verdict=None, ratio=None, low=0.0, high=math.inf, triples=self._count)
        quantile = student_quantile((1 + CONFIDENCE) / 2, self._count - 1)
        ends = [self._interval(*kind, quantile) for kind in _KINDS]
        low = min(low for low, _ in ends)
        high = max(high for _, high in ends[:2])
        d_1, d_2, e_1, e_2 = self._means
        # Movement has to be shown, F_2 above F_1: of few triples of shared noise the estimate alone is below
        # the limit by chance.
        moves = _STILL[0] * d_1 + _STILL[1] * d_2 <= SHARED * e_1
        moves = moves and self._interval(*_MOVES, quantile)[0] > 0
        verdict = "even" if high < EVEN * (1 - min(drawn, 1.0)) else None
        if low > SHARED and not moves:
            verdict = "shared"
        if min(e_1, e_2) < 0:  # weights and losses go together: there is nothing to compare with
            verdict = None
        ratio = self._ratio() if e_1 > 0 else math.inf if verdict else None
        return Independence(verdict=verdict, ratio=ratio, low=low, high=high, triples=self._count)

    def state(self) -> dict[str, Any]:
        """The sums as plain containers of numbers."""
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
        """Make the test that `state` returned."""
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

    def _take(self, *triple: float) -> None:
        # A ratio of means stays what it is under weights that are known before the triple. Without them the
        # first windows of a training, whose losses are the noisiest, would outweigh all others.
        if not all(map(math.isfinite, triple)):  # it would never leave the means
            return
        least = NOTHING * triple[0]
        triple = (*triple[:2], *(0.0 if abs(each) < least else each for each in triple[2:]))
        explained = max(triple[2], least)
        if explained > JUMP * self._scale:
            # What is left out hangs on what comes after it, which draws of one window do not know.
            self._means, self._products, self._count = [0.0] * 4, [0.0] * 10, 0
            self._scale = explained
        if not self._scale:  # nothing to compare: losses that do not differ
            return
        scaled = [each / self._scale for each in triple]
        if max(map(abs, scaled)) > _LARGEST:
            return
        if explained:  # a rest without any spread must not make the next triple the heaviest of all
            self._scale = MEMORY * self._scale + (1 - MEMORY) * explained
        self._count += 1
        before = [each - mean for each, mean in zip(scaled, self._means, strict=True)]
        self._means = [mean + off / self._count for mean, off in zip(self._means, before, strict=True)]
        after = [each - mean for each, mean in zip(scaled, self._means, strict=True)]
        pairs = ((i, j) for i in range(4) for j in range(i, 4))
        self._products = [
            old + before[i] * after[j] for old, (i, j) in zip(self._products, pairs, strict=True)
        ]

    def _ratio(self) -> float:
        """Return the smaller of F_1 and F_0: a loss that falls makes F_1 large."""
        d_1, d_2, e_1, _ = self._means
        return min(d_1, (4 * d_1 - d_2) / 3) / e_1

    def _covariance(self, i: int, j: int) -> float:
        """Of two of the means."""
        low, high = min(i, j), max(i, j)
        return self._products[4 * low - low * (low - 1) // 2 + high - low] / (self._count - 1) / self._count

    def _interval(self, one: float, two: float, which: int, quantile: float) -> tuple[float, float]:
        cov, e = self._covariance, 2 + which
        return fieller(
            one * self._means[0] + two * self._means[1],
            self._means[e],
            s_xx=one * one * cov(0, 0) + 2 * one * two * cov(0, 1) + two * two * cov(1, 1),
            s_yy=cov(e, e),
            s_xy=one * cov(0, e) + two * cov(1, e),
            quantile=quantile,
        )
