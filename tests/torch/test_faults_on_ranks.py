"""An error of one of two ranks, in each phase: the other hears of it, and they do not drift apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.torch import fault_ranks as ranks
from tests.torch.two_ranks import found_by_both

Found = list[dict[str, Any]]
OTHER = "InputError: Another rank cannot make this window, so no rank does: see that rank's error."
APART = (
    "OptimizerError: The ranks have made different numbers of updates (this one {}): one failed in an update "
    "that others made, or a state was loaded on some of them. Load the same checkpoint on every rank."
)
TORN = "OptimizerError: The last update broke inside the optimizer's step"
OWN = {"split": "SplitError: parts of different lengths", "step": TORN}
BEFORE_THE_STEP = ("split", "weight", "forward", "backward", "clip")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank found."""
    return found_by_both("tests.torch.fault_ranks", tmp_path_factory.mktemp("ranks"))


def updated(skipped: int | None) -> list[dict[str, Tensor]]:
    """The parameters after each large batch, one of which is left out."""
    model, states = ranks.net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(ranks.BATCHES):
        if batch != skipped:
            optimizer.zero_grad()
            ranks.error_of(model, torch.cat([ranks.rows(rank, batch) for rank in (0, 1)])).backward()
            optimizer.step()
        states.append({name: each.detach().clone() for name, each in model.named_parameters()})
    return states


@pytest.mark.parametrize("how", ranks.HOW)
@pytest.mark.parametrize("phase", BEFORE_THE_STEP)
def test_before_the_step_no_rank_makes_the_update(phase: str, how: str, found: Found) -> None:
    healthy, bad = (each[f"{how}, {phase}"] for each in found)
    assert bad["fired"], "premise"
    assert healthy["outcomes"] == ["made", OTHER, "made", "made"]
    own = OWN.get(phase, f"FaultError: no {phase}")
    assert [text[: len(own)] for text in bad["outcomes"]] == ["made", own, "made", "made"]
    for each in (healthy, bad):
        for state, expected in zip(each["states"], updated(ranks.FAILS_AT), strict=True):
            for name, value in expected.items():
                assert (state[name] - value).norm() <= 1e-12 * value.norm()


@pytest.mark.parametrize("how", ["DDP", "all_reduce"])
def test_a_rank_that_did_not_step_is_noticed_before_the_next_update(how: str, found: Found) -> None:
    """An error in a hook of torch's optimizer is undone on that rank, and others have stepped."""
    healthy, bad = (each[f"{how}, hook"] for each in found)
    assert healthy["outcomes"] == ["made", "made", APART.format(2), APART.format(2)]
    assert bad["outcomes"] == ["made", "FaultError: no hook", APART.format(1), APART.format(1)]
    for each in (healthy, bad):
        assert all(torch.equal(value, each["states"][3][name]) for name, value in each["states"][1].items())


@pytest.mark.parametrize("cell", [*(f"{how}, step" for how in ranks.HOW), "FSDP2, hook"])
def test_a_torn_rank_stops_the_others(cell: str, found: Found) -> None:
    """Shards are not compared bit by bit, so an error in a hook counts as one in the step."""
    healthy, bad = (each[cell] for each in found)
    assert healthy["outcomes"] == ["made", "made", OTHER, OTHER]
    assert [text[: len(TORN)] for text in bad["outcomes"]] == ["made", TORN, TORN, TORN]
