"""HSDP, tensor parallel and FSDP2 x tensor parallel on four gloo ranks, against the large batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.torch import sharded_tasks as tasks
from tests.torch.mesh_ranks import MUTANTS, QUICK
from tests.torch.sharded_tasks import TASKS
from tests.torch.two_ranks import found_by_both

Found = list[dict[str, Any]]
EXACT = 1e-12
ROUNDED = ("/autocast", "/in float32")
"""Tasks in bfloat16: their error against float64 is of the size of the large batch's in bfloat16."""
DATA_RANKS = {"HSDP": 4, "TP": 1, "FSDP2 x TP": 2}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Results of each rank in the quick cells."""
    folder = tmp_path_factory.mktemp("ranks")
    return found_by_both("tests.torch.mesh_ranks", folder, "quick", warnings="default", count=4)


@pytest.fixture(scope="module")
def found_in_all(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Results of each rank in every cell."""
    return found_by_both(
        "tests.torch.mesh_ranks", tmp_path_factory.mktemp("ranks"), warnings="default", count=4
    )


def check(cell: str, found: Found) -> None:
    """Compare a cell with the large batch, and the ranks with each other."""
    task = cell.split("/")[-1]
    kind = cell.split("/")[0].split(",")[0]
    reference, seen = tasks.reference(TASKS[task], DATA_RANKS[kind])
    total = sum(parameter.numel() for parameter in reference.parameters())
    for each in found:
        compared = tasks.errors(each[cell]["parameters"], reference, TASKS[task].make())
        assert max(compared.values()) <= EXACT
        assert each[cell]["losses"] == pytest.approx(seen.losses, rel=EXACT)
        assert each[cell]["norms"] == pytest.approx(seen.norms, rel=EXACT)
        assert each[cell]["elements"] < 0.6 * total, "premise: a rank holds only a shard"
        for name, value in found[0][cell]["parameters"].items():
            assert torch.equal(value, each[cell]["parameters"][name])


@pytest.mark.parametrize("cell", QUICK)
def test_ranks_train_as_the_large_batch(cell: str, found: Found) -> None:
    check(cell, found)


@pytest.mark.slow
def test_ranks_train_as_the_large_batch_in_every_cell(found_in_all: Found) -> None:
    every = [name for name in found_in_all[0] if not name.startswith("mutant")]
    exact = [name for name in every if not name.endswith(ROUNDED)]
    assert len(exact) > 40 and len(every) - len(exact) == 5
    for cell in exact:
        check(cell, found_in_all)
    for cell in set(every) - set(exact):
        task, data_ranks = TASKS[cell.split("/")[-1]], DATA_RANKS[cell.split("/")[0].split(",")[0]]
        trained, _ = tasks.reference(task, data_ranks)
        start = task.make().double()
        ours = max(tasks.errors(found_in_all[0][cell]["parameters"], trained, start).values())
        theirs = max(tasks.errors(tasks.rounded(TASKS["autocast"], data_ranks), trained, start).values())
        assert 1e-3 < ours < 2 * theirs < 0.1, cell


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_differs_from_the_large_batch(name: str, found: Found) -> None:
    kind, task = MUTANTS[name][0].split("/")
    reference, _ = tasks.reference(TASKS[task], DATA_RANKS[kind])
    one = found[0][f"mutant: {name}/{task}"]
    if "error" in one:  # sums over too many ranks make the counts of updates disagree
        assert name == "tensor-parallel ranks have data"
        assert one["error"].startswith("Rank 0 has made 1 updates, but rank ")
        return
    assert max(tasks.errors(one["parameters"], reference, TASKS[task].make()).values()) > 1e-3


@pytest.mark.parametrize("cell", ["HSDP/windows", "FSDP2 x TP/windows"])
def test_all_ranks_make_the_same_number_of_exchanges(cell: str, found: Found) -> None:
    microbatches = [each[cell]["microbatches"] for each in found]
    assert len(set(map(tuple, microbatches))) > 1, "premise: their windows are unequal"
    assert len({tuple(each[cell]["exchanges"]) for each in found}) == 1


def test_the_report_names_the_parallelism(found: Found) -> None:
    one = found[0]
    assert one["HSDP/clipped"]["report"].startswith(
        "HSDP over 4 ranks: gradients are reduced once in a window"
    )
    assert one["TP/clipped"]["report"] == "tensor parallel"
    assert one["FSDP2 x TP/clipped"]["report"].startswith("FSDP2 x tensor parallel over 2 ranks: gradients")
