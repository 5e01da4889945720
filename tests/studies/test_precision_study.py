"""The study of sums in bfloat16: direction of the effects, and conclusions."""

from __future__ import annotations

import math

import pytest

from superbatch.lab.report.study import Study
from superbatch.lab.studies import study_precision
from tests.studies.planted import planted


def test_a_sum_in_bfloat16_loses_accuracy_unlike_one_in_float32(precision: Study) -> None:
    error = {arm.name: arm.mean("K = 256") or math.nan for arm in precision.arms}
    for name in ("naive sum, bfloat16", "naive sum, bfloat16, one sign", "model: sum in .grad, bfloat16"):
        assert error[name] > 1e-2, name
    for name in ("float32 sum of bfloat16", "model: sum in float32", "naive sum, float32"):
        assert error[name] < 1e-6, name
    assert error["model: sum in float32"] > 0, "the premise: it is not the reference itself"
    # Table of section 8, within 20 %.
    for name, expected in (
        ("naive sum, bfloat16", 1.9e-2),
        ("stochastic rounding, bfloat16", 2.2e-2),
        ("pairwise, bfloat16", 2.6e-3),
        ("Kahan, bfloat16", 1.7e-3),
    ):
        assert error[name] == pytest.approx(expected, rel=0.2), name
    assert precision.conclusion.startswith("Sum in float32:")


def test_precision_concludes_from_the_numbers() -> None:
    names = [each.name for each in (*study_precision.DRAWN, *study_precision.OWN)]

    def conclusion(wide: float) -> str:
        arms = tuple(planted(name, {"K = 256": [wide if "float32" in name else 0.02]}) for name in names)
        return study_precision.conclude(arms, count=256).conclusion

    assert conclusion(1e-8).startswith("Sum in float32:")
    assert conclusion(1e-2).startswith("A float32 sum gains little here:")
    nothing = tuple(planted(name) for name in names)
    assert study_precision.conclude(nothing, count=256).conclusion.startswith("Too few")
