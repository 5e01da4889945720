"""Worker for one of the two gloo ranks of `test_adaptive_ranks`: `python -m ... RANK FOLDER`."""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from superbatch.noise.meter import NoiseMeter
from superbatch.results.noise import Noise
from superbatch.torch import Accumulator, windows
from superbatch.torch.tuning import controller

SCALES = ([400.0, 400.0, 400.0, 90.0], [20.0, 4000.0, 15.0, 4000.0])
"""Noise scale that each rank measures in each window."""


def disagreeing(rank: int, model: nn.Module) -> list[int]:
    """Return window lengths where the ranks measure different noise scales."""
    scales = iter(SCALES[rank])

    def noise() -> Noise:
        scale = next(scales)
        return Noise(
            batch_size=scale,
            low=scale / 2,
            high=2 * scale,
            signal=1.0,
            variance=scale,
            windows=50,
            effective_windows=50.0,
            samples_per_window=64.0,
            groups=(),
            reason=None,
        )

    steps = controller(model, noise, microbatch=5, start=8)
    return [steps(update) for update in range(5)]


def measured(rank: int, model: nn.Module) -> list[int]:
    """Return window lengths that follow the measured noise, with different data on each rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    accumulate = Accumulator(
        model, optimizer, lambda x: model(x).mean(), check=False, observers=[NoiseMeter(beta=0.9, every=1)]
    )
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(800, 8, 40, dtype=torch.float64, generator=generator) * (160 / 40) ** 0.5
    rows[..., 0] += 1.0  # |G|^2 = 1 and a noise scale of 160 samples: 10 micro-batches on each rank
    steps = controller(model, lambda: accumulate.noise, microbatch=8, start=2, most=40)
    return [accumulate(window).microbatches for window in windows(rows, steps)]


def main(rank: int, folder: Path) -> None:
    """Run both cases, and write the results into the folder."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=20),
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(40, 1, bias=False).double())
    found = {"disagreeing": disagreeing(rank, model), "measured": measured(rank, model)}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without joining gloo's threads, which may end the process with an error


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
