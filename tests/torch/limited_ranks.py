"""Training with ``"auto"``; one rank has little memory: `python -m ... RANK FOLDER`."""

from __future__ import annotations

import resource
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from superbatch.torch import Accumulator
from tests.torch.sharded_training import fully, join, leave, whole

SAMPLES, WIDTH, LAYERS = 96, 64, 4
POSITIONS = 512
MIB = 2**20
ROOM = 160 * MIB  # additional memory of rank 1; the whole batch takes about 800 MiB


class Block(nn.Module):
    """Layer whose activations take most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def net() -> nn.Module:
    """Return the model."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS))).double()


def rows(rank: int, update: int) -> Tensor:
    """Return the samples of a rank."""
    generator = torch.Generator().manual_seed(10 * update + rank)
    return torch.randn(SAMPLES, POSITIONS, WIDTH, generator=generator, dtype=torch.float64)


def error_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return a mean over samples."""
    return (model(x) - x.cos()).square().mean()


def trained(rank: int, how: str, *, limited: bool = True) -> dict[str, Any]:
    """Run two updates; the memory of rank 1 may be limited to little more than it uses."""
    mesh = init_device_mesh("cpu", (2,))
    model = fully(net(), mesh) if how == "FSDP2" else DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accumulate = Accumulator(model, optimizer, partial(error_of, model), microbatch_size="auto")
    batches = [rows(rank, update) for update in range(2)]
    error_of(model, batches[0][:1]).backward()  # runs all lazy initialization before the limit
    optimizer.zero_grad()
    limit = resource.getrlimit(resource.RLIMIT_AS)
    if limited and rank == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, limit[1]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            updates = [accumulate(batch) for batch in batches]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    return {
        "parameters": whole(model),
        "losses": [each.loss for each in updates],
        "microbatches": [each.microbatches for each in updates],
    }


def main(rank: int, folder: Path) -> None:
    """Train, and write the results into the folder."""
    join(rank, folder, 2)
    leave({how: trained(rank, how) for how in ("DDP", "FSDP2")}, rank, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
