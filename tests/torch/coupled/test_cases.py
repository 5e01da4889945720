"""Each case has its declared properties in plain PyTorch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.torch.coupled.case import Case, Loss
from tests.torch.coupled.cases import ALL
from tests.torch.coupled.compare import (
    Result,
    assert_equal,
    full_batch,
    gradient_error,
    plain_accumulation,
    reference,
    run_with,
)


@cache
def expected(case: Case) -> Result:
    """Return the reference, computed once for all tests of this file."""
    return reference(case)


each_case = pytest.mark.parametrize("case", ALL, ids=str)


@each_case
@pytest.mark.sampled(3)
def test_declared_gradients_and_buffers_match_and_runs_repeat(case: Case) -> None:
    result, again = expected(case), reference(case)
    assert result.loss.shape == ()
    assert bool(torch.isfinite(result.loss))
    without = tuple(name for name, value in result.gradients.items() if value is None)
    assert sorted(without) == sorted(case.without_gradient)
    assert all(
        bool(g.coalesce().values().isfinite().all() if g.is_sparse else g.isfinite().all())
        for g in result.gradients.values()
        if g is not None
    )
    before = dict(case.make().named_buffers())
    assert any(not torch.equal(before[name], after) for name, after in result.buffers.items()) == case.buffers
    assert_equal(result, again, 0.0)


@pytest.mark.parametrize("case", [case for case in ALL if not case.random], ids=str)
@pytest.mark.sampled(3)
def test_plain_accumulation_is_wrong_only_for_coupled_samples(case: Case) -> None:
    assert case.n % case.microbatch, "premise: the last micro-batch is smaller"
    error = gradient_error(
        expected(case), run_with(case, None, plain_accumulation(case.microbatch), wrap="all")
    )
    assert error > 1e-3 if case.coupled else error < 1e-10


@pytest.mark.parametrize("case", [case for case in ALL if case.wrap == "inputs"], ids=str)
def test_separate_labels_give_the_same_result(case: Case) -> None:
    assert_equal(run_with(case, None, full_batch, wrap="all"), run_with(case, None, full_batch), 0.0)


@each_case
@pytest.mark.sampled(3)
def test_rounding_of_the_parameters_keeps_the_gradient(case: Case) -> None:
    """Rejects ill-conditioned cases, and cases at a tie or a kink."""

    def run_perturbed(model: torch.nn.Module, batch: Any, loss_fn: Loss) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.mul_(1 + 4e-16 * (noise - 0.5))
        return full_batch(model, batch, loss_fn)

    assert_equal(expected(case), run_with(case, None, run_perturbed), case.tolerance / 4)
