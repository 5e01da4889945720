"""Train by trainers of TRL on one of two gloo ranks and save the results. Arguments: rank, folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.torch.two_ranks import end_rank


def main(rank: int, folder: Path) -> None:
    """Train by two of the trainers."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder / 'store'}")
    torch.set_num_threads(1)
    from tests.integrations.trl_cases import HOSTS, train

    place = folder / f"of {rank}"
    found = {
        name: train(HOSTS[name][1], name, 2, 2, place, rows=16, ddp_backend="gloo") for name in ("sft", "dpo")
    }
    torch.save(found, folder / f"{rank}.pt")
    end_rank()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
