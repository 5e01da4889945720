"""Values outside tensor operators: NumPy, lists, vmap, strides, sparse matrices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.torch.coupled import data, models
from tests.torch.coupled.case import Case, between
from tests.torch.coupled.zoo.architectures import cross_entropy


def through_numpy(net: Any, h: Tensor) -> Tensor:
    """Subtract a statistic computed by NumPy."""
    return h - torch.from_numpy(h.detach().cpu().numpy().mean(0))


def through_lists(net: Any, h: Tensor) -> Tensor:
    return h / (1 + torch.tensor([max(column) for column in h.detach().t().tolist()], dtype=h.dtype))


def matched(model: Any, batch: Any) -> Tensor:
    """DETR: match samples with targets, nearest pair first."""
    z, y = model(batch["x"]), batch["y"]
    cost = torch.cdist(z, y).detach().numpy().copy()
    pairs = []
    for _ in range(len(z)):
        row, column = divmod(int(cost.argmin()), len(z))
        pairs.append((row, column))
        cost[row], cost[:, column] = float("inf"), float("inf")
    rows, columns = torch.tensor(pairs).T
    return F.mse_loss(z[rows], y[columns])


def by_vmap(net: Any, h: Tensor) -> Tensor:
    return torch.vmap(lambda row: torch.outer(row, row).sum(0))(h) / 8 + h.mean(0)


def by_vmap_of_pairs(net: Any, h: Tensor) -> Tensor:
    return h + torch.vmap(lambda row: (row - h).tanh().mean(0))(h)


def by_functional_gradient(net: Any, h: Tensor) -> Tensor:
    """One step of gradient descent on an energy of the whole batch."""
    return h - 0.3 * torch.func.grad(lambda z: (z - z.mean(0)).tanh().pow(2).sum())(h)


def copied(net: Any, h: Tensor) -> Tensor:
    return h - copy.deepcopy(h.detach()).mean(0)


def strided(net: Any, h: Tensor) -> Tensor:
    """Products of neighbouring rows, by strides."""
    h = h.contiguous()
    pairs = h.as_strided((h.shape[0] - 1, 16), (8, 1))
    return h + F.pad(pairs[:, 8:] * pairs[:, :8], (0, 0, 1, 0))


def sparse(net: Any, h: Tensor) -> Tensor:
    """Multiply by a sparse matrix over samples (a graph of the batch)."""
    n = h.shape[0]
    edges = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
    graph = torch.sparse_coo_tensor(edges, torch.ones(n, dtype=h.dtype), (n, n), check_invariants=False)
    return h + torch.sparse.mm(graph, h)


def nested(model: Any, batch: Any) -> Tensor:
    """Rows of different lengths, as a Python list of slices."""
    h = model.words(batch["x"])
    rows = [row[:length].mean(0) for row, length in zip(h, batch["lengths"].tolist(), strict=True)]
    return F.cross_entropy(model.last(model.norm(torch.stack(rows))), batch["y"])


def _case(name: str, build: Callable[[], nn.Module], loss: Any = cross_entropy, **options: Any) -> Case:
    values: dict[str, Any] = {"data": data.rows, "coupled": True, **options}
    return Case(name=name, build=build, loss=loss, **values)


CASES = [
    _case("through numpy", between(through_numpy)),
    _case("through lists", between(through_lists)),
    _case("matched to targets", lambda: models.mlp(norm=nn.LayerNorm), matched, data=data.targets),
    _case("vmap over samples", between(by_vmap)),
    _case("vmap over pairs", between(by_vmap_of_pairs)),
    _case("functional gradient", between(by_functional_gradient)),
    _case("deep copy", between(copied)),
    _case("strides over the batch", between(strided)),
    _case("a sparse matrix over samples", between(sparse)),
    _case(
        "rows of their own lengths",
        lambda: models.Named(words=nn.Embedding(11, 8), norm=nn.BatchNorm1d(8), last=nn.Linear(8, 3)),
        nested,
        data=data.tokens,
        buffers=True,
    ),
]
