"""Two gloo ranks that have no data in some windows: `python -m ... RANK FOLDER`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from superbatch.torch import Accumulator
from tests.torch.fault_ranks import error_of, net, rows
from tests.torch.sharded_training import join, leave, whole

NONE = {(1, 0), (1, 2), (0, 3), (0, 4), (1, 4)}  # rank and window
WINDOWS = 6


def trained(rank: int, how: str, *, check: bool) -> dict[str, Any]:
    """Train on six windows."""
    model: Any = net()
    if how == "DDP":
        model = DistributedDataParallel(model)
    accumulate = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        partial(error_of, model),
        microbatch_size=2,
        check=check,
        max_grad_norm=0.1,
        sync="all_reduce" if how == "all_reduce" else "auto",
    )
    updates = [accumulate(None if (rank, w) in NONE else rows(rank, w)) for w in range(WINDOWS)]
    return {"state": whole(model), "made": [u.made for u in updates], "samples": [u.samples for u in updates]}


def main(rank: int, folder: Path) -> None:
    """Run all cells."""
    join(rank, folder, 2)
    cells = [(how, check) for how in ("DDP", "all_reduce") for check in (False, True)]
    leave({f"{how}, {check}": trained(rank, how, check=check) for how, check in cells}, rank, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
