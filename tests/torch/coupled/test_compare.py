"""The comparison fails for each kind of wrong gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.torch.coupled.case import Loss
from tests.torch.coupled.cases import CASES
from tests.torch.coupled.compare import (
    Result,
    assert_equal,
    full_batch,
    plain_accumulation,
    reference,
    run_with,
)

CASE = CASES["one BatchNorm called three times, cumulative average"]


def _with(result: Result, name: str, value: Tensor | None) -> Result:
    return replace(result, gradients={**result.gradients, name: value})


def test_the_same_result_passes() -> None:
    assert_equal(reference(CASE), run_with(CASE, None, full_batch), 0.0)


def test_a_slightly_wrong_gradient_is_named() -> None:
    result = reference(CASE)
    value = result.gradients["last.weight"]
    assert value is not None
    with pytest.raises(AssertionError, match=r"last\.weight: relative error 1\.00e-09 > 1e-12"):
        assert_equal(result, _with(result, "last.weight", value * (1 + 1e-9)))


def test_a_missing_gradient_is_named() -> None:
    result = reference(CASE)
    with pytest.raises(AssertionError, match=r"last\.weight: has no gradient"):
        assert_equal(result, _with(result, "last.weight", None))


def test_an_extra_gradient_is_named() -> None:
    result = reference(CASE)
    with pytest.raises(AssertionError, match=r"last\.weight: has a gradient"):
        assert_equal(_with(result, "last.weight", None), result)


def test_a_zero_gradient_may_differ_by_rounding_only() -> None:
    case = CASES["MLP with BatchNorm"]
    result = reference(case)
    before_norm = result.gradients["0.bias"]
    assert before_norm is not None
    assert float(before_norm.norm()) < 1e-12, "premise: a bias before BatchNorm has a zero gradient"
    assert_equal(result, _with(result, "0.bias", before_norm + 1e-15))
    with pytest.raises(AssertionError, match=r"0\.bias: relative error"):
        assert_equal(result, _with(result, "0.bias", before_norm + 1e-9))


def test_a_buffer_updated_twice_is_named() -> None:
    def twice(model: nn.Module, batch: Any, loss_fn: Loss) -> Tensor:
        with torch.no_grad():
            loss_fn(model, batch)
        return full_batch(model, batch, loss_fn)

    with pytest.raises(AssertionError, match=r"buffer norm\.num_batches_tracked: relative error 1\.00e\+00"):
        assert_equal(reference(CASE), run_with(CASE, None, twice))


def test_a_wrong_loss_is_reported() -> None:
    result = reference(CASE)
    with pytest.raises(AssertionError, match="for the real batch"):
        assert_equal(result, replace(result, loss=result.loss + 1e-9))


def test_a_dense_gradient_in_place_of_a_sparse_one_is_named() -> None:
    result = reference(CASES["embedding with sparse gradients"])
    value = result.gradients["0.weight"]
    assert value is not None and value.is_sparse
    with pytest.raises(AssertionError, match=r"0\.weight: layout"):
        assert_equal(result, _with(result, "0.weight", value.to_dense()))


def test_plain_accumulation_of_a_coupled_loss_fails() -> None:
    with pytest.raises(AssertionError, match="not the gradient of the real batch"):
        assert_equal(reference(CASE), run_with(CASE, None, plain_accumulation(4)))
