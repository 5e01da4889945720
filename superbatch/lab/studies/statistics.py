"""Statistics of a comparison: mean and sd, and the test that two means are *equivalent*.

``p > .05`` in a test for a difference is no evidence of equality: few noisy runs never find one. Two
one-sided tests (TOST) turn the question round: the hypothesis to reject is "they differ by at least the
margin".

Which version is right depends on the seeds. Runs of the same seed share initial weights and sample order, so
their difference is free of the variation between seeds: `tost_paired`. Arms with seeds of their own are
independent groups whose variances need not be equal: `tost_welch`.

A metric that moves in steps (an accuracy on m test samples moves by 100 / m %) often comes out the same in
all of a few runs, which says little of its spread. The standard deviation is therefore never taken smaller
than two neighbouring values can have: ``step / sqrt(2)`` of a paired difference, ``step / 2`` of each group.
With fewer than `FEWEST_RUNS` runs there is no verdict.

How often a true difference of the margin is called equivalent (5 % allowed; 2000 simulated studies per cell,
tests/studies/test_equivalence_rates.py): 0 to 6 % with ties and with normal differences. Differences that are
skewed, as where one seed in many fails, have 14 to 17 % at 3 to 10 runs: no test on few runs excludes that.

Reference: Schuirmann, J. Pharmacokin. Biopharm. 15 (1987) 657; Lakens, Soc. Psychol. Personal. Sci. 8 (2017)
355. The floor of the standard deviation is of this project.
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

ALPHA = 0.05
POWER = 0.8


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation (n - 1) and number of runs."""

    mean: float
    sd: float
    runs: int


def summarise(values: Sequence[float]) -> Summary:
    """Mean and standard deviation of at least two values."""
    if len(values) < 2:
        raise InputError(f"{len(values)} value(s): a standard deviation needs two. Run at least two seeds.")
    if not all(math.isfinite(value) for value in values):
        return Summary(math.nan, math.nan, len(values))
    return Summary(statistics.mean(values), statistics.stdev(values), len(values))


def tost_paired(differences: Sequence[float], *, margin: float, step: float | None = None) -> Equivalence:
    """Test that the mean of paired differences lies within the margin.

    ``t = (mean(d) ± margin) / (sd / sqrt(n))`` with n - 1 degrees of freedom, where sd is that of d, and at
    least ``step / sqrt(2)``. Where all differences are the same and `step` is 0 there is no sampling error: p
    is 0 inside the margin, else 1. The step of a metric is 100 / m for a percentage of m samples and 0 for a
    loss; None: `smallest_gap` of 0 and the differences.
    """
    d = summarise(differences)
    grid = smallest_gap([0.0, *differences]) if step is None else step
    sd = _at_least(d.sd, grid / math.sqrt(2))
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
    """Test that the means of two independent groups with unequal variances differ by less than the margin.

    ``t = (m1 - m2 ± margin) / sqrt(s1²/n1 + s2²/n2)`` with Welch's degrees of freedom, each s at least
    ``step / 2``.
    """
    sds = [_at_least(group.sd, step / 2) for group in (first, second)]
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
    """The smallest distance of two values that differ: the step of a metric as far as the values show it.

    It is a multiple of the true step, and next to nothing for a metric without one.
    """
    known = sorted(value for value in values if math.isfinite(value))
    # Values that differ by rounding alone are the same step.
    rounding = 1e-9 * max((abs(value) for value in known), default=0.0)
    return min((b - a for a, b in pairwise(known) if b - a > rounding), default=0.0)


def runs_needed(sd: float, *, margin: float, groups: int = 2) -> int | None:
    """Runs per arm that show equivalence with a power of 80 % if the true difference is zero.

    ``n = groups (z_{1-alpha} + z_{1-(1-power)/2})² (sd / margin)²``, which is 17.1 (sd/margin)² for two
    groups, 5 % and 80 %; at least `FEWEST_RUNS`.
    """
    if not (math.isfinite(margin) and margin > 0):
        raise InputError(
            f"margin={margin!r} includes no difference. "
            "Give the largest difference that does not matter to you, a positive number."
        )
    if not math.isfinite(sd):
        return None
    z = stats.norm.ppf(1 - ALPHA) + stats.norm.ppf(1 - (1 - POWER) / 2)
    return max(FEWEST_RUNS, math.ceil(groups * (z * sd / margin) ** 2))


def limits_of(tests: Iterable[Equivalence]) -> tuple[str, ...]:
    """Describe for the reader of a report the differences that tests of equivalence cannot exclude."""
    runs = min((test.runs for test in tests), default=0)
    if runs < FEWEST_RUNS:
        return ()
    share = 100 * (1 - 0.05 ** (1 / runs))
    return (
        f"A seed that fails rarely cannot be excluded by few runs: {runs} without a failure leave up to "
        f"{share:.0f} % of all seeds. The tests speak of this test set; over new data results vary more.",
    )


def _tost(
    error: float, degrees: float, *, difference: float, margin: float, runs: int, **facts: Any
) -> Equivalence:
    if error == 0:  # no sampling error to divide by; the difference is what it is
        p_value, half = float(abs(difference) >= margin), 0.0
    else:
        # Student's t with infinite degrees of freedom is the normal distribution; scipy takes that.
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


def _at_least(sd: float, floor: float) -> float:
    return sd if math.isnan(sd) else max(sd, floor)
