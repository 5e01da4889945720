"""On two gloo ranks, `Gradient` gives the gradient of the large batch over the data of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.torch.gradient_ranks import LENGTHS, gradients, numbers, sentences
from tests.torch.helpers import mlp, mse, tiny_lm, token_mean
from tests.torch.two_ranks import found_by_both


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found_by_both("tests.torch.gradient_ranks", tmp_path_factory.mktemp("ranks"))


def assert_alike(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        assert float(wanted.norm()) > 0, "premise: no gradient is zero"
        error = float((actual[name] - wanted).norm() / wanted.norm())
        assert error <= 1e-12, f"{name}: {error:.1e}"


def test_a_token_mean_over_ranks_of_unequal_weight(found: list[dict[str, Any]]) -> None:
    assert sum(LENGTHS[0]) != sum(LENGTHS[1]), "premise"
    model = tiny_lm()
    batches = [sentences(rank) for rank in range(2)]
    loss = token_mean(model, {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})
    loss.backward()
    for of_rank in found:
        assert_alike(of_rank["tokens"]["gradients"], gradients(model))
        assert of_rank["tokens"]["loss"] == pytest.approx(float(loss.detach()), rel=1e-12)
        assert of_rank["tokens"]["weight"] == int((torch.cat([b["labels"] for b in batches]) != -100).sum())


def test_gradient_is_added_to_one_that_ddp_has_reduced(found: list[dict[str, Any]]) -> None:
    model = mlp()
    for seed in range(2):
        x, y = (
            torch.cat(each) for each in zip(*(numbers(rank, seed=seed) for rank in range(2)), strict=True)
        )
        mse(model, (x, y)).backward()
    for of_rank in found:
        assert_alike(of_rank["earlier"]["gradients"], gradients(model))


def test_a_failure_on_one_rank_restores_both(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert "finite" in of_rank["failure"]["error"]
        assert of_rank["failure"]["as before"]
