"""A ratio of two averages with its interval (Fieller), and the quantile of Student's t that it takes."""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

CONFIDENCE = 0.95

FEWEST_EFFECTIVE = 2.0
"""Windows of equal weight that an average must be worth; their number less one is the degrees of freedom."""

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


class Moments:
    """Averages of x (variance of one sample), y (signal), x^2, y^2 and x y, not yet debiased."""

    def __init__(self, values: Sequence[float] = (0.0,) * 5) -> None:
        x, y, xx, yy, xy = values
        self.values = (x, y, xx, yy, xy)

    def add(self, x: float, y: float, beta: float) -> None:
        """Let the averages move towards one more window."""
        new = (x, y, x * x, y * y, x * y)
        rest = 1 - beta
        x, y, xx, yy, xy = (beta * old + rest * value for old, value in zip(self.values, new, strict=True))
        self.values = (x, y, xx, yy, xy)

    def of(self, worth: float, debias: float, data_size: int | None) -> Ratio:
        """The ratio of the averages, over so many windows of equal weight."""
        if not debias:
            return Ratio(None, 0.0, math.inf, 0.0, 0.0, None)
        x, y, xx, yy, xy = (value / debias for value in self.values)
        var_x, var_y, cov = max(0.0, xx - x * x), max(0.0, yy - y * y), xy - x * y
        if data_size is not None:
            # Without replacement |g|^2 has T / D too little noise in it, which was taken off: it is signal of
            # the data that there are.
            d = 1 / data_size
            y, var_y, cov = y + d * x, max(0.0, var_y + 2 * d * cov + d * d * var_x), cov + d * var_x
        if worth < FEWEST_EFFECTIVE:  # a small beta: the quantile would be beyond all numbers
            return Ratio(None, 0.0, math.inf, y, x, FORGETFUL)
        means = worth - 1
        low, high = fieller(
            x,
            y,
            s_xx=var_x / means,
            s_yy=var_y / means,
            s_xy=cov / means,
            quantile=student_quantile((1 + CONFIDENCE) / 2, means),
        )
        return _judged(x, y, low, high, known=worth)


def _judged(x: float, y: float, low: float, high: float, *, known: float) -> Ratio:
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
