"""Coupled batches on two gloo ranks, for `test_coupled_ranks`: `python -m ... RANK FOLDER [CELL ...]`.

The models are small; most have BatchNorm. Each rank has its own, unequal number of samples.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather, all_reduce
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from superbatch.errors import SuperbatchError
from superbatch.torch import WholeBatch, WholeGradient, count_tokens
from superbatch.torch.virtual.run.store import Store
from superbatch.torch.window import coupled_work
from tests.torch.sharded_training import full, join, leave

Found = dict[str, Any]
Batch = dict[str, Tensor]
COUNTS = ((5, 9), (7, 3), (6, 2))
EVEN = ((6, 6), (4, 4))


def net(*, synchronised: bool = False) -> nn.Module:
    """Return a model with two BatchNorms."""
    torch.manual_seed(0)
    # No biases before BatchNorm: their gradient is a rounded zero, which AdamW would scale up to a step.
    layers = [nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh()]
    layers += [nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5)]
    model = nn.Sequential(*layers, nn.Linear(5, 3)).double()
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if synchronised else model


def plain() -> nn.Module:
    """Return a model without BatchNorm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def rows(rank: int, update: int, samples: int) -> Batch:
    """Return samples with labels; one sample has no label."""
    generator = torch.Generator().manual_seed(10 * update + rank)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64) + rank
    labels = (torch.arange(samples) + update) % 3
    labels[1:2] = -100
    return {"x": x, "y": x.roll(1, 1).cos(), "labels": labels}


def data(rank: int, counts: Any = COUNTS) -> list[Batch]:
    """Return the batches of a rank, one for each update."""
    return [rows(rank, update, each[rank]) for update, each in enumerate(counts)]


def error_of(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Return a mean squared error over samples."""
    return (model(batch["x"]) - batch["y"][:, :3]).square().mean()


def of_labels(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Return a mean over the samples with a label."""
    return F.cross_entropy(model(batch["x"]), batch["labels"], ignore_index=-100)


def of_all_labels(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Return a mean over all samples; each has a label."""
    return F.cross_entropy(model(batch["x"]), batch["labels"].clamp(min=0), ignore_index=-100)


def logits(mine: Tensor, every: Tensor) -> Tensor:
    """Return scaled cosine similarities of embeddings."""
    return 3 * F.normalize(mine, dim=1) @ F.normalize(every, dim=1).T


def contrastive(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Return a contrastive loss over the embeddings of all ranks."""
    z, other = model(batch["x"]), model(batch["y"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        every = torch.cat(list(all_gather(other)))
    first = dist.get_rank() * len(z)
    return F.cross_entropy(logits(z, every), torch.arange(first, first + len(z)))


def own_negatives(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Return a contrastive loss over the embeddings of one rank."""
    z, other = model(batch["x"]), model(batch["y"])
    return F.cross_entropy(logits(z, other), torch.arange(len(z)))


def balanced(model: Callable[..., Tensor], batch: Batch, *, alone: bool = False) -> Tensor:
    """Return an error plus a penalty on uneven use of the outputs by the samples of all ranks."""
    outputs = model(batch["x"])
    use = outputs.softmax(1).sum(0)
    count = torch.tensor(float(len(outputs)), dtype=torch.float64)
    if not alone:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            use = all_reduce(use)
        dist.all_reduce(count)
    return (outputs - batch["y"][:, :3]).square().mean() + (use / count).square().sum()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW, whose steps depend on the scale of each gradient element."""
    return torch.optim.AdamW(model.parameters(), lr=0.02)


CLIP = 0.3


class Training:
    """A model on this rank with its `WholeBatch`."""

    def __init__(
        self,
        rank: int,
        loss: Any = error_of,
        *,
        make: Callable[[], nn.Module] = net,
        wrap: Callable[[nn.Module], nn.Module] | None = DistributedDataParallel,
        **options: Any,
    ) -> None:
        self.rank, self.inner = rank, make()
        self.model = self.inner if wrap is None else wrap(self.inner)
        self.optimizer = adamw(self.inner)
        self.accumulate = WholeBatch(
            self.model,
            self.optimizer,
            lambda batch: loss(self.model, batch),
            **{"microbatch_size": 2 + rank, "max_grad_norm": CLIP, **options},
        )
        self.updates: list[Any] = []

    def run(self, batches: list[Batch]) -> Found:
        """Run the updates, and return the results that the tests compare."""
        self.updates += [self.accumulate(batch) for batch in batches]
        return {
            "state": {name: full(value) for name, value in self.inner.state_dict().items()},
            "losses": [u.loss for u in self.updates],
            "norms": [u.grad_norm for u in self.updates],
            "failures": [u.failures for u in self.updates],
            "microbatches": [u.microbatches for u in self.updates],
            "report": str(self.accumulate.sync),
            "gradients": sum(p.grad is not None for p in self.inner.parameters()),
        }


def resumed(rank: int, **options: Any) -> Found:
    """Resume in new objects after the first update."""
    first = Training(rank, **options)
    first.run(data(rank)[:1])
    second = Training(rank, **options)
    second.inner.load_state_dict(first.inner.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.accumulate.load_state_dict(first.accumulate.state_dict())
    second.updates = first.updates
    return second.run(data(rank)[1:])


class BrokenError(Exception):
    """Error in user code."""


def failing(
    rank: int, where: str, how: str, loss: Any = error_of, counts: Any = COUNTS, **options: Any
) -> Found:
    """Train, and retry a window after rank 1 failed in it.

    Args:
        rank: this rank.
        where: ``"loss"``; or ``"sweep"``: where a value is stored for a later sweep.
        how: ``"memory"`` or ``"error"``.
        loss: loss of a rank's batch.
        counts: numbers of samples.
        options: of `Training`.
    """
    armed = [rank == 1]

    def fail() -> None:
        if armed[0]:
            armed[0] = False
            raise torch.OutOfMemoryError("no memory") if how == "memory" else BrokenError("no such label")

    def broken(model: Any, batch: Batch) -> Tensor:
        if where == "loss":
            fail()
        return loss(model, batch)

    keep = Store.keep

    def keeping(self: Store, value: Tensor) -> Any:
        if where == "sweep":
            fail()
        return keep(self, value)

    training, outcome, before = Training(rank, broken, **options), [], {}
    with mock.patch.object(Store, "keep", keeping), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in data(rank, counts):
            before = {name: full(value) for name, value in training.inner.state_dict().items()}
            try:
                training.run([batch])
            except (SuperbatchError, BrokenError) as error:
                now = training.inner.state_dict()
                same = all(torch.equal(full(v), before[n]) for n, v in now.items())
                outcome.append((type(error).__name__, str(error), same))
                training.run([batch])
    return {**training.run([]), "outcome": outcome, "fired": rank == 1 and not armed[0]}


def refused(rank: int, loss: Any = error_of, counts: Any = EVEN, **options: Any) -> Found:
    """Return the error of a training that would differ from the large batch's."""
    model, before = net(), net().state_dict()  # the same
    try:
        Training(rank, loss, make=lambda: model, **options).run(data(rank, counts))
    except SuperbatchError as error:
        same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        return {"error": (type(error).__name__, str(error), same)}
    return {"error": None}


def infinite(rank: int) -> Found:
    """Return the error for a loss that is not finite on one rank."""
    return refused(rank, lambda model, batch: error_of(model, batch) * (float("nan") if rank else 1.0))


def of_gradient(rank: int, wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel) -> Found:
    """Accumulate the gradients of all batches without a step."""
    inner = net()
    model = wrap(inner)
    gradient_of = WholeGradient(model, partial(error_of, model), microbatch_size=2)
    records = [gradient_of(batch) for batch in data(rank)]
    gradients = {name: full(p.grad) for name, p in inner.named_parameters() if p.grad is not None}
    return {"gradients": gradients, "losses": [each.loss for each in records]}


def halves(loss: Tensor, factor: float) -> Tensor:
    """Mutant: give each rank the same weight."""
    return loss / 2


def cells(rank: int) -> dict[str, Callable[[], Found]]:
    """Return all cells by name."""

    def trained(loss: Any = error_of, counts: Any = COUNTS, **options: Any) -> Callable[[], Found]:
        return lambda: Training(rank, loss, **options).run(data(rank, counts))

    def mutated(where: Any, name: str, wrong: Any) -> Callable[[], Found]:
        def run() -> Found:
            with mock.patch.object(where, name, wrong):
                return trained()()

        return run

    original_options = coupled_work.Coupled._options
    return {
        "DDP": trained(),
        "SyncBatchNorm": trained(make=partial(net, synchronised=True), wrap=None, sync="all_reduce"),
        "all_reduce": trained(wrap=None, sync="all_reduce"),
        "auto": trained(microbatch_size="auto"),
        "labels": trained(of_labels, weight=count_tokens("labels")),
        "all labels": trained(of_all_labels),
        "contrastive": trained(contrastive, EVEN),
        "balanced": trained(balanced),
        "without BatchNorm": trained(balanced, make=plain),
        "resumed": lambda: resumed(rank),
        "gradient": lambda: of_gradient(rank),
        "mutant: ranks count the same": mutated(coupled_work, "scaled", halves),
        "mutant: BatchNorm within a rank": mutated(
            coupled_work.Coupled,
            "_options",
            lambda self, models: original_options(self, models)._replace(group=None),
        ),
        "memory in the loss": lambda: failing(rank, "loss", "memory"),
        "memory in a sweep": lambda: failing(rank, "sweep", "memory"),
        "memory in a gather": lambda: failing(rank, "sweep", "memory", contrastive, EVEN),
        "error in the loss": lambda: failing(rank, "loss", "error"),
        "error in a sweep": lambda: failing(rank, "sweep", "error"),
        "infinite": lambda: infinite(rank),
        "own negatives": lambda: refused(rank, own_negatives),
        "labels without weight": lambda: refused(rank, of_labels, counts=COUNTS),
        "no weight": lambda: refused(rank, weight=lambda batch: 0),
        "not stated": lambda: refused(rank, wrap=None),
    }


def main(rank: int, folder: Path, chosen: list[str]) -> None:
    """Run the cells, and write the results into the folder."""
    join(rank, folder, 2)
    every = cells(rank)
    leave({name: every[name]() for name in chosen or every}, rank, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
