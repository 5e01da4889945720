"""A ratio of two averages with its interval (Fieller), and the quantile of Student's t that it takes."""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

CONFIDENCE = 0.95

FEWEST_EFFECTIVE = 2.0
"""Windows of equal weight that a long average must be worth."""

FORGETFUL = "the average remembers fewer than 2 windows: give a beta of more than 1/3"


@lru_cache(maxsize=256)
def student_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution, for any positive number of degrees of freedom.

    Args:
        probability: between 0.5 and 1, both excluded.
        freedom: degrees of freedom, not necessarily whole.

    Returns:
        The t below which a draw lies with this probability.

    Examples:
        >>> round(student_quantile(0.975, 10), 6), round(student_quantile(0.975, 2.5), 4)
        (2.228139, 3.5747)
    """
    # P(|t| > q) is the regularised incomplete beta function at x = f / (f + q^2), which rises with x. What is
    # small near x = 1 is its complement z = 1 - x, so that is what is halved.
    outside = 2 * (1 - probability)
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if 1 - _incomplete_beta(0.5, freedom / 2, middle) > outside:
            low = middle
        else:
            high = middle
    z = (low + high) / 2
    return math.sqrt(freedom * z / (1 - z))


def fieller(
    x: float, y: float, *, s_xx: float, s_yy: float, s_xy: float, quantile: float
) -> tuple[float, float]:
    """Return the interval for ``x / y``, both of them uncertain, as a ratio that is not negative.

    The ratios R with ``(x - R y)^2 <= q^2 (s_xx - 2 R s_xy + R^2 s_yy)`` (Fieller 1954). Where `y` cannot be
    told from zero there is no upper end; a delta-method interval would name one, and be wrong too often.

    Args:
        x: mean of the numerator.
        y: mean of the denominator.
        s_xx: variance of that mean `x`.
        s_yy: variance of that mean `y`.
        s_xy: their covariance.
        quantile: of Student's t, two-sided.

    Returns:
        Lower and upper end; ``(inf, inf)`` where `y` is below zero beyond doubt, while `x` is above.

    Examples:
        >>> low, high = fieller(10.0, 2.0, s_xx=0.01, s_yy=0.01, s_xy=0.0, quantile=2.0)
        >>> round(low, 3), round(high, 3)
        (4.536, 5.565)
        >>> fieller(10.0, 0.1, s_xx=0.01, s_yy=0.01, s_xy=0.0, quantile=2.0)[1]
        inf
    """
    a = y * y - quantile**2 * s_yy
    b = x * y - quantile**2 * s_xy
    c = x * x - quantile**2 * s_xx
    root = math.sqrt(max(0.0, b * b - a * c))
    if c > 0 and x > 0:  # the noise is there: an interval for y / x, of which this is the inverse
        least, most = (b - root) / c, (b + root) / c
        return 1 / most if most > 0 else math.inf, 1 / least if least > 0 else math.inf
    if a > 0 and y > 0:  # the noise may be nothing, the signal is there
        return 0.0, max(0.0, (b + root) / a)
    return 0.0, math.inf


class Ratio(NamedTuple):
    """A noise scale with its interval."""

    batch_size: float | None
    low: float
    high: float
    signal: float
    variance: float
    reason: str | None

    def as_fields(self) -> dict[str, Any]:
        """The fields of the reports, but for the reason."""
        fields = self._asdict()
        del fields["reason"]
        return fields

    def without_scale(self) -> Ratio:
        """Return signal and variance alone: the noise scale may be anything."""
        return Ratio(None, 0.0, math.inf, self.signal, self.variance, None)


class Moments:
    """Averages of x (variance of one sample) and y (signal) with the weights of an exponential decay.

    The variances of the two averages come from differences of successive windows: their draws are
    independent, while what x and y are averages *of* drifts in the course of a training, which is no
    uncertainty. With weights ``o_t`` that is ``sum o_t^2 (x_t - x_(t-1))^2 / 2``, and likewise for y and x y.

    Args:
        values: mean x, mean y (not yet debiased); the variances xx, yy, xy of these; the last x and y.
        count: of windows.
    """

    def __init__(self, values: Sequence[float] = (0.0,) * 7, count: int = 0) -> None:
        x, y, xx, yy, xy, last_x, last_y = values
        self.values = (x, y, xx, yy, xy, last_x, last_y)
        self.count = count

    def add(self, x: float, y: float, beta: float) -> None:
        """Let the averages move towards one more window."""
        mean_x, mean_y, xx, yy, xy, last_x, last_y = self.values
        rest = 1 - beta
        if self.count:
            # The first window has no one before it: the second speaks for both.
            share = rest * rest * (1 + beta * beta if self.count == 1 else 1)
            dx, dy = x - last_x, y - last_y
            old = beta * beta
            xx, yy, xy = (
                old * each + share * new / 2 for each, new in ((xx, dx * dx), (yy, dy * dy), (xy, dx * dy))
            )
        self.values = (beta * mean_x + rest * x, beta * mean_y + rest * y, xx, yy, xy, x, y)
        self.count += 1

    def of(self, beta: float, data_size: int | None) -> Ratio:
        """The ratio of the averages, with its interval."""
        if self.count < 2:
            debias = 1 - beta**self.count if self.count else 1.0
            return Ratio(None, 0.0, math.inf, self.values[1] / debias, self.values[0] / debias, None)
        debias = 1 - beta**self.count
        x, y = (value / debias for value in self.values[:2])
        s_xx, s_yy, s_xy = (value / debias**2 for value in self.values[2:5])
        if data_size is not None:
            # Without replacement |g|^2 has T / D too little noise in it, which was taken off: it is signal of
            # the data that there are.
            d = 1 / data_size
            y, s_yy, s_xy = y + d * x, max(0.0, s_yy + 2 * d * s_xy + d * d * s_xx), s_xy + d * s_xx
        if (1 + beta) / (1 - beta) < FEWEST_EFFECTIVE:
            return Ratio(None, 0.0, math.inf, y, x, FORGETFUL)
        # Windows of equal weight that the sum of squares is worth; differences of n values have the freedom
        # of 2 (n - 1)^2 / (3 n - 4) independent ones (von Neumann 1941).
        n = worth(beta * beta, self.count)
        freedom = max(1.0, 2 * (n - 1) ** 2 / max(1.0, 3 * n - 4))
        quantile = student_quantile((1 + CONFIDENCE) / 2, freedom)
        low, high = fieller(x, y, s_xx=s_xx, s_yy=s_yy, s_xy=s_xy, quantile=quantile)
        return _judged(x, y, low, high)


def worth(beta: float, count: int) -> float:
    """Return the equivalent number of windows of equal weight: (sum of weights)^2 / sum of squares.

    Args:
        beta: of the decay.
        count: of windows.

    Examples:
        >>> worth(0.98, 0), round(worth(0.98, 50), 1), round(worth(0.98, 10**6), 1)
        (0.0, 46.1, 99.0)
    """
    if not count:
        return 0.0
    return (1 + beta) / (1 - beta) * (1 - beta**count) / (1 + beta**count)


def _judged(x: float, y: float, low: float, high: float) -> Ratio:
    """A ratio is named where its interval ends; the only clamp of all is here."""
    if math.isinf(low):
        reason = (
            "the signal came out below zero beyond chance: micro-batches are not independent draws (give "
            "data_size where they are drawn without replacement from few data)"
        )
        return Ratio(None, 0.0, math.inf, y, x, reason)
    if math.isinf(high):
        return Ratio(None, low, high, y, x, "signal not told from noise")
    return Ratio(max(0.0, x / y), low, high, y, x, None)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # where the fraction of the complement converges faster
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    tiny = 1e-300
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 1000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away_from_zero(1 + term * d, tiny)
            c = _away_from_zero(1 + term / c, tiny)
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * fraction / a


def _away_from_zero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny
