"""Train by the Trainer on one of two gloo ranks and save the results. Arguments: rank, folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.torch.two_ranks import end_rank

OPTIONS = {"optim": "sgd", "ddp_backend": "gloo"}
ROWS = 24  # shared evenly by both ranks


def ways() -> dict[str, dict[str, tuple[Any, int, int]]]:
    """Return the trainings of each case by name: trainer class, micro-batch size, number of micro-batches."""
    from transformers import Trainer

    from tests.integrations.hf_cases import ExactTrainer, InThrees
    from tests.integrations.hf_hooks import ExactHooked, Hooked

    host = {"big": (Trainer, 4, 1), "stock": (Trainer, 2, 2)}
    sums = {"big": (Trainer, 4, 1), "cut": (InThrees, 4, 1)}
    return {
        # Windows of 20 and 4 samples make the tail.
        "classes": {
            **host,
            "cut": (InThrees, 4, 1),
            "accumulated": (ExactTrainer, 2, 2),
            "tail": (ExactTrainer, 2, 5),
        },
        # Samples are coupled per rank, and 2 x 2 samples would be distributed differently.
        "router": {**host, "cut": (InThrees, 4, 1)},
        "clip": {**host, "cut": (InThrees, 4, 1)},
        "items": {**sums, "accumulated": (ExactTrainer, 2, 2), "singles": (ExactTrainer, 1, 4)},
        "a function": {**sums, "accumulated": (ExactTrainer, 2, 2)},
        "a sum": {**sums, "accumulated": (ExactTrainer, 2, 2)},
        "hooks": {
            "big": (Hooked, 4, 1),
            "stock": (Hooked, 2, 2),
            "cut": (type("HookedInThrees", (ExactHooked,), {"microbatch_size": 3}), 4, 1),
            "accumulated": (ExactHooked, 2, 2),
        },
    }


def main(rank: int, folder: Path) -> None:
    """Train the same models in each way."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder / 'store'}")
    torch.set_num_threads(1)
    from tests.integrations.hf_cases import Run, rows, train
    from tests.integrations.hf_hooks import RANK_CASES

    def kept(run: Run) -> dict[str, Any]:
        found = {"parameters": run.parameters, "loss": run.logged("loss"), "norm": run.logged("grad_norm")}
        return {**found, "events": run.events.seen, "calls": getattr(run.trainer, "calls", [])}

    found: dict[str, Any] = {}
    for name, kinds in ways().items():
        case, given = RANK_CASES[name]
        options = {**OPTIONS, **given, "data": rows(case, ROWS)}
        with patch.object(torch.Tensor, "float", torch.Tensor.double):
            found[name] = {
                way: kept(train(kind, case, size, steps, folder / f"of {rank}", **options))
                for way, (kind, size, steps) in kinds.items()
            }
    torch.save(found, folder / f"{rank}.pt")
    end_rank()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
