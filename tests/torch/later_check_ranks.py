"""Two gloo ranks with ignored labels from the second window on: `python -m ... RANK FOLDER`.

The check of the loss runs again in a later window, after some of its gradients are summed.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from superbatch.torch import Accumulator
from tests.torch.sharded_training import fully, join, leave, run, whole

WINDOWS, SAMPLES = 5, 6
NONE = {"FSDP2, a rank without data": (0, 1), "FSDP2, auto": (1, 2)}  # rank and window without data
OPTIONS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "FSDP2": {},
    "FSDP2, microbatch": {"sync": "microbatch"},
    "FSDP2, ignored": {},
    "FSDP2, ignored, microbatch": {"sync": "microbatch"},
    "FSDP2, a rank without data": {},
    "FSDP2, auto": {"microbatch_size": "auto"},
}


def net() -> nn.Module:
    """Return a classifier."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch_of(rank: int, window: int) -> dict[str, Tensor]:
    """Return the samples of a rank; from the second window on, some labels are ignored."""
    generator = torch.Generator().manual_seed(10 * window + rank)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (SAMPLES,), generator=generator)
    if window:
        labels[rank::3] = -100
    return {"x": x, "labels": labels}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over the labels that are not ignored."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["labels"])


def counted(batch: dict[str, Tensor]) -> int:
    """Return the number of labels that are not ignored."""
    return int((batch["labels"] != -100).sum())


def wrapped(how: str) -> Any:
    """Return the model, wrapped for its ranks."""
    model: Any = net()
    if how == "DDP":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    if "ignored" not in how:
        return fully(model, mesh)
    fully_shard(model, mesh=mesh, ignored_params={model[0].bias})
    return model


def trained(rank: int, how: str) -> dict[str, Any]:
    """Train on all windows."""
    model, calls = wrapped(how), 0

    def loss_fn(batch: dict[str, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        return loss_of(model, batch)

    accumulate = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss_fn,
        weight=counted,
        **{"microbatch_size": 2, **OPTIONS[how]},
    )
    called: list[int] = []
    for window in range(WINDOWS):
        before = calls
        accumulate(None if NONE.get(how) == (rank, window) else batch_of(rank, window))
        called.append(calls - before)
    return {"state": whole(model), "calls": called}


def main(rank: int, folder: Path) -> None:
    """Run the cells, and write the results into the folder."""
    join(rank, folder, 2)
    leave(run({how: partial(trained, rank, how) for how in OPTIONS}, []), rank, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
