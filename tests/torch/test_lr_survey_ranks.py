"""Learning-rate survey over two gloo ranks: the curve of the joint batch, with the same end on both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from superbatch.torch import Accumulator
from superbatch.torch.tuning import lr_survey
from tests.torch.helpers import mlp, mse, sgd
from tests.torch.survey_ranks import BATCHES, POINTS
from tests.torch.two_ranks import found_by_both


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each rank."""
    return found_by_both("tests.torch.survey_ranks", tmp_path_factory.mktemp("survey_ranks"))


def joint(point: int) -> tuple[torch.Tensor, ...]:
    """Joint batch of both ranks at a point. Each rank restarts its loader after its own last batch."""
    shards = [batches[point % len(batches)] for batches in BATCHES]
    return tuple(torch.cat(columns) for columns in zip(*shards, strict=True))


@pytest.mark.parametrize(("name", "high"), [("plain", 10.0), ("far", 1e6)])
def test_the_curve_is_that_of_the_joint_batch(ranks: list[dict[str, Any]], name: str, high: float) -> None:
    one, other = (rank[name]["report"] for rank in ranks)
    assert (one.values, one.losses, one.stopped) == (other.values, other.losses, other.stopped)
    assert one.suggestions == other.suggestions
    assert (one.epochs, other.epochs) == tuple(-(-len(one.losses) // n) for n in (3, 5))
    model = mlp()
    accumulate = Accumulator(model, sgd(model.parameters()), lambda b: mse(model, b))
    accumulate(joint(0))
    expected = lr_survey(accumulate, [joint(point) for point in range(POINTS)], updates=POINTS, high=high)
    lowest = 1 + expected.losses.index(min(expected.losses))
    assert one.losses[:lowest] == pytest.approx(expected.losses[:lowest], rel=1e-10)
    assert len(one.losses) == len(expected.losses)
    assert one.suggestions == expected.suggestions
    if name == "far":
        assert one.stopped is not None, "premise: it diverges"


def test_a_nan_on_one_rank_ends_the_survey_on_both(ranks: list[dict[str, Any]]) -> None:
    one, other = (rank["spoiled"]["report"] for rank in ranks)
    assert len(one.losses) == len(other.losses) == 4, "the fifth batch of rank 1 has the NaN"
    assert one.stopped is not None
    assert other.stopped is not None
    assert "not finite" in one.stopped


def test_both_ranks_end_when_one_ends(ranks: list[dict[str, Any]]) -> None:
    """With separate stopping rules, rank 0 would wait forever in the next window."""
    one, other = (rank["one ends"]["report"] for rank in ranks)
    assert len(one.losses) == len(other.losses) == 9
    assert one.stopped == "another rank stopped"


def test_both_ranks_resume_training_alike(ranks: list[dict[str, Any]]) -> None:
    for name in ("plain", "far", "spoiled", "one ends"):
        one, other = (rank[name] for rank in ranks)
        assert one["update"].loss == other["update"].loss
        for key, value in one["parameters"].items():
            assert torch.equal(value, other["parameters"][key]), (name, key)
