"""Ranks with unequal numbers of batches end together, and each update is that of the remaining batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from superbatch.torch.ranks import until_all_end
from tests.torch import ending_ranks as ranks
from tests.torch.test_dataless_ranks import is_apart
from tests.torch.two_ranks import found_by_both


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each rank."""
    return found_by_both("tests.torch.ending_ranks", tmp_path_factory.mktemp("ranks"))


def reference(counts: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Return the parameters after the large batches of the ranks that still have data."""
    model = ranks.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for index in range(max(counts)):
        batch = torch.cat([ranks.rows(rank, index) for rank in (0, 1) if index < counts[rank]])
        optimizer.zero_grad()
        ranks.error_of(model, batch).backward()
        optimizer.step()
    return {name: each.detach() for name, each in model.named_parameters()}


def test_every_batch_counts_once(found: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(found):
        trained = each["trained"]
        assert len(trained["samples"]) == max(ranks.COUNTS)
        assert [samples > 0 for samples in trained["samples"]] == [
            index < ranks.COUNTS[rank] for index in range(max(ranks.COUNTS))
        ]
        assert not is_apart(trained["state"], reference(ranks.COUNTS))
        assert is_apart(trained["state"], reference((2, 2))), "mutant: all ranks end with the first"


def test_an_error_while_loading_reaches_all_ranks(found: list[dict[str, Any]]) -> None:
    assert found[1]["failing"] == "1: OSError: no such file"
    assert found[0]["failing"].startswith("1: RankError: Another rank failed while it loaded its next batch")


def test_no_data_at_all(found: list[dict[str, Any]]) -> None:
    assert [each["none"] for each in found] == [[], []]


def test_one_process() -> None:
    assert list(until_all_end(iter("abc"))) == ["a", "b", "c"]
