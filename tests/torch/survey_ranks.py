"""What each of two gloo ranks does for `test_lr_survey_ranks`, given its number and a folder."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from superbatch.torch import Accumulator
from superbatch.torch.tuning import lr_survey
from superbatch.tuning.survey import Sweep
from tests.torch.helpers import mlp, mse, rows, sgd
from tests.torch.states import assert_unchanged, fingerprint

POINTS = 30
BATCHES = (rows(6, 3, seed=11), rows(4, 5, seed=12))
"""Of each rank: other numbers of samples and of batches, so that each begins again at its own time."""


class Ends:
    """One rank's rounding, so to speak: its rule ends the survey at a point, the other's does not."""

    def __init__(self, at: int) -> None:
        self.at, self.original = at, Sweep.add

    def __call__(self, sweep: Sweep, loss: float) -> bool:
        go_on = self.original(sweep, loss)
        return go_on and len(sweep._curve.losses) < self.at


def survey(rank: int, *, spoil: bool = False, high: float = 10.0) -> dict[str, Any]:
    """A survey of a model in DDP, and whether it has left anything behind."""
    model = mlp()
    wrapped = DistributedDataParallel(model)
    optimizer = sgd(wrapped.parameters())
    accumulate = Accumulator(wrapped, optimizer, lambda b: mse(wrapped, b), microbatch_size=2)
    batches = [tuple(part.clone() for part in batch) for batch in BATCHES[rank]]
    accumulate(batches[0])
    if spoil and rank == 1:
        batches[4][0][0, 0] = torch.nan
    before = fingerprint(model, optimizer, accumulate)
    report = lr_survey(accumulate, batches, updates=POINTS, high=high)
    assert_unchanged(before, fingerprint(model, optimizer, accumulate))
    update = accumulate(BATCHES[rank][1])
    return {"report": report, "parameters": dict(model.state_dict()), "update": update}


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=20),
    )
    found = {"plain": survey(rank), "far": survey(rank, high=1e6), "spoiled": survey(rank, spoil=True)}
    if rank == 1:
        ends = Ends(at=9)
        Sweep.add = lambda sweep, loss: ends(sweep, loss)  # pyright: ignore[reportAttributeAccessIssue]
    found["one ends"] = survey(rank)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads of a group that is taken down may end the process with an error


if __name__ == "__main__":
    main()
