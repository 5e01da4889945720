"""Checkpoints of several ranks resume on another number of ranks and with another wrapper, to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from superbatch.torch.checkpoint import load_checkpoint, save_checkpoint
from tests.torch import checkpoint_ranks as ranks
from tests.torch.two_ranks import found_by_both

pytest.importorskip("safetensors", reason="safetensors is not installed (extra: checkpoint)")

Found = list[dict[str, Any]]
# PyTorch's own collectives and file functions warn.
WARNINGS = "default"


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.norm() > 0, "premise"
        assert (found[name] - value).norm() <= 1e-12 * value.norm(), name


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    """Final parameters of one process that trains with the large batch without interruption."""
    training = ranks.Training("alone")
    start = training.parameters()
    training.run(0, ranks.UPDATES)
    end = training.parameters()
    assert all((end[name] - start[name]).norm() > 1e-3 for name in end), "premise"
    return end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all checkpoints."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Results of two ranks that save. One process saves, too."""
    training = ranks.Training("alone")
    training.run(0, ranks.SAVED)
    save_checkpoint(folder / "alone", training.accumulate, samples=13 * ranks.SAVED)
    place = tmp_path_factory.mktemp("save")
    return found_by_both("tests.torch.checkpoint_ranks", place, "2", "save", str(folder), warnings=WARNINGS)


@pytest.mark.parametrize("how", ranks.HOW)
def test_uninterrupted_ranks_train_as_one_process(how: str, saved: Found, alone: dict[str, Tensor]) -> None:
    for each in saved:
        close(each[how], alone)


@pytest.mark.parametrize("how", ranks.HOW)
def test_a_window_in_flight_resumes(how: str, saved: Found) -> None:
    """Each rank draws the same random numbers. FSDP2 may sum its shards in another order."""
    for each in saved:
        found = each[f"{how}, in flight"]
        assert "ranks=2, in_flight=True" in found["loaded"]
        close(found["resumed"], found["straight"])
        for name, value in found["straight"].items():
            assert how == "FSDP2" or torch.equal(found["resumed"][name], value), name


@pytest.mark.parametrize("how", ranks.HOW)
def test_one_process_resumes(how: str, saved: Found, folder: Path, alone: dict[str, Tensor]) -> None:
    """Shards are read without a process group."""
    training = ranks.Training("alone")
    loaded = load_checkpoint(folder / how, training.accumulate)
    assert loaded is not None
    assert (loaded.samples, loaded.ranks) == (13 * ranks.SAVED, 2)
    training.run(ranks.SAVED, ranks.UPDATES)
    close(training.parameters(), alone)
    text = ranks.error_of(lambda: load_checkpoint(folder / f"{how}, in flight", training.accumulate))
    assert (
        "was written inside a window by 2 ranks, but this program has 1. Start 2 ranks, or load a checkpoint"
        in text
    )


def test_three_ranks_resume(saved: Found, folder: Path, alone: dict[str, Tensor], tmp_path: Path) -> None:
    """From DDP, FSDP2 and one process to DDP and FSDP2."""
    arguments = ("3", "load", str(folder))
    found = found_by_both("tests.torch.checkpoint_ranks", tmp_path, *arguments, count=3, warnings=WARNINGS)
    for each in found:
        for saved_as in (*ranks.HOW, "alone"):
            for how in ranks.HOW:
                cell = each[f"{saved_as} to {how}"]
                assert (cell["samples"], cell["ranks"]) == (13 * ranks.SAVED, 1 if saved_as == "alone" else 2)
                close(cell["parameters"], alone)
        for how in ranks.HOW:
            assert "inside a window by 2 ranks, but this program has 3. Start 2" in each[f"{how}, in flight"]
            close(each[f"{how}, by sample"], saved[0][f"{how}, by sample"])
            dropout = found[0][f"{how}, by sample"]["0.weight"] - alone["0.weight"]
            assert dropout.norm() > 0.01 * alone["0.weight"].norm(), "premise"


def test_a_rank_that_cannot_write_fails_all_and_no_checkpoint_is_lost(saved: Found) -> None:
    healthy, bad = (each["failed"] for each in saved)
    assert healthy["error"].startswith("CheckpointError: Rank 1 failed: OSError: ")
    assert "File too large" in bad["error"]
    for each in (healthy, bad):
        assert each["after"] == each["before"] != []
