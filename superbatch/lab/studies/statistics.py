"""Statistics of a comparison: mean and sd, and the test that two means are *equivalent*.

``p > .05`` in a test for a difference is no evidence of equality: few noisy runs never find one. Two
one-sided tests (TOST) turn the question round: the hypothesis to reject is "they differ by at least the
margin".

Which version is right depends on the seeds. Runs of the same seed share initial weights and sample order, so
their difference is free of the variation between seeds: `tost_paired`. Arms with seeds of their own are
independent groups whose variances need not be equal: `tost_welch`.

Reference: Schuirmann, J. Pharmacokin. Biopharm. 15 (1987) 657; Lakens, Soc. Psychol. Personal. Sci. 8 (2017)
355.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from superbatch.errors import InputError

from ..report.comparison import Equivalence

ALPHA = 0.05
POWER = 0.8


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation (n - 1) and number of runs.

    Examples:
        >>> Summary(mean=95.0, sd=0.2, runs=10).runs
        10
    """

    mean: float
    sd: float
    runs: int


def summarise(values: Sequence[float]) -> Summary:
    """Mean and standard deviation of at least two values.

    Args:
        values: one per run.

    Returns:
        Their summary; NaN where a value is not finite.

    Raises:
        InputError: there are fewer than two.

    Examples:
        >>> summarise([1.0, 2.0, 3.0])
        Summary(mean=2.0, sd=1.0, runs=3)
    """
    if len(values) < 2:
        raise InputError(f"{len(values)} value(s): a standard deviation needs two. Run at least two seeds.")
    if not all(math.isfinite(value) for value in values):
        return Summary(math.nan, math.nan, len(values))
    return Summary(statistics.mean(values), statistics.stdev(values), len(values))


def tost_paired(differences: Sequence[float], *, margin: float, alpha: float = ALPHA) -> Equivalence:
    """Test that the mean of paired differences lies within the margin.

    ``t = (mean(d) ± margin) / (sd(d) / sqrt(n))`` with n - 1 degrees of freedom.
    Where all differences are the same there is no sampling error: p is 0 inside the margin, else 1.

    Args:
        differences: one per pair of runs of the same seed, at least two.
        margin: positive, in the unit of the differences.
        alpha: level of the test.

    Returns:
        The test's result.

    Raises:
        InputError: fewer than two differences, or the margin is not positive.

    Examples:
        >>> tost_paired([0.1, -0.1, 0.2, 0.0], margin=0.5).equivalent
        True
        >>> tost_paired([0.0, 0.0, 0.0], margin=0.5).p_value
        0.0
    """
    d = summarise(differences)
    return _tost(
        "paired",
        d.mean,
        d.sd / math.sqrt(d.runs),
        d.runs - 1,
        margin=margin,
        alpha=alpha,
        runs=d.runs,
        needed=runs_needed(d.sd, margin=margin, groups=1, alpha=alpha),
    )


def tost_welch(first: Summary, second: Summary, *, margin: float, alpha: float = ALPHA) -> Equivalence:
    """Test that the means of two independent groups with unequal variances differ by less than the margin.

    ``t = (m1 - m2 ± margin) / sqrt(s1²/n1 + s2²/n2)`` with Welch's degrees of freedom.

    Args:
        first: the group in question.
        second: the group it is compared with.
        margin: positive, in the unit of the means.
        alpha: level of the test.

    Returns:
        The test's result; `runs` is the smaller group's.

    Raises:
        InputError: the margin is not positive.

    Examples:
        The table that the first source published, 10 runs each:

        >>> real = Summary(95.0, 0.172, 10)
        >>> split = [Summary(94.9, 0.325, 10), Summary(95.1, 0.36, 10), Summary(95.2, 0.303, 10)]
        >>> [round(tost_welch(arm, real, margin=0.5).p_value, 4) for arm in split]
        [0.0021, 0.0037, 0.0081]
    """
    a, b = first.sd**2 / first.runs, second.sd**2 / second.runs
    spread = a**2 / (first.runs - 1) + b**2 / (second.runs - 1)
    degrees = (a + b) ** 2 / spread if spread else math.inf
    pooled = math.sqrt((first.sd**2 + second.sd**2) / 2)
    return _tost(
        "welch",
        first.mean - second.mean,
        math.sqrt(a + b),
        degrees,
        margin=margin,
        alpha=alpha,
        runs=min(first.runs, second.runs),
        needed=runs_needed(pooled, margin=margin, groups=2, alpha=alpha),
    )


def runs_needed(
    sd: float, *, margin: float, groups: int = 2, alpha: float = ALPHA, power: float = POWER
) -> int | None:
    """Runs per arm that show equivalence with the given power if the true difference is zero.

    ``n = groups (z_{1-alpha} + z_{1-(1-power)/2})² (sd / margin)²``, which is 17.1 (sd/margin)² for two
    groups, 5 % and 80 %; at least 2.

    Args:
        sd: of the metric over runs (two groups), or of the paired differences (one group).
        margin: positive, in the same unit.
        groups: 2 for independent arms, 1 for pairs.
        alpha: level of the test.
        power: probability to find equivalence.

    Returns:
        Runs per arm; None if the sd is not finite.

    Raises:
        InputError: the margin is not positive.

    Examples:
        >>> runs_needed(0.35, margin=0.5)
        9
    """
    _check_margin(margin)
    if not math.isfinite(sd):
        return None
    z = stats.norm.ppf(1 - alpha) + stats.norm.ppf(1 - (1 - power) / 2)
    return max(2, math.ceil(groups * (z * sd / margin) ** 2))


def _tost(
    test: Any,
    difference: float,
    error: float,
    degrees: float,
    *,
    margin: float,
    alpha: float,
    runs: int,
    needed: int | None,
) -> Equivalence:
    _check_margin(margin)
    if error == 0:  # no sampling error to divide by; the difference is what it is
        p_value, half = float(abs(difference) >= margin), 0.0
    else:
        # Student's t with infinite degrees of freedom is the normal distribution; scipy takes that.
        lower, upper = ((difference + margin) / error, (difference - margin) / error)
        p_value = float(max(stats.t.sf(lower, degrees), stats.t.cdf(upper, degrees)))
        half = float(stats.t.ppf(1 - alpha, degrees)) * error
    return Equivalence(
        test=test,
        difference=difference,
        low=difference - half,
        high=difference + half,
        confidence=1 - 2 * alpha,
        margin=margin,
        p_value=p_value,
        equivalent=p_value < alpha,
        runs=runs,
        runs_needed=needed,
    )


def _check_margin(margin: float) -> None:
    if not (math.isfinite(margin) and margin > 0):
        raise InputError(
            f"margin={margin!r} includes no difference. "
            "Give the largest difference that does not matter to you, a positive number."
        )
