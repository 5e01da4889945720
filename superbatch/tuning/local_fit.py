"""Local quadratic fits to a curve of evenly spaced points, and the nearest non-increasing curve."""

from __future__ import annotations

# pyright: strict
from collections.abc import Sequence
from functools import lru_cache
from operator import mul

Row = tuple[int, tuple[float, ...]]
"""Index of the first point that a fit uses, and the weights of this point and the next ones."""

LEAST_REST = 0.1
"""Smallest ``1 - H_ii`` used as a divisor; fits at the ends follow their few points closely."""


class LocalFit:
    """Values and slopes of quadratics fitted to the neighbours of each point, with tricube weights.

    Both are linear in the losses: ``v = H l`` and ``s = S l``, with band matrices H and S. Unlike an
    exponential mean, the fit does not lag behind a falling curve.

    Args:
        points: number of points of the curve.
        half: number of points that a fit uses on each side; fewer at the ends, where fits are noisier.

    References:
        W. S. Cleveland, 1979, J. Am. Stat. Assoc. 74:829.

    Examples:
        >>> fit = LocalFit(9, 3)
        >>> square = [float(t * t) for t in range(9)]
        >>> [round(each, 6) for each in fit.values(square)] == square, round(fit.slopes(square)[4], 6)
        (True, 8.0)
    """

    def __init__(self, points: int, half: int) -> None:
        rows = [_rows(i, points, half) for i in range(points)]
        self._value, self._slope = [value for value, _ in rows], [slope for _, slope in rows]

    def values(self, curve: Sequence[float]) -> list[float]:
        """Return the fitted value at each point."""
        return _applied(self._value, curve)

    def slopes(self, curve: Sequence[float]) -> list[float]:
        """Return the fitted slope at each point, per distance between neighbours."""
        return _applied(self._slope, curve)

    def residuals(self, curve: Sequence[float], values: Sequence[float]) -> list[float]:
        """Return the residual at each point, scaled to the variance of the noise."""
        residuals: list[float] = []
        for i, (first, weights) in enumerate(self._value):
            # The fit follows the noise of its own point: a residual has (1 - H_ii) of the noise's variance.
            rest = max(1 - weights[i - first], LEAST_REST)
            residuals.append((curve[i] - values[i]) / rest**0.5)
        return residuals


@lru_cache(maxsize=8)  # hundreds of repeats of one survey have curves of one length
def local_fit(points: int, half: int) -> LocalFit:
    """Return the fit for curves with this number of points, from a cache if possible.

    Examples:
        >>> local_fit(20, 3) is local_fit(20, 3)
        True
    """
    return LocalFit(points, half)


def falling(curve: Sequence[float]) -> list[float]:
    """Return the non-increasing sequence nearest to a curve in squared distance (isotonic regression).

    References:
        R. E. Barlow and others, 1972, Statistical Inference under Order Restrictions.

    Examples:
        >>> falling([3.0, 1.0, 2.0, 0.0])
        [3.0, 1.5, 1.5, 0.0]
    """
    # Pool adjacent violators: a block that rises above the one before it is merged into it.
    blocks: list[tuple[float, int]] = []
    for each in curve:
        mean, count = each, 1
        while blocks and blocks[-1][0] < mean:
            last, size = blocks.pop()
            mean, count = (last * size + mean * count) / (size + count), size + count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def _applied(rows: Sequence[Row], curve: Sequence[float]) -> list[float]:
    # `sum` over `map` is several times as fast as a loop, and a survey fits hundreds of curves.
    return [sum(map(mul, weights, curve[first : first + len(weights)])) for first, weights in rows]


def _rows(i: int, points: int, half: int) -> tuple[Row, Row]:
    """Return the rows of H and S for point i: weighted least squares in u, the scaled distance from i."""
    first, last = max(0, i - half), min(points, i + half + 1)
    # half + 1, because the tricube weight is 0 at distance 1.
    distances = [(j - i) / (half + 1) for j in range(first, last)]
    weights = [(1 - abs(u) ** 3) ** 3 for u in distances]
    # Normal equations of a quadratic: moments up to u^4.
    moments = [sum(w * u**k for w, u in zip(weights, distances, strict=True)) for k in range(5)]
    inverse = _inverse([[moments[a + b] for b in range(3)] for a in range(3)])

    def row(which: int, scale: float) -> Row:
        a, b, c = inverse[which]
        each = (w * (a + b * u + c * u * u) / scale for w, u in zip(weights, distances, strict=True))
        return first, tuple(each)

    # The fit at u = 0: its constant is the value, its linear coefficient the slope in units of half + 1.
    return row(0, 1.0), row(1, half + 1.0)


def _inverse(m: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the inverse of a symmetric 3 x 3 matrix, by cofactors."""

    def minor(i: int, j: int) -> float:
        (a, b), (c, d) = ([m[r][s] for s in range(3) if s != j] for r in range(3) if r != i)
        return (-1) ** (i + j) * (a * d - b * c)

    determinant = sum(m[0][j] * minor(0, j) for j in range(3))
    return [[minor(j, i) / determinant for j in range(3)] for i in range(3)]
