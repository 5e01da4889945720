"""Statistics of a comparison: mean, standard deviation, and tests that two means are *equivalent*.

``p > .05`` in a test for a difference does not show equality: few noisy runs give it whether the means differ
or not. Two one-sided tests (TOST) reject the opposite hypothesis, "they differ by at least the margin".

Runs of the same seed share initial weights and sample order, so their difference is free of the variation
between seeds: `tost_paired`. Arms with their own seeds are independent groups whose variances may differ:
`tost_welch`.

A metric with steps (an accuracy on m test samples has steps of 100 / m %) is often equal in all of a few
runs, which does not show that its spread is 0. The standard deviation is therefore at least that of two
neighbouring values: ``step / sqrt(2)`` of a paired difference, ``step / 2`` of each group. With fewer than
`FEWEST_RUNS` runs there is no verdict.

A true difference as large as the margin is called equivalent in 0 to 6 % of simulated studies (5 % by design;
2000 studies per cell, tests/studies/test_equivalence_rates.py), with ties and with normal differences. If
differences are skewed because one seed in many fails, the share is 14 to 17 % at 3 to 10 runs: no test on few
runs excludes rare failures.

Reference: Schuirmann, J. Pharmacokin. Biopharm. 15 (1987) 657; Lakens, Soc. Psychol. Personal. Sci. 8 (2017)
355. The floor of the standard deviation is this project's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from scipy import stats

from superbatch.errors import InputError

from ..report.comparison import FEWEST_RUNS, Equivalence

ALPHA = 0.05  # of each one-sided test
POWER = 0.8


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation (n - 1) and number of runs."""

    mean: float
    sd: float
    runs: int


def summarise(values: Sequence[float]) -> Summary:
    """Return mean and standard deviation of at least two values; NaN if a value is not finite."""
    if len(values) < 2:
        raise InputError(f"{len(values)} value(s): a standard deviation needs two. Run at least two seeds.")
    if not all(math.isfinite(value) for value in values):
        return Summary(math.nan, math.nan, len(values))
    return Summary(statistics.mean(values), statistics.stdev(values), len(values))


def tost_paired(differences: Sequence[float], *, margin: float, step: float | None = None) -> Equivalence:
    """Test that the mean of paired differences d is within the margin.

    ``t = (mean(d) ± margin) / (sd / sqrt(n))`` with n - 1 degrees of freedom, where sd is the standard
    deviation of d, but at least ``step / sqrt(2)``. If sd is 0, p is 0 inside the margin and 1 outside.

    `step` is the smallest change of the metric: 100 / m for a percentage of m samples, 0 for a loss. None
    stands for the `smallest_gap` of 0 and the differences.
    """
    d = summarise(differences)
    grid = smallest_gap([0.0, *differences]) if step is None else step
    sd = max(d.sd, grid / math.sqrt(2))  # in this order `max` keeps a NaN
    return _tost(
        sd / math.sqrt(d.runs),
        d.runs - 1,
        test="paired",
        difference=d.mean,
        margin=margin,
        runs=d.runs,
        runs_needed=runs_needed(sd, margin=margin, groups=1),
        identical=not any(differences),
    )


def tost_welch(first: Summary, second: Summary, *, margin: float, step: float = 0.0) -> Equivalence:
    """Test that the means of two independent groups differ by less than the margin.

    ``t = (m1 - m2 ± margin) / sqrt(s1²/n1 + s2²/n2)`` with Welch's degrees of freedom for unequal variances.
    Each s is at least ``step / 2``.
    """
    sds = [max(group.sd, step / 2) for group in (first, second)]  # in this order `max` keeps a NaN
    a, b = sds[0] ** 2 / first.runs, sds[1] ** 2 / second.runs
    spread = a**2 / (first.runs - 1) + b**2 / (second.runs - 1)
    pooled = math.sqrt((sds[0] ** 2 + sds[1] ** 2) / 2)
    return _tost(
        math.sqrt(a + b),
        (a + b) ** 2 / spread if spread else math.inf,
        test="welch",
        difference=first.mean - second.mean,
        margin=margin,
        runs=min(first.runs, second.runs),
        runs_needed=runs_needed(pooled, margin=margin),
    )


def smallest_gap(values: Sequence[float]) -> float:
    """Return the smallest difference between values that are not equal: an estimate of a metric's step.

    It is a multiple of the true step, and close to 0 for a metric without steps.
    """
    finite = sorted(value for value in values if math.isfinite(value))
    # Values that differ by rounding are equal.
    rounding = 1e-9 * max((abs(value) for value in finite), default=0.0)
    return min((b - a for a, b in pairwise(finite) if b - a > rounding), default=0.0)


def runs_needed(sd: float, *, margin: float, groups: int = 2) -> int | None:
    """Return the runs per arm that show equivalence with a power of 80 % if the true difference is zero.

    ``n = groups (z_{1-alpha} + z_{1-(1-power)/2})² (sd / margin)²``, which is 17.1 (sd/margin)² for two
    groups, and at least `FEWEST_RUNS`. None if sd is not finite.
    """
    if not (math.isfinite(margin) and margin > 0):
        raise InputError(
            f"margin={margin!r} is not a positive number. Give the largest difference that does not matter "
            "to you."
        )
    if not math.isfinite(sd):
        return None
    z = stats.norm.ppf(1 - ALPHA) + stats.norm.ppf(1 - (1 - POWER) / 2)
    return max(FEWEST_RUNS, math.ceil(groups * (z * sd / margin) ** 2))


def limits_of(tests: Iterable[Equivalence]) -> tuple[str, ...]:
    """Return a note on the failures that tests of equivalence cannot exclude; none without a verdict."""
    runs = min((test.runs for test in tests), default=0)
    if runs < FEWEST_RUNS:
        return ()
    share = 100 * (1 - 0.05 ** (1 / runs))
    return (
        f"Few runs cannot exclude rare failures: after {runs} runs without one, up to {share:.0f} % of all "
        "seeds may fail. The tests are for this test set; results vary more over new data.",
    )


def _tost(
    error: float, degrees: float, *, difference: float, margin: float, runs: int, **facts: Any
) -> Equivalence:
    """Return the result of both one-sided t-tests, given the standard error of the difference."""
    if error == 0:  # no sampling error, and nothing to divide by
        p_value, half = float(abs(difference) >= margin), 0.0
    else:
        # For infinite degrees of freedom scipy's t is the normal distribution.
        lower, upper = ((difference + margin) / error, (difference - margin) / error)
        p_value = float(max(stats.t.sf(lower, degrees), stats.t.cdf(upper, degrees)))
        half = float(stats.t.ppf(1 - ALPHA, degrees)) * error
    return Equivalence(
        difference=difference,
        low=difference - half,
        high=difference + half,
        confidence=1 - 2 * ALPHA,
        margin=margin,
        p_value=p_value,
        equivalent=runs >= FEWEST_RUNS and p_value < ALPHA,
        runs=runs,
        **facts,
    )
