"""A rank without data takes part by None: the update is that of the samples that the others have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.torch import dataless_ranks as ranks
from tests.torch.two_ranks import found_by_both


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    return found_by_both("tests.torch.dataless_ranks", tmp_path_factory.mktemp("ranks"))


def reference(none: set[tuple[int, int]]) -> dict[str, Tensor]:
    """Return the parameters after the large batches of the ranks that have data."""
    model = ranks.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for window in range(ranks.WINDOWS):
        batch = [ranks.rows(rank, window) for rank in (0, 1) if (rank, window) not in none]
        if batch:
            optimizer.zero_grad()
            ranks.error_of(model, torch.cat(batch)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    return {name: each.detach() for name, each in model.named_parameters()}


def is_apart(state: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Tell whether parameters differ by more than rounding."""
    return any((state[name] - value).norm() > 1e-12 * value.norm() for name, value in expected.items())


@pytest.mark.parametrize("how", ["DDP", "all_reduce"])
@pytest.mark.parametrize("check", [False, True])
def test_ranks_without_data(how: str, check: bool, found: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(found):
        one = each[f"{how}, {check}"]
        assert not is_apart(one["state"], reference(ranks.NONE))
        assert is_apart(one["state"], reference(set())), "a mutant: all of the data"
        assert one["made"] == [True, True, True, True, False, True]
        assert [samples == 0 for samples in one["samples"]] == [
            (rank, window) in ranks.NONE for window in range(ranks.WINDOWS)
        ]
