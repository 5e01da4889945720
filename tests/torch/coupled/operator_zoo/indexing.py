"""Operators that select, gather, scatter and look up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.torch.coupled.operator_case import N, boolean, ints, operator, order, positive, real


def _set(index: Any) -> Any:
    def function(x: Tensor) -> Tensor:
        y = x.clone()
        y[index] = y[index] * 2 + 1
        return y

    return function


OPERATORS = [
    operator("select", lambda x: (x[:, 0], x.select(1, -1), x[..., 1]), real(N, 3, 4)),
    operator("select of the batch", lambda x: (x[0], x[-1], x.select(0, 0)), real(N, 3)),
    operator("slice", lambda x: (x[:, 1:], x[:, ::2], x[..., -2:], x.narrow(1, 1, 2)), real(N, 4)),
    operator("slice of the batch", lambda x: (x[1:], x[:-1], x[::2], x[2:5]), real(N, 3), min_n=6),
    operator("slice of the batch and of features", lambda x: x[1:4, :2].sin(), real(N, 3), min_n=5),
    operator("index by a list of features", lambda x: x[:, [0, 2, 2]], real(N, 4)),
    operator("index_select of features", lambda x: x.index_select(1, torch.tensor([2, 0])), real(N, 4)),
    operator(
        "index_select of the batch", lambda x: x.index_select(0, torch.tensor([2, 0, 2])), real(N, 3), min_n=3
    ),
    operator("permutation of the batch", lambda x, p: x[p] * 2, real(N, 3), order, plain=(1,)),
    operator("permutation as samples", lambda x, p: x[p] * 2, real(N, 3), order),
    operator("index by samples into a table", lambda i, table: table[i], ints(5, N, 3), real(5, 2)),
    operator("index by a mask of the batch", lambda x, m: x[m].sum(0), real(N, 3), boolean(N)),
    operator("index by a mask of all", lambda x, m: x[m].cumsum(0).sum(), real(N, 3), boolean(N, 3)),
    operator("index by its own mask", lambda x: x[x > 0].pow(2).mean(), real(N, 3), min_n=4),
    operator("index by arange and labels", lambda x, y: x[torch.arange(len(x)), y], real(N, 3), ints(3, N)),
    operator("masked_select", lambda x, m: torch.masked_select(x, m).sum(), real(N, 3), boolean(N, 3)),
    operator("nonzero", lambda m: (m.nonzero(), *torch.where(m)), boolean(N, 3)),
    operator("nonzero as a tuple", lambda x: x[(x[:, 0] > 0).nonzero(as_tuple=True)[0]].sum(0), real(N, 3)),
    operator("take_along_dim", lambda x: x.take_along_dim(x.argsort(1), 1), real(N, 4)),
    operator("gather of features", lambda x, i: x.gather(1, i), real(N, 4), ints(4, N, 2)),
    operator("gather of the batch", lambda x, i: x.gather(0, i), real(N, 3), ints(3, 4, 3), min_n=3),
    operator("gather of labels", lambda x, y: x.gather(1, y.unsqueeze(1)).squeeze(1), real(N, 3), ints(3, N)),
    operator("take", lambda x: x.take(torch.tensor([0, 2, 2])), real(N, 3)),
    operator(
        "scatter of features",
        lambda x, i: torch.zeros_like(x).scatter(1, i, x[:, :1]),
        real(N, 4),
        ints(4, N, 1),
    ),
    operator("scatter of numbers", lambda x, y: x.scatter(1, y[:, None], 1.0), real(N, 3), ints(3, N)),
    operator(
        "scatter_add of features", lambda x, i: x.scatter_add(1, i, x[:, :2]), real(N, 4), ints(4, N, 2)
    ),
    operator(
        "scatter_add of the batch",
        lambda x, y: torch.zeros(4, 3, dtype=x.dtype).scatter_add(0, y[:, None].expand(-1, 3), x),
        real(N, 3),
        ints(4, N),
    ),
    operator(
        "scatter_reduce of the batch",
        lambda x, y: torch.zeros(4, dtype=x.dtype).scatter_reduce(0, y, x, "mean"),
        real(N),
        ints(4, N),
    ),
    *(
        operator(
            f"scatter_reduce of features, {kind}",
            lambda x, i, y, kind=kind: x.scatter_reduce(1, i, y, kind),
            positive(N, 4),
            ints(4, N, 3),
            positive(N, 3),
        )
        for kind in ("sum", "prod", "mean", "amax", "amin")
    ),
    operator(
        "index_add of the batch",
        lambda x, y: torch.zeros(4, 3, dtype=x.dtype).index_add(0, y, x),
        real(N, 3),
        ints(4, N),
    ),
    operator("index_add of features", lambda x: x.index_add(1, torch.tensor([0, 2]), x[:, :2]), real(N, 4)),
    operator(
        "index_copy of features", lambda x: x.index_copy(1, torch.tensor([1]), x[:, :1] * 2), real(N, 3)
    ),
    operator("index_fill of features", lambda x: x.index_fill(1, torch.tensor([1]), 0.5), real(N, 3)),
    operator(
        "index_put of features", lambda x: x.index_put((torch.tensor([0]),), x.sum(0)[None]), real(N, 3)
    ),
    operator("masked_scatter", lambda x, y: x.masked_scatter(x > 0, y), real(N, 3), real(N, 3)),
    operator("set a column", _set((slice(None), 1)), real(N, 3)),
    operator("set a row", _set(0), real(N, 3)),
    operator("set rows", _set(slice(1, 4)), real(N, 3), min_n=4),
    operator("set from the end", _set((..., -1)), real(N, 3, 2)),
    operator("set by a mask", _set((slice(None), torch.tensor([True, False, True]))), real(N, 3)),
    operator("one_hot", lambda y: F.one_hot(y, 4), ints(4, N)),
    operator("embedding", F.embedding, ints(5, N, 3), real(5, 2)),
    operator("embedding of transposed", lambda i, w: F.embedding(i.T, w), ints(5, N, 3), real(5, 2)),
    operator(
        "embedding with padding", lambda i, w: F.embedding(i, w, padding_idx=0), ints(5, N, 3), real(5, 2)
    ),
    operator("embedding_bag", lambda i, w: F.embedding_bag(i, w, mode="mean"), ints(5, N, 3), real(5, 2)),
    operator(
        "embedding_bag with weights",
        lambda i, w, s: F.embedding_bag(i, w, per_sample_weights=s, mode="sum"),
        ints(5, N, 3),
        real(5, 2),
        real(N, 3),
    ),
    operator(
        "arange of the batch", lambda x: x * torch.arange(x.size(0), dtype=x.dtype)[:, None], real(N, 3)
    ),
    operator(
        "eye of the batch", lambda x: (x @ x.T) * (1 - torch.eye(x.shape[0], dtype=x.dtype)), real(N, 3)
    ),
    operator("len and shape", lambda x: x * len(x) / x.shape[1] + x.numel() + x.ndim, real(N, 3)),
]
