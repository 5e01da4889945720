"""Attention, recurrent layers, and operators that draw random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.torch.coupled.operator_case import (
    N,
    OperatorCase,
    boolean,
    operator,
    real,
)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _recurrent(kind: Callable[..., Any], gates: int, *, first: bool) -> Callable[..., Any]:
    """Return a function that runs a recurrent layer with its weights as inputs."""

    def function(x: Tensor, *weights: Tensor) -> Any:
        layer = kind(3, 2, batch_first=first)
        names = [name for name, _ in layer.named_parameters()]
        given = dict(zip(names, weights, strict=True))
        out, state = torch.func.functional_call(layer, given, (x if first else x.transpose(0, 1),))
        return (out, *state) if isinstance(state, tuple) else (out, state)

    assert gates in (1, 3, 4)
    return function


def _recurrent_case(name: str, kind: Callable[..., Any], gates: int, *, first: bool = True) -> OperatorCase:
    weights = (real(2 * gates, 3), real(2 * gates, 2), real(2 * gates), real(2 * gates))
    return operator(name, _recurrent(kind, gates, first=first), real(N, 4, 3), *weights)


OPERATORS = [
    operator("attention", _attend, real(N, 2, 4, 3), real(N, 2, 5, 3), real(N, 2, 5, 3)),
    operator(
        "attention, causal",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        real(N, 2, 4, 3),
        real(N, 2, 4, 3),
        real(N, 2, 4, 3),
    ),
    operator(
        "attention with a mask for each sample",
        lambda q, m: F.scaled_dot_product_attention(
            q, q, q, attn_mask=m[:, None, None] | torch.eye(4, dtype=torch.bool)
        ),
        real(N, 2, 4, 3),
        boolean(N, 4),
    ),
    operator(
        "attention with a bias for all",
        lambda q, b: F.scaled_dot_product_attention(q, q, q, attn_mask=b),
        real(N, 2, 4, 3),
        real(4, 4),
    ),
    operator(
        "attention between samples",
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
        real(N, 3),
    ),
    operator(
        "attention to a memory",
        lambda q, k: F.scaled_dot_product_attention(q, k.expand(len(q), -1, -1), k.expand(len(q), -1, -1)),
        real(N, 4, 3),
        real(1, 5, 3),
    ),
    _recurrent_case("LSTM", nn.LSTM, 4),
    _recurrent_case("LSTM, time first", nn.LSTM, 4, first=False),
    _recurrent_case("GRU", nn.GRU, 3),
    _recurrent_case("RNN", nn.RNN, 1),
    operator("dropout", lambda x: F.dropout(x, 0.4), real(N, 3, 4), random=True),
    operator(
        "dropout of a transposed tensor",
        lambda x: F.dropout(x.transpose(0, 1), 0.4),
        real(N, 3, 4),
        random=True,
    ),
    operator("dropout2d", lambda x: F.dropout2d(x, 0.4), real(N, 3, 4, 4), random=True),
    operator(
        "feature_alpha_dropout",
        lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
        real(N, 3, 4),
        random=True,
    ),
    operator(
        "rand_like and others",
        lambda x: x * torch.rand_like(x) + torch.randn_like(x) + torch.randint_like(x, 5),
        real(N, 3),
        random=True,
    ),
    operator("bernoulli", lambda x: torch.bernoulli(x.sigmoid()) * x, real(N, 3), random=True),
    operator(
        "bernoulli_ and uniform_",
        lambda x: (
            x * torch.empty_like(x).bernoulli_(0.6)
            + torch.empty_like(x).uniform_()
            + torch.empty_like(x).normal_()
        ),
        real(N, 3),
        random=True,
    ),
    operator("normal by tensors", lambda m: torch.normal(m.detach(), 0.5) * m, real(N, 3), random=True),
    operator(
        "dropout of some samples, transposed",
        lambda x: F.dropout(x[::2].transpose(0, 1), 0.5),
        real(N, 3, 4),
        random=True,
        min_n=2,
    ),
    operator(
        "random numbers like a statistic, transposed",
        lambda x: torch.rand_like(x.sum(0).t()) * x.sum(0).t() + torch.bernoulli((x.sum(0) * 0 + 0.5).t()),
        real(N, 3, 4),
        random=True,
    ),
    operator("multinomial", lambda x: torch.multinomial(x.detach().softmax(1), 2), real(N, 5), random=True),
    operator(
        "randn of the batch size",
        lambda x: x * torch.randn(x.shape[0], 1, dtype=x.dtype),
        real(N, 3),
        random=True,
    ),
    operator("randperm of the batch", lambda x: x[torch.randperm(x.shape[0])] * x, real(N, 3), random=True),
]
