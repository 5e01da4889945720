"""Two gloo ranks; one ends or hangs in or before a window: `python -m ... RANK FOLDER HOW FAULT`."""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from superbatch.torch import Accumulator
from superbatch.torch.ranks import until_all_end
from tests.torch.fault_ranks import error_of, net, rows
from tests.torch.sharded_training import fully
from tests.torch.two_ranks import end_rank

TIMEOUT = 5.0  # seconds


class Fault:
    """Failure of rank 1 in its second window, once.

    Args:
        kind: ``"killed"``, or the place where it hangs.
        here: True on the failing rank.
    """

    def __init__(self, kind: str, *, here: bool) -> None:
        self.kind, self.here, self.updates = kind, here, 0

    def at(self, *places: str) -> None:
        """End or hang if the failure belongs to one of the places."""
        if not self.here or not self.updates or self.kind not in places:
            return
        self.here = False
        if self.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "handler":
            signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3 * TIMEOUT))
            signal.raise_signal(signal.SIGUSR1)
        else:
            time.sleep(3 * TIMEOUT)

    def batches(self, rank: int) -> Iterator[Tensor]:
        """Yield batches."""
        while True:
            self.at("iterator", "until all end")
            yield rows(rank, 1)


def main(rank: int, folder: Path, how: str, fault: str) -> None:
    """Make an update, lose rank 1 in the next one, and write errors and seconds into the folder."""
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
    failure = Fault(fault, here=rank == 1)
    next(model.modules()).register_forward_pre_hook(lambda *_: failure.at("forward hook"))
    optimizer.register_step_pre_hook(lambda *_: failure.at("step hook"))

    def loss_fn(x: Tensor) -> Tensor:
        failure.at("killed", "hangs", "handler")
        return error_of(model, x)

    accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size=2, check=False)
    accumulate(rows(rank, 0))
    failure.updates = 1
    began, found = time.monotonic(), []
    for _ in range(2):
        batches = failure.batches(rank)
        try:
            for batch in until_all_end(batches) if fault == "until all end" else batches:
                accumulate(batch)
        except Exception as error:  # noqa: BLE001 - the test checks each
            found.append([type(error).__name__, str(error)])
    seconds = time.monotonic() - began
    (folder / f"{rank}.json").write_text(json.dumps({"errors": found, "seconds": seconds}))
    end_rank()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4])
