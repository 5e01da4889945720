"""`cached_gradients` on two gloo ranks with unequal numbers of samples, against the large batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch import cached_ranks
from tests.torch.embedding_tasks import Pair, assert_same_gradients, gradients, info_nce, normal, pairs, tower
from tests.torch.states import assert_unchanged
from tests.torch.test_ddp import start_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Results of both ranks for each case."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    ended = start_ranks(folder, list(cached_ranks.CASES))
    said = [(folder / f"output{rank}").read_text()[-2000:] for rank in range(2)]
    assert ended, f"the ranks failed:\n{said}"
    return {
        name: [torch.load(folder / f"{name}.{rank}.pt", weights_only=False) for rank in range(2)]
        for name in cached_ranks.CASES
    }


def both(results: dict[str, list[dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    for rank, result in enumerate(results[f"cached_{name}"]):
        assert "traceback" not in result, f"rank {rank}: {result['traceback']}"
    return results[f"cached_{name}"]


def large_pair() -> tuple[Any, Any]:
    model = Pair()
    loss = model.loss(model.encode(pairs(sum(cached_ranks.COUNTS))))
    loss.backward()
    return loss.detach(), gradients(model)


def test_gradients_of_a_model_in_ddp_are_reduced_once(results: Any):
    loss, expected = large_pair()
    for result in both(results, "wrapped"):
        torch.testing.assert_close(result["loss"], loss, rtol=1e-12, atol=0)
        assert_same_gradients(expected, result["gradients"])
        assert result["own"] == 0 and result["reduced"] == 1


def test_a_group_and_two_encoders_without_ddp(results: Any):
    """Existing `.grad` is not summed over the ranks again, and a head and a temperature count once."""
    query, document, head = tower(6), tower(5, seed=4), cached_ranks.head()
    ranks = both(results, "in_group")
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    for parameter in query.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    even = (torch.arange(11) % 2 == 0).unsqueeze(1)
    loss = info_nce(
        head(query(normal(7, 6))), document(normal(11, 5, seed=2)) * (1 + even), temperature.exp()
    )
    loss.backward()
    for result in ranks:
        torch.testing.assert_close(result["loss"], loss.detach(), rtol=1e-12, atol=0)
        assert_same_gradients(gradients(query, document, head), result["gradients"])
        torch.testing.assert_close(result["temperature"], temperature.grad, rtol=1e-12, atol=0)
        form = (11, 4), even.squeeze(1).tolist(), [float(n) for n in range(11)], "torch.bfloat16"
        assert result["forms"] == [form]


def test_mutant_with_a_temperature_counted_on_every_rank_is_wrong(results: Any):
    _, expected = large_pair()
    for result in both(results, "counted_on_every_rank"):
        with pytest.raises(AssertionError, match=r"logit_scale: relative error 1\.00e\+00"):
            assert_same_gradients(expected, result["gradients"])


@pytest.mark.parametrize("where", ["first_pass", "loss", "second_pass", "empty"])
def test_a_failure_on_one_rank_raises_on_both_and_restores_everything(results: Any, where: str):
    first, second = both(results, f"fails_{where}")
    assert first["error"].startswith("WindowError: Another rank that shares the batch has failed")
    assert second["error"].startswith("SplitError" if where == "empty" else "KeyError: 'user code'")
    for result in (first, second):
        assert_unchanged(result["before"], result["after"])
        assert result["seconds"] < 5


def test_embeddings_of_different_structure_are_refused_on_both_ranks(results: Any):
    for result in both(results, "fails_form"):
        assert "InputError" in result["error"] and "different structures on the ranks" in result["error"]
        assert_unchanged(result["before"], result["after"])


def test_a_parameter_outside_of_all_models_is_refused(results: Any):
    for result in both(results, "outside"):
        assert "that is not in the models (Sequential)" in result["error"]


def test_losses_that_differ_between_ranks_are_refused(results: Any):
    for result in both(results, "losses_differ"):
        assert (
            "The ranks have computed the different losses" in result["error"]
            and "without random numbers" in result["error"]
        )
