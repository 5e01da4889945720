"""Worker for one of the two gloo ranks of `test_noise`: a window of three micro-batches, then of one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from superbatch.noise.meter import Estimate, NoiseMeter
from superbatch.torch import Accumulator, Window
from tests.torch.helpers import mlp, mse, rows, sgd

SIZES = ((4, 2, 3), (1, 5, 2))
ALONE = ((9,), (8,))


class Recorder(NoiseMeter):
    """Records the estimates and losses of a window."""

    def add(self, estimates: dict[str, Estimate], *, samples: float) -> None:  # type: ignore[override]
        self.said = (dict(estimates), samples)
        super().add(estimates, samples=samples)

    def add_losses(self, mean: float, explained: float) -> None:
        self.losses = (mean, explained)
        super().add_losses(mean, explained)


def leave(said: Any, rank: int, folder: Path) -> None:
    """Write the results of a rank, and end its process."""
    torch.save(said, folder / f"{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without joining gloo's threads


def parts(sizes: tuple[int, ...], first: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return micro-batches of the single batch of 17 samples."""
    x, y = rows(17, 1)[0]
    found = []
    for size in sizes:
        found.append((x[first : first + size], y[first : first + size]))
        first += size
    return found


def main(rank: int, folder: Path) -> None:
    """Measure both cases, and write the results."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)  # pyright: ignore[reportPrivateImportUsage]  (documented)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    said = {}
    for name, sizes in (("three", SIZES), ("one", ALONE)):
        model = DistributedDataParallel(mlp())
        meter = Recorder(every=1)
        accumulate = Accumulator(
            model,
            sgd(model.parameters()),
            lambda microbatch, model=model: mse(model, microbatch),
            observers=[meter],
        )
        accumulate(Window(parts(sizes[rank], sum(sizes[0]) if rank else 0)))
        estimates, samples = meter.said
        said[name] = (tuple(estimates["group 0"]), samples, meter.losses)
        assert all(p._backward_hooks is None for p in model.parameters())
    leave(said, rank, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
