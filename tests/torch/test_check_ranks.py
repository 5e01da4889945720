"""If a window needs a check on one of two gloo ranks, both ranks check it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torch.two_ranks import found_by_both


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each rank."""
    return found_by_both("tests.torch.check_ranks", tmp_path_factory.mktemp("ranks"))


def test_all_ranks_stop_before_an_update_that_one_rank_refuses(found: list[dict[str, Any]]) -> None:
    one, other = (of_rank["wrong"] for of_rank in found)
    assert one["updates"] == other["updates"] == 3
    assert "on another rank" in one["error"] and 'count_tokens("labels")' in other["error"]
    assert all(
        "The updates from 0 on (counted from 0) were not verified" in of["error"] for of in (one, other)
    )
    assert one["sums"] == other["sums"]


def test_a_right_declaration_is_checked_once_more_on_all_ranks(found: list[dict[str, Any]]) -> None:
    one, other = (of_rank["right"] for of_rank in found)
    assert one["updates"] == other["updates"] == 5 and not one["error"] + other["error"]
    assert one["calls"][1:3] == other["calls"][1:3] == [2, 2]
    assert other["calls"][3] > 2 == other["calls"][4] and one["calls"][4] == 2
    assert one["sums"] == other["sums"]


@pytest.mark.parametrize("case", ["labels", "lengths"])
def test_counts_that_differ_only_between_ranks_are_found(found: list[dict[str, Any]], case: str) -> None:
    one, other = (of_rank[case] for of_rank in found)
    assert one["updates"] == other["updates"] == 2 and one["sums"] == other["sums"]
    assert all(
        'count_tokens("labels")'.replace('"', "'") in of["error"].replace('"', "'") for of in (one, other)
    )
    assert all("Update 2, which shows the error" in of["error"] for of in (one, other))


@pytest.mark.parametrize("case", ["labels", "lengths"])
def test_mutant_without_the_check_is_wrong(found: list[dict[str, Any]], case: str) -> None:
    wrong, right = (found[0][f"{case}, {how}"] for how in ("unchecked", "declared"))
    assert wrong["updates"] == right["updates"] == 5
    assert wrong["sums"] != pytest.approx(right["sums"], rel=1e-3)


@pytest.mark.parametrize(
    "case", ["labels of samples", "lengths of samples", "labels, declared", "lengths, declared"]
)
def test_right_declarations_are_checked_once_if_counts_differ_between_ranks(
    found: list[dict[str, Any]], case: str
) -> None:
    one, other = (of_rank[case] for of_rank in found)
    assert one["updates"] == other["updates"] == 5 and not one["error"] + other["error"]
    assert one["calls"][1] == one["calls"][3] == one["calls"][4] == 2
    assert one["calls"] == other["calls"] and (one["calls"][2] > 2 or case == "lengths, declared")
    assert one["sums"] == other["sums"]
