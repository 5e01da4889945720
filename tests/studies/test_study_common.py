"""Tests on pairs of runs, and the order of the samples of a study."""

from __future__ import annotations

import math

import pytest

from superbatch.lab.report.study import StudyArm
from superbatch.lab.studies.study_common import equivalence_test, stream
from tests.studies.planted import planted


def test_the_statistical_test_uses_pairs_of_one_seed() -> None:
    """Seeds differ by far more than the margin, pairs do not."""
    levels = [80.0, 90.0, 95.0, 70.0]
    second = planted("B", {"accuracy": levels})
    first = planted(
        "A", {"accuracy": [level + d for level, d in zip(levels, (0.1, -0.1, 0.05, 0.0), strict=True)]}
    )
    shuffled = StudyArm(name="A", how="", facts={}, runs=first.runs[::-1])
    for arm in (first, shuffled):
        test = equivalence_test(arm, second, "accuracy", margin=0.5)
        assert test is not None and test.result.equivalent
        assert test.difference == pytest.approx(0.0125)
    worse = planted("A", {"accuracy": [level - 1 for level in levels]})
    test = equivalence_test(worse, second, "accuracy", margin=0.5)
    assert test is not None and not test.result.equivalent


def test_a_ratio_is_tested_by_its_logarithm() -> None:
    first, second = planted("A", {"loss": [1.2, 2.42, 4.8]}), planted("B", {"loss": [1.0, 2.0, 4.0]})
    test = equivalence_test(first, second, "loss", margin=1.1, ratio=True)
    assert test is not None
    assert test.difference == pytest.approx((1.2 * 1.21 * 1.2) ** (1 / 3))
    assert test.margin == pytest.approx(1.1)
    assert not test.result.equivalent
    test = equivalence_test(first, second, "loss", margin=1.3, ratio=True)
    assert test is not None and test.result.equivalent


def test_values_that_cannot_be_compared_are_not_equivalent() -> None:
    one, diverged = planted("A", {"loss": [1.0]}), planted("A", {"loss": [1.0, math.nan, 1.0]})
    base = planted("B", {"loss": [1.0, 1.0, 1.0]})
    assert equivalence_test(one, base, "loss", margin=1.1, ratio=True) is None
    for ratio in (True, False):
        test = equivalence_test(diverged, base, "loss", margin=1.1, ratio=ratio)
        assert test is not None and not test.result.equivalent


def test_a_longer_stream_begins_like_a_shorter_one() -> None:
    short, long = stream(50, 70, seed=3), stream(50, 300, seed=3)
    assert short.equal(long[:70])
    assert sorted(long[50:100].tolist()) == list(range(50)), "each round is a permutation"
    assert not short.equal(stream(50, 70, seed=4))
