"""A check inside a later window on two ranks does not change the gradients of that window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.torch import later_check_ranks as ranks
from tests.torch.two_ranks import found_by_both


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each rank."""
    return found_by_both("tests.torch.later_check_ranks", tmp_path_factory.mktemp("ranks"))


def reference(none: tuple[int, int] | None, skipped: int | None = None) -> dict[str, Tensor]:
    """Return the parameters after the large batches, without that of one window."""
    model = ranks.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for window in range(ranks.WINDOWS):
        batches = [ranks.batch_of(rank, window) for rank in (0, 1) if (rank, window) != none]
        if window != skipped:
            optimizer.zero_grad()
            large = {name: torch.cat([batch[name] for batch in batches]) for name in ("x", "labels")}
            ranks.loss_of(model, large).backward()
            optimizer.step()
    return {name: each.detach() for name, each in model.named_parameters()}


def is_apart(state: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Return whether parameters differ by more than rounding."""
    return any((state[name] - value).norm() > 1e-12 * value.norm() for name, value in expected.items())


@pytest.mark.parametrize("how", ranks.OPTIONS)
def test_a_later_check_keeps_the_gradients(how: str, found: list[dict[str, Any]]) -> None:
    none = ranks.NONE.get(how)
    calls = [each[how]["calls"] for each in found]
    assert any(each[1] > each[-1] for each in calls), "premise: the check calls loss_fn"
    for each in found:
        assert not is_apart(each[how]["state"], reference(none))
        assert is_apart(each[how]["state"], reference(none, skipped=1)), "mutant: that window makes no update"
