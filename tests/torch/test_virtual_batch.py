"""A virtual batch gives the loss, gradients and buffers of the real batch in every coupled case."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import pytest
import torch
from _pytest.mark.structures import ParameterSet  # the type of pytest.param() has no public name
from torch import Tensor, nn

from superbatch.torch import virtual_batch
from tests.torch.coupled.case import Case, Loss
from tests.torch.coupled.cases import ALL, CASES, GROUPS
from tests.torch.coupled.compare import Backend, Result, assert_equal, reference, run_with

Wrap = Literal["all", "inputs"]


@cache
def expected(case: Case) -> Result:
    return reference(case)


def virtual(microbatch: int, **options: Any) -> Backend:
    def run(model: nn.Module, batch: Any, loss_fn: Loss) -> Tensor:
        with virtual_batch(model, microbatch, rng="batch", **options) as virtual:
            loss = loss_fn(model, virtual(batch))
            loss.backward()
        report = virtual.report()
        assert report.microbatches == -(-report.samples // microbatch), "premise: the batch was split"
        return loss

    return run


def check(case: Case, microbatch: int, wrap: Wrap, **options: Any) -> None:
    found = run_with(case, None, virtual(microbatch, **options), wrap=wrap)
    assert_equal(expected(case), found, case.tolerance)


# Cases that run by default in every test; the other cases run in some.
ALWAYS_RUN = (
    "conv net with BatchNorm",
    "U-Net with BatchNorm",
    "MLP with BatchNorm",
    "ResNet-20",
    "ResNet-50",
    "LSTM with BatchNorm",
    "BERT-like classifier",
    "two towers with InfoNCE",
    "CLIP with a learnt temperature",
    "BatchNorm encoder and head with InfoNCE",
    "SimCLR",
)


def with_slow_marks(some: Sequence[Case]) -> list[ParameterSet]:
    """Return all cases; those outside `ALWAYS_RUN` and `some` are slow."""
    by_default = {*ALWAYS_RUN, *(case.name for case in some)}
    return [
        pytest.param(case, id=str(case), marks=() if case.name in by_default else pytest.mark.slow)
        for case in ALL
    ]


each_case = pytest.mark.parametrize("case", ALL, ids=str)


@each_case
@pytest.mark.sampled(2)
def test_a_virtual_batch_is_the_real_batch(case: Case) -> None:
    check(case, case.microbatch, "all")


@pytest.mark.parametrize("case", with_slow_marks(ALL[1::3]))
@pytest.mark.sampled(2)
def test_a_virtual_batch_without_device_budget_is_the_real_batch(case: Case) -> None:
    """Full tensors are computed and stored by rows unless an operation reads them otherwise.

    A third of the cases outside `ALWAYS_RUN` runs by default; the others are slow.
    """
    check(case, case.microbatch, "all", device_budget=0)


@pytest.mark.parametrize("case", [case for case in ALL if case.wrap == "inputs"], ids=str)
def test_labels_may_be_plain_tensors(case: Case) -> None:
    check(case, case.microbatch, "inputs")


@pytest.mark.parametrize("case", with_slow_marks(ALL[::6]))
def test_micro_batches_of_one_sample_and_of_all_samples(case: Case) -> None:
    """A sixth of the cases outside `ALWAYS_RUN` runs by default; the others are slow."""
    check(case, 1, "all")
    check(case, case.n, "all")


# Cases that leave plain tensor operations, where torch's own tensor subclasses fail.
EXOTIC = (
    "through numpy",
    "through lists",
    "matched to targets",
    "vmap over samples",
    "vmap over pairs",
    "functional gradient",
    "deep copy",
    "strides over the batch",
    "a sparse matrix over samples",
    "rows of their own lengths",
)


def test_the_table_lists_every_case_outside_plain_tensor_operations() -> None:
    assert list(EXOTIC) == [case.name for case in GROUPS["exotic"]]


@pytest.mark.parametrize("name", EXOTIC)
@pytest.mark.parametrize("budget", [None, 0])
def test_cases_outside_plain_tensor_operations_are_exact(name: str, budget: int | None) -> None:
    case = CASES[name]
    found = run_with(case, None, virtual(case.microbatch, device_budget=budget), wrap="all")
    assert_equal(expected(case), found, case.tolerance)


@pytest.mark.slow
@each_case
def test_micro_batches_of_every_size(case: Case) -> None:
    for microbatch in (1, 2, 3, 5, case.n - 1, case.n):
        check(case, microbatch, case.wrap)
        check(case, microbatch, case.wrap, device_budget=0)


@pytest.mark.slow
@each_case
def test_every_operation_on_micro_batches_equals_that_on_full_tensors(case: Case) -> None:
    check(case, case.microbatch, "all", paranoid=True)


def test_a_case_can_fail() -> None:
    """The comparison detects a factor of 1 + 1e-9 in one gradient."""
    case = ALL[0]

    def wrong(model: nn.Module, batch: Any, loss_fn: Loss) -> Tensor:
        loss = virtual(case.microbatch)(model, batch, loss_fn)
        with torch.no_grad():
            next(p.grad for p in model.parameters() if p.grad is not None).mul_(1 + 1e-9)
        return loss

    with pytest.raises(AssertionError, match="not the gradient of the real batch"):
        assert_equal(expected(case), run_with(case, None, wrong), case.tolerance)
