"""Step pre-hooks on two ranks run before the vote, also with a scaler, and may remove themselves."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torch import hook_ranks as ranks
from tests.torch.test_faults_on_ranks import differs
from tests.torch.two_ranks import found_by_both


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each rank."""
    return found_by_both("tests.torch.hook_ranks", tmp_path_factory.mktemp("ranks"))


def test_after_a_failed_hook_with_a_scaler_no_rank_steps(found: list[dict[str, Any]]) -> None:
    texts = ("RankError: Rank 1 failed at the end of its window (FaultError: no hook)", "FaultError: no hook")
    for each, text in zip(found, texts, strict=True):
        cell = each["fails, scaler"]
        assert [outcome[: len(text)] for outcome in cell["outcomes"]] == ["made", text, "made", "made"]
        assert not differs(cell["states"], ranks.FAILS_AT)
        assert differs(cell["states"], None), "premise: the batch would have changed them"


@pytest.mark.parametrize("case", ["removes itself", "removes itself, scaler"])
def test_a_hook_may_remove_itself(case: str, found: list[dict[str, Any]]) -> None:
    """PyTorch allows this for the last hook."""
    for each in found:
        assert each[case]["outcomes"] == ["made"] * ranks.BATCHES
        assert each[case]["calls"] == ranks.FAILS_AT + 1, "premise: it has removed itself"
        assert not differs(each[case]["states"], None)
        assert differs(each[case]["states"], ranks.FAILS_AT), "mutant: that update is not made"
