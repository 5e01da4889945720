"""Worker for one of the four gloo ranks of `test_context_parallel`: 2 data ranks of 2 sequence ranks each.

python -m tests.torch.context_ranks RANK FOLDER
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from superbatch.torch import count_tokens
from tests.torch.sharded_tasks import Task, sentences
from tests.torch.sharded_training import Place, fully, join, leave, run, trained

HALVES = 2


class AllGather(torch.autograd.Function):
    """All-gather of a sequence's shards. (That of `torch.distributed.nn` works in the default group only.)"""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: Any) -> Tensor:
        ctx.group = group
        shards = [torch.empty_like(shard) for _ in range(HALVES)]
        dist.all_gather(shards, shard.contiguous(), group=group)
        return torch.cat(shards, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(HALVES, 1)[ctx.group.rank()], None


class Attention(nn.Module):
    """Causal attention; all-gathers keys and values if ranks share a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(6, 18), nn.Linear(6, 6)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Attend to this position and all earlier ones."""
        query, key, value = self.project(x).chunk(3, -1)
        first = 0
        if self.group is not None:
            first = x.shape[1] * self.group.rank()
            key, value = (AllGather.apply(each, self.group) for each in (key, value))
        positions = torch.arange(first, first + x.shape[1])
        later = torch.arange(key.shape[1]) > positions[:, None]
        weights = (query @ key.mT).masked_fill(later, -torch.inf).softmax(-1)
        return x + self.out(weights @ value)


class Model(nn.Module):
    """A language model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend, self.head = nn.Embedding(11, 6), Attention(), nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.attend(self.embed(ids)))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Model().double()


def padded(rank: int) -> list[Any]:
    """Return sequences padded to 8 tokens, so that two ranks can share them."""
    pad = {"ids": 0, "labels": -100}
    batches = sentences(rank)
    return [{k: nn.functional.pad(v, (0, 1), value=pad[k]) for k, v in batch.items()} for batch in batches]


def loss(of: nn.Module, batch: Any) -> Tensor:
    """Return the mean over labels; NaN without labels."""
    return nn.functional.cross_entropy(of(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


TASK = Task(
    make=model, loss=loss, data=padded, options={"microbatch_size": 1, "weight": count_tokens("labels")}
)


def shard(batches: Any, rank: int, half: int) -> list[Any]:
    """Return a rank's half of each sequence."""
    return [{name: each.chunk(HALVES, 1)[half] for name, each in batch.items()} for batch in batches(rank)]


def sharded(of: nn.Module, mesh: Any, group: Any) -> nn.Module:
    """Shard the model over all ranks; pairs of ranks share sequences."""
    attend: Any = of.get_submodule("attend")
    attend.group = group
    return fully(of, mesh)


def main(rank: int, folder: Path) -> None:
    """Train with shared sequences, and write the results into the folder."""
    join(rank, folder, 4)
    both = init_device_mesh("cpu", (2, HALVES), mesh_dim_names=("dp", "cp"))
    mesh = init_device_mesh("cpu", (4,))
    data = partial(shard, padded, half=rank % HALVES)
    options = TASK.options
    mine = Task(make=model, loss=loss, data=lambda _: data(rank // HALVES), options=options)
    place = Place(partial(sharded, mesh=mesh, group=both.get_group("cp")), rank)
    each = {"once": partial(trained, mine, place), "each": partial(trained, mine, place, sync="microbatch")}
    alike = Task(
        make=model,
        loss=lambda of, batch: loss(of, batch).nan_to_num(),  # halves without a label get the same weight
        data=mine.data,
        options={"microbatch_size": 1},
    )
    each["mutant: samples"] = partial(trained, alike, place)
    leave(run(each, []), rank, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
