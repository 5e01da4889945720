"""The equivalence tests against published numbers, scipy's own tests, and simulation."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from scipy import stats

from superbatch.errors import InputError
from superbatch.lab.studies.statistics import Summary, runs_needed, summarise, tost_paired, tost_welch

REAL = Summary(95.0, 0.172, 10)
# Table of the first source on MNIST, and the same on digits: mean, sd, p, lower and upper end.
PUBLISHED = [
    (Summary(94.9, 0.325, 10), REAL, 0.0021, None),
    (Summary(95.1, 0.36, 10), REAL, 0.0037, None),
    (Summary(95.2, 0.303, 10), REAL, 0.0081, (0.01, 0.39)),
    (Summary(95.36, 0.363, 10), Summary(95.38, 0.358, 10), 0.004, (-0.30, 0.26)),
    (Summary(95.32, 0.329, 10), Summary(95.38, 0.358, 10), 0.005, (-0.33, 0.21)),
    (Summary(95.40, 0.298, 10), Summary(95.38, 0.358, 10), 0.002, (-0.24, 0.28)),
]


@pytest.mark.parametrize(("arm", "real", "p", "interval"), PUBLISHED)
def test_published_tables_are_reproduced(
    arm: Summary, real: Summary, p: float, interval: tuple[float, float] | None
) -> None:
    test = tost_welch(arm, real, margin=0.5)
    assert test.p_value == pytest.approx(p, abs=6e-5 if p < 0.001 or interval is None else 6e-4)
    assert test.equivalent
    assert test.confidence == pytest.approx(0.9)
    if interval is not None:
        assert (test.low, test.high) == pytest.approx(interval, abs=0.006)


def p_of(test: Any) -> float:
    """Return the p-value of a test of scipy, whose stubs leave its type open."""
    return float(test.pvalue)


def test_equivalent_and_different_from_zero_at_once() -> None:
    """Row (20, 5) of the source: the interval excludes zero and lies within the margin."""
    test = tost_welch(Summary(95.2, 0.303, 10), REAL, margin=0.5)
    assert test.equivalent
    assert 0 < test.low < test.high < test.margin


def draws(seed: int, mean: float, sd: float, runs: int) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(mean, sd) for _ in range(runs)]


@pytest.mark.parametrize("margin", [0.1, 0.5, 2.0])
def test_welch_agrees_with_two_one_sided_tests_of_scipy(margin: float) -> None:
    a, b = draws(0, 1.0, 0.3, 8), draws(1, 1.2, 0.9, 12)
    lower = p_of(stats.ttest_ind([x + margin for x in a], b, equal_var=False, alternative="greater"))
    upper = p_of(stats.ttest_ind([x - margin for x in a], b, equal_var=False, alternative="less"))
    test = tost_welch(summarise(a), summarise(b), margin=margin)
    assert test.p_value == pytest.approx(max(lower, upper), rel=1e-9)
    assert test.runs == 8


@pytest.mark.parametrize("margin", [0.1, 0.5, 2.0])
def test_paired_agrees_with_two_one_sided_tests_of_scipy(margin: float) -> None:
    d = draws(2, 0.1, 0.4, 9)
    lower = p_of(stats.ttest_1samp(d, -margin, alternative="greater"))
    upper = p_of(stats.ttest_1samp(d, margin, alternative="less"))
    assert tost_paired(d, margin=margin).p_value == pytest.approx(max(lower, upper), rel=1e-9)


@pytest.mark.parametrize("difference", [-0.7, -0.49, 0.0, 0.3, 0.51])
def test_the_verdict_follows_the_interval(difference: float) -> None:
    for test in (
        tost_paired([difference + x for x in (-0.02, 0.0, 0.02)], margin=0.5),
        tost_welch(Summary(difference, 0.03, 5), Summary(0.0, 0.03, 5), margin=0.5),
    ):
        assert test.equivalent == (test.low > -0.5 and test.high < 0.5)


def test_few_noisy_runs_do_not_show_equivalence() -> None:
    """A test for a difference finds none here, but this does not show equality."""
    a, b = [94.0, 96.0, 95.0], [95.5, 94.5, 95.0]
    assert p_of(stats.ttest_ind(a, b, equal_var=False)) > 0.9
    assert not tost_welch(summarise(a), summarise(b), margin=0.5).equivalent


def test_pairs_remove_the_variation_between_seeds() -> None:
    real = draws(3, 95, 2.0, 6)
    arm = [value + d for value, d in zip(real, (0.02, -0.01, 0.0, 0.01, -0.02, 0.01), strict=True)]
    assert not tost_welch(summarise(arm), summarise(real), margin=0.5).equivalent
    assert tost_paired([a - r for a, r in zip(arm, real, strict=True)], margin=0.5).equivalent


@pytest.mark.parametrize(("difference", "p"), [(0.0, 0.0), (0.3, 0.0), (0.5, 1.0), (-0.7, 1.0)])
def test_identical_differences_need_no_sampling_error(difference: float, p: float) -> None:
    paired = tost_paired([difference] * 3, margin=0.5, step=0.0)
    welch = tost_welch(Summary(difference, 0.0, 3), Summary(0.0, 0.0, 3), margin=0.5)
    for test in (paired, welch):
        assert (test.p_value, test.equivalent) == (p, p == 0.0)
        assert test.low == test.high == difference


def test_a_nan_run_is_never_equivalent() -> None:
    test = tost_paired([0.0, math.nan, 0.1], margin=0.5)
    assert not test.equivalent
    assert test.runs_needed is None


@pytest.mark.parametrize(("sd", "margin", "factor"), [(0.35, 0.5, 17.13), (1.0, 0.5, 17.13)])
def test_runs_needed_follows_the_formula(sd: float, margin: float, factor: float) -> None:
    assert runs_needed(sd, margin=margin) == math.ceil(factor * (sd / margin) ** 2)


def test_runs_needed_give_the_stated_power() -> None:
    """Simulate the power. The normal approximation gives slightly too few runs, so it is below 80 %."""
    sd, margin = 0.6, 0.5
    runs = runs_needed(sd, margin=margin)
    assert runs == 25
    found = sum(
        tost_welch(
            summarise(draws(2 * k, 0, sd, runs)), summarise(draws(2 * k + 1, 0, sd, runs)), margin=margin
        ).equivalent
        for k in range(400)
    )
    assert 0.72 < found / 400 < 0.86


@pytest.mark.parametrize("margin", [0.0, -1.0, math.nan, math.inf])
def test_a_margin_must_be_positive(margin: float) -> None:
    with pytest.raises(InputError, match=r"margin=.* is not a positive number. Give "):
        tost_paired([0.0, 0.1], margin=margin)


def test_one_run_has_no_standard_deviation() -> None:
    with pytest.raises(InputError, match="a standard deviation needs two"):
        summarise([1.0])
