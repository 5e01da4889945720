"""Worker for one of the two gloo ranks of `test_noise_independence`: the test of a model at rest."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from superbatch.errors import InputError
from superbatch.torch.tuning.independence import independence_at_rest
from tests.torch.noise_ranks import leave

ROWS, SIZE, WINDOWS = 32, 4, 60


def windows(first: int, last: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield rows `first` to `last` of windows that share noise."""
    draw = torch.Generator().manual_seed(2)
    while True:
        x = torch.randn(ROWS, 3, generator=draw, dtype=torch.float64)
        x = x + torch.randn(3, generator=draw, dtype=torch.float64)
        y = x.sum(1, keepdim=True) + torch.randn(ROWS, 1, generator=draw, dtype=torch.float64)
        yield x[first:last], y[first:last]


def judged(how: str, first: int = 0, last: int = ROWS) -> dict[str, Any]:
    """Return the verdict as a dict."""
    torch.manual_seed(1)
    model: Any = nn.Linear(3, 1, dtype=torch.float64)
    if how == "DDP":
        model = DistributedDataParallel(model)
    elif how == "FSDP2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    found = independence_at_rest(
        model,
        lambda microbatch: nn.functional.mse_loss(model(microbatch[0]), microbatch[1]),
        itertools.islice(windows(first, last), WINDOWS),
        microbatch_size=SIZE,
    )
    return asdict(found)


def main(rank: int, folder: Path) -> None:
    """Run both cases, and write the results into the folder."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)  # pyright: ignore[reportPrivateImportUsage]  (documented)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    half = ROWS // 2
    results: dict[str, Any] = {"DDP": judged("DDP", rank * half, (rank + 1) * half)}
    try:
        judged("FSDP2")
    except InputError as error:
        results["FSDP2"] = str(error)
    leave(results, rank, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
