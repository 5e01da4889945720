"""The studies at full size on the digits, against expected numbers.

Each takes minutes and has a time limit, so it needs an idle machine. Skipped by default. Run all with
`./run test-studies`, one with `./run test-studies -k momentum`.
"""

from __future__ import annotations

import pytest

from superbatch.lab.report.study import Study, StudyTest
from superbatch.lab.studies.study import Options, study

pytestmark = pytest.mark.studies

LIMIT = 600
"""Seconds on two cores."""


def full(name: str) -> Study:
    report = study(name, "digits", Options(workers=2))
    assert report.seconds < LIMIT, "needs an idle machine"
    return report


def found(report: Study, first: str, second: str, quantity: str) -> StudyTest:
    return next(
        test for test in report.tests if (test.first, test.second, test.quantity) == (first, second, quantity)
    )


def test_momentum() -> None:
    report = full("momentum")
    accuracy = {arm.name: arm.mean("test accuracy, %") for arm in report.arms}
    expected = {"A": 97.24, "B": 97.24, "C": 97.28, "D": 97.28, "E": 94.72, "F": 97.34}
    assert {name: accuracy[name] for name in expected} == pytest.approx(expected, abs=0.5)
    lost = accuracy["G"]
    assert lost is not None and lost < 15
    for first, second in (("C", "A"), ("D", "A"), ("C", "D")):
        assert found(report, first, second, "test accuracy, %").result.equivalent, (first, second)
    assert found(report, "C", "A", "noise excess").low > 1 / 2
    noise = {arm.name: arm.mean("noise excess") or 0.0 for arm in report.arms}
    assert noise["F"] < noise["A"] / 16
    assert report.conclusion.startswith(
        "Momentum 0.99 with lr/(1-m) kept acts like the small batch, not like a large one"
    )


def test_grow_batch() -> None:
    report = full("grow-batch")
    updates = {arm.name: arm.mean("updates") for arm in report.arms}
    assert updates["decay the rate"] == 4000
    assert updates["grow the batch"] == pytest.approx(2240, rel=0.02)
    accuracy = [arm.mean("test accuracy, %") for arm in report.arms[1:]]
    assert accuracy == pytest.approx([97.52, 97.54], abs=0.3)
    assert found(report, "grow the batch", "decay the rate", "training loss").result.equivalent
    assert report.conclusion.startswith("Growing the batch acts like decaying the rate, in fewer updates")


def test_critical_batch() -> None:
    report = full("critical-batch")
    needed = [arm.mean("samples needed, x") or 0.0 for arm in report.arms]
    predicted = [arm.mean("by the noise scale, x") or 0.0 for arm in report.arms]
    assert needed[1] < 1.1
    assert needed[4] > needed[3] > needed[1]
    # Claim: "Good to 25 % up to B_noise, optimistic by 1.5 to 2 beyond".
    assert all(0.6 < measured / model < 2 for measured, model in zip(needed, predicted, strict=True))


def test_precision() -> None:
    report = full("precision")
    rows = {arm.name: [arm.mean(f"K = {count}") for count in (16, 64, 256, 1024)] for arm in report.arms}
    table = {
        "naive sum, bfloat16": [4.2e-3, 7.8e-3, 1.9e-2, 0.34],
        "stochastic rounding, bfloat16": [5.7e-3, 1.1e-2, 2.2e-2, 4.2e-2],
        "pairwise, bfloat16": [2.6e-3] * 4,
        "Kahan, bfloat16": [1.7e-3] * 4,
    }
    for name, expected in table.items():
        assert rows[name] == pytest.approx(expected, rel=0.25), name
    for name in ("float32 sum of bfloat16", "model: sum in float32"):
        assert max(each or 1.0 for each in rows[name]) < 1e-6, name


@pytest.mark.parametrize("name", ["splits", "survey"])
def test_virtual_batches(name: str) -> None:
    report = full(name)
    assert "like the real batch" in report.conclusion
    assert "NOT" not in report.conclusion
