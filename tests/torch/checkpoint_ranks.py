"""Gloo ranks that save and load checkpoints: `python -m ... RANK FOLDER COUNT SAVED ACTION ...`."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from superbatch.errors import SuperbatchError
from superbatch.torch import Accumulator
from superbatch.torch.checkpoint import load_checkpoint, save_checkpoint
from superbatch.torch.options import PerSampleRandom
from tests.torch.sharded_training import full, fully, join, leave

UPDATES, SAVED = 5, 2
HOW = ("DDP", "FSDP2")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, 5), nn.Tanh()), nn.Linear(5, 3)
    ).double()


def rows(update: int, rank: int, count: int) -> Tensor:
    """Return a rank's shard of an update's 13 samples, which are the same for any number of ranks."""
    generator = torch.Generator().manual_seed(update)
    return torch.randn(13, 4, generator=generator, dtype=torch.float64).tensor_split(count)[rank]


class Training:
    """Model with AdamW and a scheduler, on one rank or under one wrapper."""

    def __init__(self, how: str, *, noisy: bool = False, by_sample: bool = False) -> None:
        self.rank, self.count = (dist.get_rank(), dist.get_world_size()) if how != "alone" else (0, 1)
        model, self.noisy = net(), noisy
        if how == "DDP":
            model = DistributedDataParallel(model)
        if how == "FSDP2":
            fully(model, init_device_mesh("cpu", (self.count,)))
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.accumulate = Accumulator(
            model,
            self.optimizer,
            self.loss,
            microbatch_size=3 if how == "DDP" else 2,
            max_grad_norm=0.1,
            participants=[PerSampleRandom()] if by_sample else [],
            scheduler=torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8),
            check=False,
        )

    def loss(self, batch: Tensor) -> Tensor:
        x = nn.functional.dropout(batch, 0.3) if self.noisy else batch
        return self.model(x).square().mean()

    def run(self, first: int, last: int) -> None:
        """Run the updates from `first` to `last - 1`."""
        for update in range(first, last):
            self.accumulate(rows(update, self.rank, self.count))

    def save_in_flight(self, folder: Path) -> None:
        """Save after the first micro-batch of the next update, then leave the window."""
        batch = rows(self.accumulate.updates, self.rank, self.count)
        with self.accumulate.window(batch) as window:
            for index, microbatch in enumerate(window):
                window.backward(self.loss(microbatch))
                if index == 0:
                    save_checkpoint(folder, self.accumulate, samples=13 * SAVED)
                    break

    def parameters(self) -> dict[str, Tensor]:
        """Return all parameters, unsharded."""
        return {name.removeprefix("module."): full(each) for name, each in self.model.named_parameters()}


def error_of(action: Callable[[], object]) -> str:
    """Return the type and the text of the error that an action raises, or "none"."""
    try:
        action()
    except (SuperbatchError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def save_all(folder: Path) -> dict[str, Any]:
    """Save in every way, and return the final parameters of the uninterrupted trainings."""
    found: dict[str, Any] = {}
    for how in HOW:
        training = Training(how)
        training.run(0, SAVED)
        save_checkpoint(folder / how, training.accumulate, samples=13 * SAVED)
        training.run(SAVED, UPDATES)
        found[how] = training.parameters()
        training = Training(how, noisy=True, by_sample=True)
        torch.manual_seed(7)
        training.run(0, SAVED)
        save_checkpoint(folder / f"{how}, by sample", training.accumulate)
        training.run(SAVED, UPDATES)
        found[f"{how}, by sample"] = training.parameters()
        found[f"{how}, in flight"] = in_flight(how, folder / f"{how}, in flight")
    found["failed"] = failed(folder / "DDP")
    return found


def in_flight(how: str, folder: Path) -> dict[str, Any]:
    """Resume inside a window, with dropout, in new objects on the same ranks."""
    torch.manual_seed(dist.get_rank())
    straight = Training(how, noisy=True)
    torch.manual_seed(dist.get_rank())
    straight.run(0, UPDATES)
    first = Training(how, noisy=True)
    torch.manual_seed(dist.get_rank())
    first.run(0, SAVED)
    first.save_in_flight(folder)
    second = Training(how, noisy=True)
    torch.manual_seed(9)
    loaded = load_checkpoint(folder, second.accumulate)
    second.run(SAVED, UPDATES)
    return {"straight": straight.parameters(), "resumed": second.parameters(), "loaded": str(loaded)}


def failed(folder: Path) -> dict[str, Any]:
    """Save where the last rank cannot write."""
    training, before = Training("DDP"), sorted(path.name for path in folder.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == dist.get_world_size() - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # bytes
    text = error_of(lambda: save_checkpoint(folder, training.accumulate))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    return {"error": text, "before": before, "after": sorted(path.name for path in folder.iterdir())}


def load_all(folder: Path) -> dict[str, Any]:
    """Load checkpoints of another number of ranks, also into the other wrapper."""
    found: dict[str, Any] = {}
    for saved in (*HOW, "alone"):
        for how in HOW:
            training = Training(how)
            loaded = load_checkpoint(folder / saved, training.accumulate)
            assert loaded is not None
            found[f"{saved} to {how}"] = {"samples": loaded.samples, "ranks": loaded.ranks}
            training.run(SAVED, UPDATES)
            found[f"{saved} to {how}"]["parameters"] = training.parameters()
        if saved != "alone":
            load = partial(load_checkpoint, folder / f"{saved}, in flight", Training("FSDP2").accumulate)
            found[f"{saved}, in flight"] = error_of(load)
            training = Training("DDP", noisy=True, by_sample=True)
            load_checkpoint(folder / f"{saved}, by sample", training.accumulate)
            training.run(SAVED, UPDATES)
            found[f"{saved}, by sample"] = training.parameters()
    return found


if __name__ == "__main__":
    rank, folder, count, action = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    join(rank, folder, count)
    found = save_all(Path(sys.argv[5])) if action == "save" else load_all(Path(sys.argv[5]))
    leave(found, rank, folder)
