"""Cases of `test_cached_gradients_ranks` on each of two gloo ranks; `ddp_worker` runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from superbatch.torch.gradcache.cached import cached_gradients
from superbatch.torch.gradcache.new_gradients import NewGradients
from tests.torch.embedding_tasks import Pair, gradients, info_nce, normal, pairs, tower
from tests.torch.states import fingerprint

COUNTS = (5, 8)  # samples of each rank
QUERIES, DOCUMENTS = (3, 4), (9, 2)


def shard(batch: Any, rank: int, counts: tuple[int, int] = COUNTS) -> Any:
    """Return a rank's samples of a batch."""
    if isinstance(batch, dict):
        return {name: shard(value, rank, counts) for name, value in batch.items()}
    return batch.split(list(counts))[rank]


def head() -> nn.Linear:
    torch.manual_seed(9)
    return nn.Linear(4, 4).double()


class Clip(Pair):
    """`Pair` with a forward, which DDP needs."""

    def forward(self, batch: Any) -> dict[str, Tensor]:
        return self.encode(batch)


class AllReduceSizes:
    """Context manager that lists the number of elements of each all-reduce."""

    def __enter__(self) -> list[int]:
        self.seen: list[int] = []
        self._before = dist.all_reduce

        def counting(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
            self.seen.append(tensor.numel())
            return self._before(tensor, *arguments, **named)

        dist.all_reduce = counting
        return self.seen

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._before


def wrapped(rank: int, group: Any) -> dict[str, Any]:
    """Wrap one model in DDP: its own reduction must not run, and that of `cached_gradients` runs once."""
    clip = Clip()
    model = DistributedDataParallel(clip, process_group=group)
    own: list[int] = []

    def hook(_, bucket):  # without annotations: DDP asks for its own types
        own.append(1)
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    # Not by DDP's register_comm_hook: a model with such a hook is refused.
    dist._register_comm_hook(model.reducer, None, hook)  # pyright: ignore[reportPrivateImportUsage]
    with AllReduceSizes() as seen:
        loss = cached_gradients(model, clip.loss, shard(pairs(13), rank), 3)
    parameters = sum(parameter.numel() for parameter in clip.parameters())
    reduced = sum(numel >= parameters for numel in seen)
    return {"loss": loss, "gradients": gradients(clip), "own": len(own), "reduced": reduced}


def in_group(rank: int, group: Any) -> dict[str, Any]:
    """Two encoders without DDP, with unequal counts and dtypes that some backends cannot reduce."""
    query, document, last = tower(6), tower(5, seed=4), head()
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    for parameter in query.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    batch = {
        "query": shard(normal(7, 6), rank, QUERIES),
        "document": (
            shard(normal(11, 5, seed=2), rank, DOCUMENTS),
            shard(torch.arange(11) % 2 == 0, rank, DOCUMENTS),
            shard(torch.arange(11).to(torch.bfloat16), rank, DOCUMENTS),
        ),
    }
    layouts: list[Any] = []

    def loss(z: Any) -> Tensor:
        documents, even, numbers = z["document"]
        layouts.append((tuple(documents.shape), even.tolist(), numbers.tolist(), str(numbers.dtype)))
        return info_nce(last(z["query"]), documents * (1 + even.unsqueeze(1)), temperature.exp())

    found = cached_gradients(
        {"query": query, "document": lambda b: (document(b[0]), b[1], b[2])},
        loss,
        batch,
        2,
        models=[query, document, last],
        group=group,
    )
    return {
        "loss": found,
        "gradients": gradients(query, document, last),
        "temperature": temperature.grad,
        "forms": layouts,
    }


def counted_on_every_rank(rank: int, group: Any) -> dict[str, Any]:
    """Mutant: the gradient of the loss's parameters is summed over all ranks."""
    kept = NewGradients.drop_parameters
    NewGradients.drop_parameters = lambda self: None
    try:
        return wrapped(rank, group)
    finally:
        NewGradients.drop_parameters = kept


def fails(rank: int, group: Any, *, where: str) -> dict[str, Any]:
    """Raise on one rank, and return the gradients of both ranks before and after."""
    clip = Clip()
    model = DistributedDataParallel(clip, process_group=group)
    for parameter in clip.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, calls = fingerprint(clip), []
    batch = shard(pairs(13), rank)

    def encode(b: Any) -> Any:
        calls.append(1)
        if rank and (where, len(calls)) in {("first pass", 2), ("second pass", 5)}:
            raise KeyError("user code")
        z = model(b)
        return {"image": z["image"][:, : 4 - rank], "text": z["text"]} if where == "form" else z

    def loss(z: Any) -> Tensor:
        if rank and where == "loss":
            raise KeyError("user code")
        return clip.loss(z)

    if rank and where == "empty":
        batch = {name: value[:0] for name, value in batch.items()}
    try:
        cached_gradients(encode, loss, batch, 3, models=model)
    except Exception as error:  # noqa: BLE001  (the test checks it)
        return {"error": f"{type(error).__name__}: {error}", "before": before, "after": fingerprint(clip)}
    return {"error": None}


def a_parameter_outside(rank: int, group: Any) -> dict[str, Any]:
    """A parameter outside `models`, whose gradient cannot be all-reduced."""
    model, shift = tower(), torch.zeros(4, dtype=torch.float64, requires_grad=True)
    try:
        cached_gradients(
            lambda b: model(b) + shift,
            lambda z: z.sum(),
            shard(normal(13, 6), rank),
            3,
            models=model,
            group=group,
        )
    except ValueError as error:
        return {"error": str(error)}
    return {"error": None}


def losses_that_differ(rank: int, group: Any) -> dict[str, Any]:
    """Dropout in the loss, with different random numbers on each rank."""
    torch.manual_seed(rank)
    clip = Clip()
    torch.manual_seed(rank)
    dropped = lambda z: clip.loss({name: nn.functional.dropout(x) for name, x in z.items()})  # noqa: E731
    try:
        cached_gradients(clip, dropped, shard(pairs(13), rank), 3, group=group)
    except ValueError as error:
        return {"error": str(error)}
    return {"error": None}


CASES: dict[str, Callable[[int, Any], dict[str, Any]]] = {
    "cached_wrapped": wrapped,
    "cached_in_group": in_group,
    "cached_counted_on_every_rank": counted_on_every_rank,
    "cached_outside": a_parameter_outside,
    "cached_losses_differ": losses_that_differ,
    **{
        f"cached_fails_{where.replace(' ', '_')}": lambda rank, group, where=where: fails(
            rank, group, where=where
        )
        for where in ("first pass", "loss", "second pass", "form", "empty")
    },
}
