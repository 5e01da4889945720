"""Two gloo ranks of which one ends or hangs in a window: `python -m ... RANK FOLDER HOW FAULT`."""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from superbatch.torch import Accumulator
from tests.torch.fault_ranks import error_of, net, rows
from tests.torch.sharded_training import fully
from tests.torch.two_ranks import end_rank

TIMEOUT = 5.0  # seconds


def main(rank: int, folder: Path, how: str, fault: str) -> None:
    """Make an update, lose rank 1 in the next one, and leave what rank 0 raised and when."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    model: Any = net()
    model = DistributedDataParallel(model) if how == "DDP" else fully(model, init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updates: list[bool] = []

    def loss_fn(x: Tensor) -> Tensor:
        if rank == 1 and updates:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3 * TIMEOUT)
        return error_of(model, x)

    accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size=2, check=False)
    updates.append(accumulate(rows(rank, 0)).made)
    began, found = time.monotonic(), []
    for _ in range(2):
        try:
            accumulate(rows(rank, 1))
        except Exception as error:  # noqa: BLE001, PERF203 - the test looks at each
            found.append([type(error).__name__, str(error)])
    seconds = time.monotonic() - began
    (folder / f"{rank}.json").write_text(json.dumps({"errors": found, "seconds": seconds}))
    end_rank()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4])
