"""A rank that cannot make a window makes all ranks raise: none waits, and the next window is made."""

from __future__ import annotations

import pytest

from tests.torch.two_ranks import found_by_both

OTHER = "RankError: Rank {} failed before its first micro-batch ({}"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    return found_by_both("tests.torch.refusing_ranks", tmp_path_factory.mktemp("ranks"), warnings="default")


@pytest.mark.parametrize("case", ["counted", "returned", "checked"])
def test_a_bad_batch_of_one_rank_raises_on_both(found: list[dict[str, list[str]]], case: str) -> None:
    first, second = (of_rank[case] for of_rank in found)
    assert first[0].startswith(OTHER.format(1, "SplitError"))
    assert second[0].startswith("SplitError")
    assert first[2].startswith("SplitError")
    assert second[2].startswith(OTHER.format(0, "SplitError"))
    assert [first[1], second[1], first[3], second[3]] == ["made"] * 4


def test_a_torn_update_of_one_rank_is_refused_on_both_until_a_state_is_loaded(
    found: list[dict[str, list[str]]],
) -> None:
    intact, torn = (of_rank["torn"] for of_rank in found)
    assert (intact[0], torn[0]) == ("made", "made")
    assert "torn" in torn[1], "premise: a hook before the step has written to a parameter"
    assert intact[1].startswith("RankError: Rank 1 failed at the end of its window (OptimizerError: ")
    assert intact[2].startswith(OTHER.format(1, "OptimizerError: The last update failed"))
    assert "torn" in torn[2]
    assert (intact[3], torn[3]) == ("made", "made")
