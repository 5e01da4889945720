"""Long trainings in each main mode: `python -m ... MODE WINDOWS FILE`; FILE gets measurements as JSON."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from superbatch import NoiseMeter
from superbatch.torch import Accumulator, WholeBatch
from superbatch.torch.options import PerSampleRandom

MODES = ("plain", "auto", "coupled", "sample_rng", "noise", "DDP", "own loop")
SECTIONS = 5  # sections of a run; the first is a warm-up


def net(*, norm: bool = False) -> nn.Module:
    """Return a small model."""
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(16) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(8, 16), middle, nn.Dropout(0.1), nn.Linear(16, 1))


def training(mode: str) -> Callable[[Tensor], object]:
    """Return a function that makes an update of a batch."""
    model = net(norm=mode == "coupled")
    if mode == "DDP":
        store = f"file://{tempfile.mkdtemp()}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        model = DistributedDataParallel(model)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def loss_fn(batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    if mode == "coupled":
        return WholeBatch(model, sgd, loss_fn, microbatch_size=4)
    if mode == "own loop":
        accumulate = Accumulator(model, sgd, microbatch_size=4)

        def update(batch: Tensor) -> None:
            with accumulate.window(batch) as window:
                for microbatch in window:
                    window.backward(loss_fn(microbatch))

        return update
    return Accumulator(
        model,
        sgd,
        loss_fn,
        microbatch_size="auto" if mode == "auto" else 4,
        participants=[PerSampleRandom()] if mode == "sample_rng" else [],
        observers=[NoiseMeter()] if mode == "noise" else [],
    )


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measured() -> dict[str, float]:
    """Return the quantities that may grow."""
    gc.collect()
    return {
        "bytes": resident(),
        "objects": len(gc.get_objects()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count() + len(os.listdir("/proc/self/task")),
    }


def main(mode: str, windows: int) -> dict[str, list[float]]:
    """Train, and measure after each section; the batch size changes all the time."""
    torch.set_num_threads(1)
    update, data = training(mode), torch.randn(12, 8)
    found: dict[str, list[float]] = {"seconds": []}
    for _ in range(SECTIONS):
        times: list[float] = []
        for index in range(windows // SECTIONS):
            start = time.process_time()
            update(data[: 9 + index % 4])
            times.append(time.process_time() - start)
        found["seconds"].append(statistics.median(times))
        for name, value in measured().items():
            found.setdefault(name, []).append(value)
    return found


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
    os._exit(0)  # without the destructors of DDP, which may wait forever
