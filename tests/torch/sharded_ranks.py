"""Worker for one of the two gloo ranks of `test_sharded_ranks`: `python -m ... RANK FOLDER`."""

from __future__ import annotations

import datetime
import math
import os
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from superbatch.errors import SuperbatchError
from superbatch.torch import Accumulator, Window
from tests.torch.helpers import mlp, mse, rows, sgd
from tests.torch.sharded_sync import OwnNorm, Sharded, ShardedSync

SAMPLES = ((7, 4), (5, 6), (8, 4))
"""Number of samples of each update, on each rank."""

CLIP = 0.05


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return one batch for each update."""
    return [rows(samples[rank], 1, seed=10 * rank + update)[0] for update, samples in enumerate(SAMPLES)]


def equal(rank: int) -> tuple[Tensor, Tensor]:
    """Return a batch of the same size on each rank."""
    return rows(6, 1, seed=20 + rank)[0]


def weighted_samples(rank: int) -> list[tuple[Tensor, ...]]:
    """Return micro-batches of one weighted sample each; two of rank 1 have weight 0."""
    x, y = rows(3, 1, seed=30 + rank)[0]
    weight = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 5.0]][rank], dtype=torch.float64)
    return list(zip(x.split(1), y.split(1), weight.split(1), strict=True))


def weighted(model: nn.Module, batch: Any) -> Tensor:
    """Return a mean, weighted by sample."""
    x, y, weight = batch
    return ((model(x) - y).square().mean(-1) * weight).sum() / weight.sum()


def trained(
    group: Any, kind: type[ShardedSync], data: list[Any], loss: Any, **options: Any
) -> dict[str, Any]:
    """Train a sharded model by an `Accumulator` that does not support shards itself."""
    module = Sharded(mlp(), group)
    sync = kind(module)
    with mock.patch("superbatch.torch.window.build.find_sync", return_value=sync):
        accumulate = Accumulator(
            module, sgd(module.parameters()), lambda batch: loss(module, batch), **{"check": False, **options}
        )
    updates, errors, warned = [], [], []
    for batch in data:
        before = [shard.detach().clone() for shard in module.parameters()]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                updates.append(accumulate(batch))
            except (SuperbatchError, BrokenLossError) as error:
                same = all(map(torch.equal, before, module.parameters()))
                errors.append((type(error).__name__, str(error), same and not module.unsharded))
        warned += [str(one.message) for one in caught]
    return {
        "parameters": {name: module.gather(name) for name in module.shapes},
        "elements": sum(shard.numel() for shard in module.parameters()),
        "updates": updates,
        "errors": errors,
        "reductions": sync.reductions,
        "left": len(module.unsharded),
        "own": sync.own,
        "raised": sync.raised,
        "warned": warned,
    }


def unequal_on_one_rank(rank: int) -> list[tuple[Tensor, ...]]:
    """Return samples with equal weights on rank 0, and with unequal weights on rank 1."""
    x, y = rows(6, 1, seed=40 + rank)[0]
    weight = torch.tensor([[1.0] * 6, [1.0, 4.0, 0.5, 1.0, 3.0, 0.25]][rank], dtype=torch.float64)
    return [(x, y, weight)]


class BrokenLossError(Exception):
    """Error in the user's loss."""


def fits_on_rank_0(rank: int, most: int) -> Any:
    """Return a loss that runs out of memory on rank 0 above `most` samples."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = mse(model, batch)
        if rank == 0 and len(batch[0]) > most:
            raise torch.OutOfMemoryError("out of memory")
        return value

    return loss


def breaks_on_rank_1(rank: int) -> Any:
    """Return a loss that raises a user error on rank 1."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = mse(model, batch)
        if rank == 1:
            raise BrokenLossError("no such label")
        return value

    return loss


BAD = 2
"""Micro-batch of rank 1 with a non-finite value."""


def not_finite(rank: int, *, gradient: bool) -> Any:
    """Return a loss that is non-finite, or whose gradient is, in one micro-batch of rank 1."""
    first = batches(1)[0][0][BAD]  # micro-batches of one sample, because rank 0 has four micro-batches

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = mse(model, batch)
        if rank == 1 and torch.equal(batch[0][0], first):
            return value + (value * 0).sqrt() if gradient else value * math.nan
        return value

    return loss


class OneInfinity(ShardedSync):
    """Ranks whose last gradient element is infinite, as after an overflow in one micro-batch."""

    def no_sync(self) -> ExitStack:
        """Set the element before the first backward."""
        self.module.unsharded["2.bias"] = torch.tensor([0.0, 0.0, math.inf], dtype=torch.float64)
        return super().no_sync()


def main(rank: int, folder: Path) -> None:
    """Run all cases, and write the results into the folder."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=20),
    )
    group, data = dist.group.WORLD, batches(rank)
    of_weights = Window(weighted_samples(rank))
    few = rows(5 if rank == 0 else 1, 1)[0]
    clipped = {"microbatch_size": 2, "max_grad_norm": CLIP}
    found = {
        "clipped": trained(group, ShardedSync, data, mse, **clipped),
        "own norm": trained(group, OwnNorm, data, mse, **clipped),
        "largest": trained(group, ShardedSync, data, mse, microbatch_size="largest"),
        "auto": trained(group, ShardedSync, [equal(rank)] * 3, mse, microbatch_size="auto"),
        "weighted": trained(group, ShardedSync, [of_weights], weighted, weight=lambda batch: batch[2].sum()),
        "few": trained(group, ShardedSync, [few, *data], mse, microbatch_size=2),
        "checked": trained(group, ShardedSync, data, mse, microbatch_size=2, check=True),
        "wrong weight": trained(
            group, ShardedSync, unequal_on_one_rank(rank), weighted, microbatch_size=3, check=True
        ),
        "memory": trained(group, ShardedSync, data, fits_on_rank_0(rank, 2), microbatch_size=4),
        "no memory": trained(group, ShardedSync, data[:1], fits_on_rank_0(rank, 0), microbatch_size=4),
        "broken": trained(group, ShardedSync, data[:1], breaks_on_rank_1(rank), microbatch_size=2),
        "nan": trained(group, ShardedSync, data[:1], not_finite(rank, gradient=False), microbatch_size=2),
        "bad gradient": trained(
            group, ShardedSync, data[:1], not_finite(rank, gradient=True), microbatch_size=2
        ),
        "infinite": trained(group, OneInfinity, data[:1], mse, microbatch_size=2),
    }
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without joining gloo's threads, which may end the process with an error


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
