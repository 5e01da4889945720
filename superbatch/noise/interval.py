"""Ratio of two averages with its interval (Fieller's), and quantiles of Student's t distribution."""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

CONFIDENCE = 0.95

FEWEST_EFFECTIVE = 2.0
"""A long average must be equivalent to at least this many windows of equal weight."""

FORGETFUL = "the average remembers fewer than 2 windows: pass a beta above 1/3"


@lru_cache(maxsize=256)
def student_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution, for any positive number of degrees of freedom.

    Args:
        probability: between 0.5 and 1, both excluded.
        freedom: degrees of freedom, not necessarily an integer.

    Returns:
        The t below which a draw lies with this probability.

    Examples:
        >>> round(student_quantile(0.975, 10), 6), round(student_quantile(0.975, 2.5), 4)
        (2.228139, 3.5747)
    """
    # P(|t| > q) is the regularised incomplete beta function at x = f / (f + q^2). It grows with x. The
    # bisection runs over z = 1 - x, because x near 1 would lose the digits of q.
    outside = 2 * (1 - probability)
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):  # no floating-point number is left between them
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
    """Return the interval of ``x / y`` for two uncertain means, limited to ratios of 0 or more.

    It contains the ratios R with ``(x - R y)^2 <= q^2 (s_xx - 2 R s_xy + R^2 s_yy)`` (Fieller 1954). If `y`
    is not significantly different from zero, there is no upper end. The delta method would give one that
    fails too often.

    Args:
        x: mean of the numerator.
        y: mean of the denominator.
        s_xx: variance of the mean `x`.
        s_yy: variance of the mean `y`.
        s_xy: covariance of the two means.
        quantile: q, the two-sided quantile of Student's t.

    Returns:
        Lower and upper end; ``(inf, inf)`` if `x` is significantly above zero and `y` significantly below.

    Examples:
        >>> low, high = fieller(10.0, 2.0, s_xx=0.01, s_yy=0.01, s_xy=0.0, quantile=2.0)
        >>> round(low, 3), round(high, 3)
        (4.536, 5.565)
        >>> fieller(10.0, 0.1, s_xx=0.01, s_yy=0.01, s_xy=0.0, quantile=2.0)[1]
        inf
    """
    # `_fieller` computes fourth powers, which may overflow or underflow. So x and y are scaled to about 1, by
    # powers of 2, which round nothing.
    sizes = (max(abs(mean), math.sqrt(abs(square))) for mean, square in ((x, s_xx), (y, s_yy)))
    unit_x, unit_y = (math.ldexp(0.5, math.frexp(size)[1]) for size in sizes)
    x, y, s_xx, s_yy = x / unit_x, y / unit_y, s_xx / unit_x / unit_x, s_yy / unit_y / unit_y
    s_xy = s_xy / unit_x / unit_y
    low, high = _fieller(x, y, s_xx, s_yy, s_xy, quantile)
    return low * unit_x / unit_y, high * unit_x / unit_y


def _fieller(
    x: float, y: float, s_xx: float, s_yy: float, s_xy: float, quantile: float
) -> tuple[float, float]:
    # The inequality is a R^2 - 2 b R + c <= 0.
    a = y * y - quantile**2 * s_yy
    b = x * y - quantile**2 * s_xy
    c = x * x - quantile**2 * s_xx
    root = math.sqrt(max(0.0, b * b - a * c))
    if c > 0 and x > 0:  # x is significantly positive: invert the interval of y / x
        least, most = (b - root) / c, (b + root) / c
        return 1 / most if most > 0 else math.inf, 1 / least if least > 0 else math.inf
    if a > 0 and y > 0:  # x may be 0, y is significantly positive
        return 0.0, max(0.0, (b + root) / a)
    return 0.0, math.inf


class Ratio(NamedTuple):
    """A noise scale with its interval; the fields are those of `superbatch.results.noise.Noise`."""

    batch_size: float | None
    low: float
    high: float
    signal: float
    variance: float
    reason: str | None

    def as_fields(self) -> dict[str, Any]:
        """Return all fields except the reason, as keyword arguments for the classes of reports."""
        fields = self._asdict()
        del fields["reason"]
        return fields

    def without_scale(self) -> Ratio:
        """Return the ratio with signal and variance only, without a noise scale."""
        return Ratio(None, 0.0, math.inf, self.signal, self.variance, None)


LAGS = (1, 2, 4)
"""Lags of the differences between windows; correlated windows have larger differences at larger lags."""

NO_CORRELATION = 1.5
"""Correlations of n windows below this over sqrt(n) count as zero."""

TO_COME = 0.5
"""For the upper end, one more window as noisy as the noisiest so far is assumed, with this share of the
weight of the newest window."""

FORGOTTEN = 0.1
"""The noisiest window decays by this power of beta per window."""

FARTHEST = 2.5
"""A noise scale has a value if its upper end is at most this multiple of it (signal over error of 3.3)."""

_Squares = tuple[float, float, float]


class Moments:
    """Exponentially weighted averages of x (variance of one sample) and y (signal) over windows.

    The variances of the two averages come from differences between successive windows, because the true x and
    y drift during training, and drift is not uncertainty. With weights ``o_t`` the variance of the mean x is
    ``sum o_t^2 (x_t - x_(t-1))^2 / 2``; the variance of the mean y and the covariance have the same form. Two
    corrections cover cases that these differences miss (error rates: tests/core/test_noise_coverage.py):

    * Windows with correlated noise: the variances are multiplied by the ratio of long-run variance to the
      variance of one window. It is estimated from averages of squared differences at lags 1, 2 and 4, for an
      AR(1) process.
    * Rare, very noisy micro-batches: the upper end is computed as if half a further window like the noisiest
      had been measured. The noisiest window is forgotten ten times as slowly as the others.

    Args:
        values: 15 numbers: mean x and mean y (not debiased); their variances and covariance xx, yy, xy;
            averages of squared differences xx, yy, xy at each lag; the noisiest x.
        last: x and y of the last windows, at most 4.
        count: number of windows.

    Raises:
        ValueError: `values` or `last` has the wrong length.
    """

    def __init__(
        self, values: Sequence[float] = (0.0,) * 15, last: Sequence[Sequence[float]] = (), count: int = 0
    ) -> None:
        if len(values) != 15 or len(last) != min(count, LAGS[-1]):
            raise ValueError(
                f"Got {len(values)} values and {len(last)} last windows. Pass 15 values and "
                f"{min(count, LAGS[-1])} last windows."
            )
        self.mean_x, self.mean_y = values[:2]
        self.spread: _Squares = (values[2], values[3], values[4])
        self.apart: list[_Squares] = [(values[k], values[k + 1], values[k + 2]) for k in (5, 8, 11)]
        self.noisiest = values[14]
        self.last: list[tuple[float, float]] = [(x, y) for x, y in last]
        self.count = count

    @property
    def values(self) -> tuple[float, ...]:
        """Return all averages, in the order of the constructor."""
        lags = (each for squares in self.apart for each in squares)
        return (self.mean_x, self.mean_y, *self.spread, *lags, self.noisiest)

    def state(self) -> dict[str, Any]:
        """Return the averages as plain containers of numbers."""
        return {"values": list(self.values), "last": [list(pair) for pair in self.last], "count": self.count}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Moments:
        """Create averages from the result of `state`."""
        return cls([float(each) for each in state["values"]], state["last"], int(state["count"]))

    def add(self, x: float, y: float, beta: float) -> None:
        """Update the averages with one window."""
        rest, available = 1 - beta, len(self.last)
        for index, lag in enumerate(LAGS):
            if available < lag:
                break
            dx, dy = x - self.last[-lag][0], y - self.last[-lag][1]
            xx, yy, xy = self.apart[index]
            self.apart[index] = (
                beta * xx + rest * dx * dx,
                beta * yy + rest * dy * dy,
                beta * xy + rest * dx * dy,
            )
            if lag == 1:
                # The first window has no predecessor, so the second one's difference stands for both.
                share = rest * rest * (1 + beta * beta if self.count == 1 else 1) / 2
                xx, yy, xy = (beta * beta * each for each in self.spread)
                self.spread = (xx + share * dx * dx, yy + share * dy * dy, xy + share * dx * dy)
        self.mean_x, self.mean_y = beta * self.mean_x + rest * x, beta * self.mean_y + rest * y
        self.noisiest = max(x, self.noisiest * beta**FORGOTTEN) if self.count else x
        self.last = [*self.last[1 - LAGS[-1] :], (x, y)]
        self.count += 1

    def of(self, beta: float, data_size: int | None) -> Ratio:
        """Return the ratio of the averages, with its interval.

        Args:
            beta: decay factor of the averages, as in `add`.
            data_size: number of samples from which batches are drawn without replacement; None for unlimited
                data.
        """
        debias = 1 - beta**self.count if self.count else 1.0
        x, y = self.mean_x / debias, self.mean_y / debias
        if self.count < 2:
            return Ratio(None, 0.0, math.inf, y, x, None)
        if (1 + beta) / (1 - beta) < FEWEST_EFFECTIVE:
            return Ratio(None, 0.0, math.inf, y, x, FORGETFUL)
        spread = _of_data((*(each / debias**2 for each in self.spread),), data_size)
        if data_size is not None:
            # If batches are drawn without replacement from D samples, |g|^2 has T / D less noise. The
            # estimate of the signal subtracted the full noise, so T / D is added back.
            y += x / data_size
        n = worth(beta, self.count)
        factor, correlation = self._long_run(x / y if y > 0 else None, n, beta, data_size)
        s_xx, s_yy, s_xy = (factor * each for each in spread)
        # A variance from successive differences of n values has 2 (n - 1)^2 / (3 n - 4) degrees of freedom
        # (von Neumann 1941). Here n is the equivalent number of independent windows.
        free = max(2.0, n * (1 - correlation) / (1 + correlation))
        quantile = student_quantile((1 + CONFIDENCE) / 2, max(1.0, 2 * (free - 1) ** 2 / (3 * free - 4)))
        low, _ = fieller(x, y, s_xx=s_xx, s_yy=s_yy, s_xy=s_xy, quantile=quantile)
        # `more` raises the mean by the assumed further window, and its square raises the variance, because
        # it is not certain that such a window comes.
        more = TO_COME * (1 - beta) / debias * max(0.0, self.noisiest - x)
        _, high = fieller(x + more, y, s_xx=s_xx + more * more, s_yy=s_yy, s_xy=s_xy, quantile=quantile)
        return _judged(
            x, y, low, high, signal_seen=y > 0 and (1 - 1 / FARTHEST) * y >= quantile * math.sqrt(s_yy)
        )

    def _long_run(
        self, ratio: float | None, n: float, beta: float, data_size: int | None
    ) -> tuple[float, float]:
        """Return the long-run variance of ``x - ratio y`` over that of one window, and the correlation."""

        def difference(index: int) -> float:
            weight = 1 - beta ** (self.count - LAGS[index])
            xx, yy, xy = _of_data((*(each / weight for each in self.apart[index]),), data_size)
            return yy if ratio is None else xx - 2 * ratio * xy + ratio * ratio * yy

        if self.count <= LAGS[-1]:
            return 1.0, 0.0
        one, two, four = (difference(index) for index in range(3))
        if one <= 0 or two <= 0:  # all windows are equal
            return 1.0, 0.0
        # For AR(1) with correlation r, the differences at lags 1, 2 and 4 are proportional to 1 - r, 1 - r^2
        # and 1 - r^4: two / one - 1 estimates r, and four / two - 1 estimates r^2. n values cannot show a
        # correlation closer to 1 than `most`.
        most = 1 - 2 / n if n > 4 else 0.5
        near = two / one - 1
        if near <= NO_CORRELATION / math.sqrt(n):
            return 1.0, 0.0
        near = min(near, most)
        far = math.sqrt(min(max(four / two - 1, 0.0), most * most))
        # The long-run variance is (1 + r) / (1 - r) times the variance of one window. The differences at lag
        # 1, from which that variance is computed, show only 1 - r of it.
        by_near = (1 + near) / (1 - near) ** 2
        by_far = two / one * (1 + far) / ((1 - far) * (1 - far * far))
        return (by_far, far) if by_far > by_near else (by_near, near)


def _of_data(squares: tuple[float, ...], data_size: int | None) -> tuple[float, float, float]:
    """Convert the squares xx, yy, xy of (x, y) to those of (x, y + x / data_size)."""
    xx, yy, xy = squares
    if data_size is None:
        return xx, yy, xy
    d = 1 / data_size
    return xx, max(0.0, yy + 2 * d * xy + d * d * xx), xy + d * xx


def worth(beta: float, count: int) -> float:
    """Return the equivalent number of equally weighted windows: (sum of weights)^2 / sum of their squares.

    Examples:
        >>> worth(0.98, 0), round(worth(0.98, 50), 1), round(worth(0.98, 10**6), 1)
        (0.0, 46.1, 99.0)
    """
    if not count:
        return 0.0
    return (1 + beta) / (1 - beta) * (1 - beta**count) / (1 + beta**count)


def _judged(x: float, y: float, low: float, high: float, *, signal_seen: bool) -> Ratio:
    """Return the ratio with a value only if its interval is narrow enough.

    A looser limit would bias the values: a weak signal would meet it only when chance made it too large, and
    the noise scale would then be too small. Only here is a ratio clamped to 0.
    """
    if math.isinf(low):
        reason = (
            "the signal is significantly below zero: micro-batches are not independent draws (pass data_size "
            "if they are drawn without replacement from a small data set)"
        )
        return Ratio(None, 0.0, math.inf, y, x, reason)
    if math.isinf(high):
        return Ratio(None, low, high, y, x, "signal not distinguishable from noise")
    value = max(0.0, x / y) if y > 0 else math.inf
    # With low = 0 there may be no noise. Then `high` is far above the value although the signal is clear.
    if not (high <= FARTHEST * value or (low == 0 and signal_seen)):
        return Ratio(None, low, high, y, x, "signal too uncertain for a value")
    return Ratio(value, low, high, y, x, None)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function, by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction of the complement converges faster here
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    tiny = 1e-300  # Lentz's method replaces zero denominators by a tiny number
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
