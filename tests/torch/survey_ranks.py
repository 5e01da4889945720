"""Script of each of two gloo ranks for `test_lr_survey_ranks`; arguments: the rank and a folder."""

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
"""Batches of each rank: their sizes and numbers differ, so they restart at different points."""


class EndsAt:
    """Ends the survey of one rank at a point, as different rounding could."""

    def __init__(self, at: int) -> None:
        self.at, self.original = at, Sweep.add

    def __call__(self, sweep: Sweep, loss: float) -> bool:
        proceed = self.original(sweep, loss)
        return proceed and len(sweep._curve.losses) < self.at


def survey(rank: int, *, spoil: bool = False, high: float = 10.0) -> dict[str, Any]:
    """Run a survey of a model in DDP, and assert that it restores all state."""
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
        ends = EndsAt(at=9)
        Sweep.add = lambda sweep, loss: ends(sweep, loss)  # pyright: ignore[reportAttributeAccessIssue]
    found["one ends"] = survey(rank)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can end the process with an error when a group is destroyed


if __name__ == "__main__":
    main()
