"""Two gloo ranks of a sharded model; one raises in every backward: `python -m ... RANK FOLDER`."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from superbatch.torch import Accumulator
from tests.torch.helpers import mse
from tests.torch.sharded_tasks import Task, net
from tests.torch.sharded_training import BrokenError, fully
from tests.torch.two_ranks import end_rank


def broken(x: Tensor, where: str, *, here: bool) -> None:
    """Raise in each backward of one rank."""
    if here and where == "backward":
        raise BrokenError("no backward here")


def main(rank: int, folder: Path) -> None:
    """Write the error of this rank."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=3),
    )
    model: Any = fully(net(), init_device_mesh("cpu", (2,)))
    model.fragile.fails = partial(broken, here=rank == 1)
    task = Task()
    accumulate = Accumulator(
        model, task.optimizer(model.parameters()), partial(mse, model), microbatch_size=2, check=False
    )
    try:
        accumulate(task.data(rank)[0])
    except Exception as error:  # noqa: BLE001 - the test checks it
        (folder / f"{rank}.json").write_text(json.dumps([type(error).__name__, str(error)]))
    end_rank()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
