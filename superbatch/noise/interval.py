"""A ratio of two averages with its interval (Fieller), and the quantile of Student's t that it takes."""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Mapping, Sequence
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
    # In units that are powers of 2, which round nothing: the fourth powers below may under- or overflow.
    sizes = (max(abs(mean), math.sqrt(abs(square))) for mean, square in ((x, s_xx), (y, s_yy)))
    unit_x, unit_y = (math.ldexp(0.5, math.frexp(size)[1]) for size in sizes)
    x, y, s_xx, s_yy = x / unit_x, y / unit_y, s_xx / unit_x / unit_x, s_yy / unit_y / unit_y
    s_xy = s_xy / unit_x / unit_y
    low, high = _fieller(x, y, s_xx, s_yy, s_xy, quantile)
    return low * unit_x / unit_y, high * unit_x / unit_y


def _fieller(
    x: float, y: float, s_xx: float, s_yy: float, s_xy: float, quantile: float
) -> tuple[float, float]:
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


LAGS = (1, 2, 4)
"""Distances of the windows whose differences are kept: noise that lasts shows in how they grow."""

NO_CORRELATION = 1.5
"""Correlations below this over sqrt(n) are taken for none."""

TO_COME = 0.5
"""Share of the newest window's weight that one more window like the noisiest seen is given."""

FORGOTTEN = 0.1
"""Power of beta by which the noisiest window is forgotten."""

FARTHEST = 2.5
"""A value is named where the upper end is at most this many times as large (signal over error of 3.3)."""

_Squares = tuple[float, float, float]


class Moments:
    """Averages of x (variance of one sample) and y (signal) with the weights of an exponential decay.

    The variances of the two averages come from differences of successive windows: what x and y are averages
    *of* drifts in the course of a training, which is no uncertainty. With weights ``o_t`` that is
    ``sum o_t^2 (x_t - x_(t-1))^2 / 2``, and likewise for y and x y. Two things that this does not see are
    added (tests/core/test_noise_coverage.py has the error rates):

    * Windows whose noise is correlated: the variances are multiplied by the long-run variance over that of
      one window, by the averaged squared differences ``D_k`` at lags 1, 2 and 4, as of an AR(1) process.
    * Rare, very noisy micro-batches: the upper end is taken as if half of one more window like the noisiest
      one seen (forgotten ten times as slowly) were still to come.

    Args:
        values: mean x, mean y (not yet debiased); the variances xx, yy, xy of these; averages of squared
            differences xx, yy, xy at each lag; the noisiest x.
        last: the last windows, x and y of each, at most 4.
        count: of windows.

    Raises:
        ValueError: there are more or fewer values than that.
    """

    def __init__(
        self, values: Sequence[float] = (0.0,) * 15, last: Sequence[Sequence[float]] = (), count: int = 0
    ) -> None:
        if len(values) != 15 or len(last) != min(count, LAGS[-1]):
            raise ValueError(f"{len(values)} averages and {len(last)} last windows of {count}")
        self.mean_x, self.mean_y = values[:2]
        self.spread: _Squares = (values[2], values[3], values[4])
        self.apart: list[_Squares] = [(values[k], values[k + 1], values[k + 2]) for k in (5, 8, 11)]
        self.noisiest = values[14]
        self.last: list[tuple[float, float]] = [(x, y) for x, y in last]
        self.count = count

    @property
    def values(self) -> tuple[float, ...]:
        """All averages, as the constructor takes them."""
        lags = (each for squares in self.apart for each in squares)
        return (self.mean_x, self.mean_y, *self.spread, *lags, self.noisiest)

    def state(self) -> dict[str, Any]:
        """The averages as plain containers of numbers."""
        return {"values": list(self.values), "last": [list(pair) for pair in self.last], "count": self.count}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Moments:
        """Make the averages that `state` returned."""
        return cls([float(each) for each in state["values"]], state["last"], int(state["count"]))

    def add(self, x: float, y: float, beta: float) -> None:
        """Let the averages move towards one more window."""
        rest, seen = 1 - beta, len(self.last)
        for place, lag in enumerate(LAGS):
            if seen < lag:
                break
            dx, dy = x - self.last[-lag][0], y - self.last[-lag][1]
            xx, yy, xy = self.apart[place]
            self.apart[place] = (
                beta * xx + rest * dx * dx,
                beta * yy + rest * dy * dy,
                beta * xy + rest * dx * dy,
            )
            if lag == 1:
                # The first window has no one before it: the second speaks for both.
                share = rest * rest * (1 + beta * beta if self.count == 1 else 1) / 2
                xx, yy, xy = (beta * beta * each for each in self.spread)
                self.spread = (xx + share * dx * dx, yy + share * dy * dy, xy + share * dx * dy)
        self.mean_x, self.mean_y = beta * self.mean_x + rest * x, beta * self.mean_y + rest * y
        self.noisiest = max(x, self.noisiest * beta**FORGOTTEN) if self.count else x
        self.last = [*self.last[1 - LAGS[-1] :], (x, y)]
        self.count += 1

    def of(self, beta: float, data_size: int | None) -> Ratio:
        """The ratio of the averages, with its interval."""
        debias = 1 - beta**self.count if self.count else 1.0
        x, y = self.mean_x / debias, self.mean_y / debias
        if self.count < 2:
            return Ratio(None, 0.0, math.inf, y, x, None)
        if (1 + beta) / (1 - beta) < FEWEST_EFFECTIVE:
            return Ratio(None, 0.0, math.inf, y, x, FORGETFUL)
        spread = _of_data((*(each / debias**2 for each in self.spread),), data_size)
        if data_size is not None:
            # Without replacement |g|^2 has T / D too little noise in it, which was taken off: it is signal of
            # the data that there are.
            y += x / data_size
        n = worth(beta, self.count)
        factor, correlation = self._lasting(x / y if y > 0 else None, n, beta, data_size)
        s_xx, s_yy, s_xy = (factor * each for each in spread)
        # Differences of n values have the freedom of 2 (n - 1)^2 / (3 n - 4) independent ones (von Neumann
        # 1941); n is that of independent windows with the same information.
        free = max(2.0, n * (1 - correlation) / (1 + correlation))
        quantile = student_quantile((1 + CONFIDENCE) / 2, max(1.0, 2 * (free - 1) ** 2 / (3 * free - 4)))
        low, _ = fieller(x, y, s_xx=s_xx, s_yy=s_yy, s_xy=s_xy, quantile=quantile)
        more = TO_COME * (1 - beta) / debias * max(0.0, self.noisiest - x)
        _, high = fieller(x + more, y, s_xx=s_xx + more * more, s_yy=s_yy, s_xy=s_xy, quantile=quantile)
        return _judged(
            x, y, low, high, signal_seen=y > 0 and (1 - 1 / FARTHEST) * y >= quantile * math.sqrt(s_yy)
        )

    def _lasting(
        self, ratio: float | None, n: float, beta: float, data_size: int | None
    ) -> tuple[float, float]:
        """Long-run variance of ``x - ratio y`` over that of one window, and the correlation of windows."""

        def apart(place: int) -> float:
            weight = 1 - beta ** (self.count - LAGS[place])
            xx, yy, xy = _of_data((*(each / weight for each in self.apart[place]),), data_size)
            return yy if ratio is None else xx - 2 * ratio * xy + ratio * ratio * yy

        if self.count <= LAGS[-1]:
            return 1.0, 0.0
        one, two, four = (apart(place) for place in range(3))
        if one <= 0 or two <= 0:  # every window is the same
            return 1.0, 0.0
        most = 1 - 2 / n if n > 4 else 0.5
        near = two / one - 1
        if near <= NO_CORRELATION / math.sqrt(n):
            return 1.0, 0.0
        near = min(near, most)
        far = math.sqrt(min(max(four / two - 1, 0.0), most * most))
        by_near = (1 + near) / (1 - near) ** 2
        by_far = two / one * (1 + far) / ((1 - far) * (1 - far * far))
        return (by_far, far) if by_far > by_near else (by_near, near)


def _of_data(squares: tuple[float, ...], data_size: int | None) -> tuple[float, float, float]:
    """Squares xx, yy, xy of (x, y), as of (x, y + x / data_size)."""
    xx, yy, xy = squares
    if data_size is None:
        return xx, yy, xy
    d = 1 / data_size
    return xx, max(0.0, yy + 2 * d * xy + d * d * xx), xy + d * xx


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


def _judged(x: float, y: float, low: float, high: float, *, signal_seen: bool) -> Ratio:
    """Name a ratio where its interval is narrow enough; the only clamp of all is here.

    A weak signal passes a weaker rule only where it came out too large by chance, and what is named then is
    too small.
    """
    if math.isinf(low):
        reason = (
            "the signal came out below zero beyond chance: micro-batches are not independent draws (give "
            "data_size where they are drawn without replacement from few data)"
        )
        return Ratio(None, 0.0, math.inf, y, x, reason)
    if math.isinf(high):
        return Ratio(None, low, high, y, x, "signal not told from noise")
    value = max(0.0, x / y) if y > 0 else math.inf
    # Where there may be no noise at all (low is 0), the ratio of the ends says nothing of the signal.
    if not (high <= FARTHEST * value or (low == 0 and signal_seen)):
        return Ratio(None, low, high, y, x, "signal hardly told from noise: a bound, no value")
    return Ratio(value, low, high, y, x, None)


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
