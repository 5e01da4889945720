"""A rank that leaves a window early still joins its collectives, so the next windows match."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torch import exit_ranks as ranks
from tests.torch.test_faults_on_ranks import differs
from tests.torch.two_ranks import found_by_both

EARLY, INSIDE, END = "before its first micro-batch", "in micro-batch 0", "at the end of its window"
# The error of the failing rank, and the place that the RankError of the other rank names.
OUTCOMES = {
    "None": ("InputError: The batch of this rank is None, but coupled samples need", EARLY),
    "empty window": ("InputError: The Window contains no micro-batches.", EARLY),
    "empty list": ("SplitError: ", EARLY),
    "no rows": ("SplitError: ", EARLY),
    "lengths": ("SplitError: Parts of the batch differ in length", EARLY),
    "iterator": ("InputError: A list_iterator is not a batch", EARLY),
    "object": ("SplitError: ", EARLY),
    "weight": ("InputError: ", EARLY),
    "check": ("FaultError: no such label", EARLY),
    "used twice": ("WindowError: This window is over, and its micro-batches are freed.", EARLY),
    "device": ("RuntimeError: Tensor on device cpu is not on the expected device meta", INSIDE),
    "inside": ("WindowError: Another window of this accumulator is open", END),
    "after": ("FaultError: behind the loop", END),
}


@pytest.fixture(scope="module", params=[0, 1])
def bad(request: pytest.FixtureRequest) -> int:
    """Number of the rank that fails."""
    return request.param


@pytest.fixture(scope="module")
def found(bad: int, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each rank."""
    return found_by_both(
        "tests.torch.exit_ranks", tmp_path_factory.mktemp("ranks"), str(bad), warnings="default"
    )


@pytest.mark.parametrize(
    ("how", "case"),
    [(how, case) for how, cases in ranks.CASES.items() for case in cases if case != "inside, caught"],
)
def test_no_rank_makes_the_update_and_the_next_windows_match(
    how: str, case: str, bad: int, found: list[dict[str, Any]]
) -> None:
    own, where = OUTCOMES[case]
    forwarded = f"RankError: Rank {bad} failed {where} ({own}"
    skipped = 0 if case == "check" else ranks.FAILS_AT
    for each, text in ((found[bad], own), (found[1 - bad], forwarded)):
        outcomes, states = each[f"{how}, {case}"]["outcomes"], each[f"{how}, {case}"]["states"]
        assert [outcome[: len(text)] for outcome in outcomes].pop(skipped) == text, outcomes
        assert [outcome for index, outcome in enumerate(outcomes) if index != skipped] == ["made"] * 3
        assert not differs(states, skipped)
        assert differs(states, None), "premise: the batch would have changed them"


def test_a_second_window_inside_an_open_one_ends_neither(bad: int, found: list[dict[str, Any]]) -> None:
    """The other rank has no second window, so there are no collectives to join."""
    for each in found:
        cell = each["DDP, inside, caught"]
        assert cell["outcomes"] == ["made"] * ranks.BATCHES
        assert not differs(cell["states"], None)
