"""An error on one of two ranks, in each phase of a window, raises on both and keeps them in step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.torch import fault_ranks as ranks
from tests.torch.two_ranks import found_by_both

Found = list[dict[str, Any]]
FAILED = (
    "RankError: Rank {} {}, so no rank makes this update, and everything is as before it. "
    "Correct the error there; "
)
TORN = "OptimizerError: The last update failed inside the optimizer's step"
SPLIT = "SplitError: Parts of the batch differ in length"
ROWS = "SplitError: "
# The error of the failing rank, and its description in the error of the other rank.
OUTCOMES = {
    "split": (SPLIT, f"failed before its first micro-batch ({SPLIT}"),
    "rows": (ROWS, f"failed before its first micro-batch ({ROWS}"),
    "weight": ("FaultError: no weight", "failed before its first micro-batch (FaultError: no weight)"),
    "forward": ("FaultError: no forward", "failed in micro-batch 0 (FaultError: no forward)"),
    "interrupt": ("KeyboardInterrupt: ", "failed in micro-batch 0 (KeyboardInterrupt)"),
    "memory": ("OutOfMemoryError: ", "failed in micro-batch 0 (OutOfMemoryError: "),
    "backward": ("FaultError: no backward", "failed in micro-batch 0 (FaultError: no backward)"),
    "block": ("FaultError: no block", "failed in micro-batch 1 (FaultError: no block)"),
    "break": ("skipped: left after 1 of ", "left its window after 1 of "),
    "clip": ("FaultError: no clip", "failed at the end of its window (FaultError: no clip)"),
    "interrupted clip": ("KeyboardInterrupt: ", "failed at the end of its window (KeyboardInterrupt)"),
    "hook": ("FaultError: no hook", "failed at the end of its window (FaultError: no hook)"),
    "own hook": ("FaultError: no own hook", "failed at the end of its window (FaultError: no own hook)"),
}


@pytest.fixture(scope="module", params=[0, 1])
def bad(request: pytest.FixtureRequest) -> int:
    """Number of the rank that fails."""
    return request.param


@pytest.fixture(scope="module")
def found(bad: int, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Results of each rank."""
    return found_by_both("tests.torch.fault_ranks", tmp_path_factory.mktemp("ranks"), str(bad))


def updated(skipped: int | None) -> list[dict[str, Tensor]]:
    """Return the parameters after each large batch, one of which is skipped."""
    model, states = ranks.net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in range(ranks.BATCHES):
        if batch != skipped:
            optimizer.zero_grad()
            ranks.error_of(model, torch.cat([ranks.rows(rank, batch) for rank in (0, 1)])).backward()
            optimizer.step()
        states.append({name: each.detach().clone() for name, each in model.named_parameters()})
    return states


def differs(states: list[dict[str, Tensor]], skipped: int | None) -> bool:
    """Return whether the parameters differ from those of the large batches."""
    return any(
        bool((state[name] - value).norm() > 1e-12 * value.norm())
        for state, expected in zip(states, updated(skipped), strict=True)
        for name, value in expected.items()
    )


@pytest.mark.parametrize("how", ranks.HOW)
@pytest.mark.parametrize("phase", OUTCOMES)
def test_an_error_before_the_step_skips_the_update(phase: str, how: str, bad: int, found: Found) -> None:
    healthy, failed = found[1 - bad][f"{how}, {phase}"], found[bad][f"{how}, {phase}"]
    assert failed["fired"], "premise"
    own, forwarded = OUTCOMES[phase]
    expected = FAILED.format(bad, forwarded)
    if phase in ("split", "rows", "memory", "break"):  # their text continues
        expected = f"RankError: Rank {bad} {forwarded}"
    for each, text in ((failed, own), (healthy, expected)):
        found_texts = [outcome[: len(text)] for outcome in each["outcomes"]]
        assert found_texts == ["made", text, "made", "made"]
        assert not differs(each["states"], ranks.FAILS_AT)
        assert differs(each["states"], None), "premise: the batch would have changed them"
        assert each["gradients"] == 0


@pytest.mark.parametrize("how", ranks.REPLICATED)
def test_out_of_memory_in_the_reduction_of_one_rank_raises_on_both(how: str, bad: int, found: Found) -> None:
    """The failing rank frees its gradients and contributes zeros until the vote."""
    healthy, failed = found[1 - bad][f"{how}, reduction"], found[bad][f"{how}, reduction"]
    assert failed["fired"], "premise"
    forwarded = f"RankError: Rank {bad} failed at the end of its window (OutOfMemoryError: "
    for each, text in ((failed, "OutOfMemoryError: "), (healthy, forwarded)):
        assert [outcome[: len(text)] for outcome in each["outcomes"]] == ["made", text, "made", "made"]
        assert not differs(each["states"], ranks.FAILS_AT)
        assert each["gradients"] == 0


@pytest.mark.parametrize("how", ranks.HOW)
def test_a_torn_update_on_one_rank_stops_both(how: str, bad: int, found: Found) -> None:
    healthy, failed = found[1 - bad][f"{how}, step"], found[bad][f"{how}, step"]
    forwarded = f"RankError: Rank {bad} failed before its first micro-batch ({TORN}"
    assert [text[: len(forwarded)] for text in healthy["outcomes"]] == ["made", "made", forwarded, forwarded]
    assert [text[: len(TORN)] for text in failed["outcomes"]] == ["made", TORN, TORN, TORN]


@pytest.mark.parametrize("how", ranks.HOW)
def test_an_error_after_the_step_keeps_the_update(how: str, bad: int, found: Found) -> None:
    healthy, failed = found[1 - bad][f"{how}, scheduler"], found[bad][f"{how}, scheduler"]
    assert healthy["outcomes"] == ["made"] * ranks.BATCHES
    assert failed["outcomes"] == ["made", "FaultError: no scheduler", "made", "made"]
    for each in (healthy, failed):
        assert not differs(each["states"], None)
        assert differs(each["states"], ranks.FAILS_AT), "mutant: the update is rolled back"
