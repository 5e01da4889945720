"""Each operator case has finite values and gradients in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.torch.coupled.operator_case import OperatorCase, call
from tests.torch.coupled.operators import ALL_OPERATORS

FLAT = {"sign", "floor", "ceil", "round", "trunc", "in place: zero_"}
"""Piecewise constant operators: their derivative is zero."""


def _run(case: OperatorCase, n: int) -> tuple[list[Tensor], list[Tensor | None]]:
    inputs = case.inputs(n)
    assert case.virtual
    assert all(inputs[index].shape[0] == n for index in case.virtual)
    outputs, scalar = call(case, inputs)
    assert outputs
    if scalar is not None:
        scalar.backward()
    return [out.detach() for out in outputs], [x.grad for x in inputs]


@pytest.mark.parametrize("case", ALL_OPERATORS, ids=str)
@pytest.mark.sampled(3)
def test_values_and_gradients_are_finite_and_runs_repeat(case: OperatorCase) -> None:
    for n in (case.min_n, 7):
        (values, gradients), (again, gradients_again) = _run(case, n), _run(case, n)
        for a, b in zip([*values, *gradients], [*again, *gradients_again], strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                # Not bitwise: LAPACK's rounding may depend on the memory address of a matrix.
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
                assert bool(torch.isfinite(a).all())
    found = [gradient for gradient in gradients if gradient is not None]
    assert not found or any(bool(gradient.any()) for gradient in found) == (case.name not in FLAT)
