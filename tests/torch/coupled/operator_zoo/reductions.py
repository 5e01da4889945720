"""Reductions over the batch, over features and over both; sorting, selection, cumulative operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.torch.coupled.operator_case import (
    N,
    OperatorCase,
    boolean,
    complex_numbers,
    ints,
    operator,
    positive,
    real,
)

_OVER: dict[str, Any] = {
    "the batch": 0,
    "features": 1,
    "the last": -1,
    "batch and last": (0, 2),
    "all features": (1, 2),
    "all by name": (0, 1, 2),
}


def _several(name: str, function: Callable[..., Any], *, min_n: int = 1) -> list[OperatorCase]:
    """Cases of a reduction over one or several dimensions, each with and without `keepdim`."""
    found = []
    for over, dim in _OVER.items():
        for keep in (False, True):
            needs = min_n if dim == 0 else 1

            def reduce(x: Tensor, dim: Any = dim, keep: bool = keep) -> Any:
                return function(x, dim=dim, keepdim=keep)

            kept = ", kept" if keep else ""
            found.append(operator(f"{name} over {over}{kept}", reduce, real(N, 3, 4), min_n=needs))
    return found


def _single(name: str, function: Callable[..., Any]) -> list[OperatorCase]:
    """Cases of a reduction over one dimension."""
    return [
        operator(f"{name} over the batch", lambda x: function(x, dim=0), real(N, 3, 4)),
        operator(f"{name} over features", lambda x: function(x, dim=1), real(N, 3, 4)),
        operator(f"{name} over the batch, kept", lambda x: function(x, dim=0, keepdim=True), real(N, 3, 4)),
        operator(f"{name} over the last, kept", lambda x: function(x, dim=-1, keepdim=True), real(N, 3, 4)),
    ]


def _along(name: str, function: Callable[..., Any]) -> list[OperatorCase]:
    """Cases of an operator along one dimension; the size of the dimension is unchanged."""
    return [
        operator(f"{name} along the batch", lambda x: function(x, dim=0), positive(N, 3, 4)),
        operator(f"{name} along features", lambda x: function(x, dim=1), positive(N, 3, 4)),
        operator(f"{name} along the last", lambda x: function(x, dim=-1), positive(N, 4)),
    ]


def _deprecated_aminmax(x: Tensor) -> tuple[Tensor, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (*torch.ops.aten._aminmax(x.detach()), *torch.ops.aten._aminmax(x.detach(), 1))


_SIMPLE = [
    operator("sum of all", lambda x: x.sum(), real(N, 3, 4)),
    operator("mean of all", lambda x: x.mean(), real(N, 3, 4)),
    operator("sum of one per sample", torch.sum, real(N)),
    operator("mean of one per sample", torch.mean, real(N)),
    operator("var of all", lambda x: x.var(), real(N, 4)),
    operator("std of all, biased", lambda x: x.std(unbiased=False), real(N, 4)),
    operator("var with a correction", lambda x: torch.var(x, dim=0, correction=0), real(N, 4)),
    operator("max and min of all", lambda x: (x.max(), x.min(), x.amax(), x.amin()), real(N, 4)),
    operator("argmax of all", lambda x: (x.argmax(), x.argmin()), real(N, 4)),
    operator("prod of all", torch.prod, positive(N, 4)),
    operator("norm of all", lambda x: (x.norm(), torch.linalg.vector_norm(x, 3), x.norm(p=1)), real(N, 4)),
    operator("norm of largest", lambda x: torch.linalg.vector_norm(x, float("inf"), dim=0), real(N, 4)),
    operator("norm with a power", lambda x: (x.norm(3, dim=1), x.norm(2.5, dim=0)), real(N, 4)),
    operator("any and all", lambda m: (m.any(), m.all(), m.any(0), m.all(1), m.any(dim=1)), boolean(N, 3)),
    operator("sum of booleans", lambda m: (m.sum(), m.sum(0), m.sum(1), m.float().mean()), boolean(N, 3)),
    operator("sum of integers", lambda i: (i.sum(), i.sum(0), i.sum(1), i.prod(1), i.max()), ints(4, N, 3)),
    operator("count_nonzero", lambda x: (x > 0).count_nonzero(dim=0), real(N, 4)),
    operator("var_mean over the batch", lambda x: torch.var_mean(x, dim=0), real(N, 4), min_n=2),
    operator(
        "var_mean over batch and space", lambda x: torch.var_mean(x, (0, 2), keepdim=True), real(N, 3, 4)
    ),
    operator(
        "moments of complex numbers",
        lambda z: (z.mean(0), z.norm(), z.std(correction=0), *torch.var_mean(z, 0), *torch.std_mean(z, 1)),
        complex_numbers(N, 4),
        min_n=2,
    ),
    operator("std_mean over features", lambda x: torch.std_mean(x, -1, correction=0), real(N, 4)),
    # Detached: torch 2.6 has no derivative of aminmax.
    operator("aminmax", lambda x: (x, *(m for d in (0, 1) for m in x.detach().aminmax(dim=d))), real(N, 4)),
    operator("_aminmax", _deprecated_aminmax, real(N, 4)),
    operator("nansum and nanmean", lambda x: (x.nansum(0), x.nanmean(1), x.nanmean()), real(N, 4)),
    operator("quantile over the batch", lambda x: torch.quantile(x, 0.3, dim=0), real(N, 4)),
    operator("quantile over features", lambda x: torch.quantile(x, 0.3, dim=1), real(N, 4)),
    operator("quantiles of all", lambda x: x.quantile(torch.tensor([0.1, 0.5], dtype=x.dtype)), real(N, 4)),
    operator("median of all", lambda x: x.median(), real(N, 4)),
    operator("mode and kthvalue", lambda x: (*x.kthvalue(1, 0), *x.kthvalue(2, 1)), real(N, 4)),
    operator("mode of integers", lambda i: (torch.mode(i, 1)[0], torch.mode(i, 0)[0]), ints(3, N, 5)),
    operator("topk over the batch", lambda x: torch.topk(x, 2, dim=0), real(N, 4), min_n=2),
    operator("topk over features", lambda x: torch.topk(x, 2, dim=1), real(N, 4)),
    operator("topk of one per sample", lambda x: x.topk(2).values, real(N), min_n=2),
    operator("sort of one per sample", lambda x: torch.sort(x, descending=True), real(N)),
    operator(
        "searchsorted", lambda x, edges: torch.searchsorted(edges.sort().values, x), real(N, 4), real(5)
    ),
    operator("bucketize", lambda x: torch.bucketize(x, torch.linspace(-1, 1, 5, dtype=x.dtype)), real(N, 4)),
    operator("bincount", lambda i: torch.bincount(i, minlength=5), ints(5, N)),
    operator("histogram", lambda x: torch.histc(x.detach(), 5, -2, 2), real(N, 4)),
    operator("unique", lambda i: torch.unique(i, return_counts=True), ints(5, N)),
    operator("cov and corrcoef", lambda x: (torch.cov(x.T), torch.corrcoef(x.T)), real(N, 3), min_n=3),
    operator("diff over the batch", lambda x: torch.diff(x, dim=0), real(N, 3), min_n=2),
    operator("diff over features", lambda x: torch.diff(x, dim=1), real(N, 3)),
    operator(
        "trapezoid",
        lambda x: torch.trapezoid(x, dim=1) + torch.trapezoid(x, dim=0).sum(),
        real(N, 4),
        min_n=2,
    ),
    operator("softmax over both", lambda x: x.flatten().softmax(0).view_as(x), real(N, 4)),
    *(
        operator(
            f"renorm {dim} of {len(shape)}", lambda x, dim=dim: torch.renorm(x, 2, dim, 1.0), real(*shape)
        )
        for shape in ((N, 4), (N, 3, 2))
        for dim in range(len(shape))
    ),
    operator("dist", torch.dist, real(N, 4), real(N, 4)),
    operator("logsumexp of all", lambda x: x.logsumexp((0, 1)), real(N, 4)),
    operator("item of a sum", lambda x: x * float(x.detach().sum()), real(N, 4)),
    operator("truth of a statistic", lambda x: x * 2 if x.mean() > 0 else x * 3, real(N, 4)),
]

OPERATORS = [
    *_several("sum", torch.sum),
    *_several("mean", torch.mean),
    *_several("var", torch.var, min_n=2),
    *_several("std", torch.std, min_n=2),
    *_several("amax", torch.amax),
    *_several("logsumexp", torch.logsumexp),
    *_several("vector_norm", torch.linalg.vector_norm),
    *_single("max", torch.max),
    *_single("min", torch.min),
    *_single("argmax", torch.argmax),
    *_single("argmin", torch.argmin),
    *_single("prod", torch.prod),
    *_single("median", torch.median),
    *_single("nanmedian", torch.nanmedian),
    *_single("mode", torch.mode),
    *_along("softmax", torch.softmax),
    *_along("log_softmax", torch.log_softmax),
    *_along("cumsum", torch.cumsum),
    *_along("cumprod", torch.cumprod),
    *_along("cummax", torch.cummax),
    *_along("cummin", torch.cummin),
    *_along("logcumsumexp", torch.logcumsumexp),
    *_along("sort", torch.sort),
    *_along("argsort", torch.argsort),
    *_along("stable argsort", lambda x, dim: torch.argsort(x, dim=dim, stable=True)),
    *_along("normalize", torch.nn.functional.normalize),
    *_SIMPLE,
]
