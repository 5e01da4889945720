"""A rank without data passes None, and the update is that of the samples of the other ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.torch import dataless_ranks as ranks
from tests.torch.two_ranks import found_by_both

Found = list[dict[str, Any]]
OTHER = "RankError: Rank {} failed {} (FaultError: behind the model), so no rank makes this update"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Results of each of two ranks."""
    return found_by_both("tests.torch.dataless_ranks", tmp_path_factory.mktemp("ranks"), "2")


@pytest.fixture(scope="module")
def found_by_three(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Results of each of three ranks."""
    return found_by_both("tests.torch.dataless_ranks", tmp_path_factory.mktemp("ranks"), "3", count=3)


def reference(case: str, count: int, none: set[tuple[int, int]]) -> dict[str, Tensor]:
    """Return the parameters after the large batches of the ranks that have data."""
    model = ranks.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for window in range(ranks.WINDOWS):
        batch = [ranks.rows(rank, window) for rank in range(count) if (rank, window) not in none]
        if batch:
            optimizer.zero_grad()
            large: Any = torch.cat(batch)
            if "tokens" in case:
                large = {"x": large, "mask": torch.cat([torch.arange(len(x)) % 3 != 1 for x in batch])}
            ranks.loss_of(model, large).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    return {name: each.detach() for name, each in model.named_parameters()}


def is_apart(state: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Return whether parameters differ by more than rounding."""
    return any((state[name] - value).norm() > 1e-12 * value.norm() for name, value in expected.items())


def check(each: dict[str, Any], case: str, rank: int, count: int) -> None:
    """Check the training of a rank that had no data in some windows."""
    none = ranks.NONE[count]
    expected = partial(reference, case, count)
    assert not is_apart(each["state"], expected(none))
    assert is_apart(each["state"], expected(set())), "mutant: all data"
    first_window_full = {(r, w) for r, w in none if w != 0}
    assert is_apart(each["state"], expected(first_window_full)), "mutant: window 0 has data on all ranks"
    assert each["made"] == [any((r, w) not in none for r in range(count)) for w in range(ranks.WINDOWS)]
    assert [samples == 0 for samples in each["samples"]] == [(rank, w) in none for w in range(ranks.WINDOWS)]


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("case", ranks.CASES)
def test_ranks_without_data(case: str, checked: bool, found: Found) -> None:
    for rank, each in enumerate(found):
        check(each[f"{case}, {checked}"], case, rank, 2)


@pytest.mark.parametrize("case", ["FSDP2", "FSDP2, auto"])
def test_one_rank_of_three_has_data(case: str, found_by_three: Found) -> None:
    for rank, each in enumerate(found_by_three):
        check(each[f"{case}, True"], case, rank, 3)


def test_an_error_on_a_rank_with_data_reaches_the_rank_without(found: Found) -> None:
    one, other = (each["with data"]["outcomes"] for each in found)
    assert other == ["made", "FaultError: behind the model", "made"]
    assert one[0] == one[2] == "made" and one[1].startswith(OTHER.format(1, "in micro-batch 0"))


def test_an_error_on_a_placeholder_sample_reaches_the_other_rank(found: Found) -> None:
    one, other = (each["without data"]["outcomes"] for each in found)
    assert one == ["made", "FaultError: behind the model", "made"]
    assert other[0] == other[2] == "made" and other[1].startswith(OTHER.format(0, "in micro-batch 0"))


def test_a_batch_that_cannot_be_sent_raises_with_advice(found: Found) -> None:
    one, other = (each["no pickle"]["outcomes"] for each in found)
    text = (
        "InputError: This rank has no batch, and the batch of another rank, which it would run with weight 0"
    )
    assert one[0] == one[2] == "made" and one[1].startswith(text) and "cannot be pickled" in one[1]
    assert other[1].startswith(f"RankError: Rank 0 failed before its first micro-batch ({text}")
