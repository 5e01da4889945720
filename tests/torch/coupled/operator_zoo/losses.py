"""Losses with each reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.torch.coupled.operator_case import (
    N,
    OperatorCase,
    ints,
    operator,
    positive,
    real,
    unit,
)


def _loss(name: str, function: Callable[..., Tensor], *specs: Any) -> list[OperatorCase]:
    def reduced(reduction: str) -> Callable[..., Tensor]:
        return lambda *inputs: function(*inputs, reduction=reduction)

    return [operator(f"{name}, {r}", reduced(r), *specs) for r in ("mean", "sum", "none")]


def _detached_second(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, y, **options: function(x, y.detach(), **options)


OPERATORS = [
    *_loss("cross_entropy", F.cross_entropy, real(N, 4), ints(4, N)),
    *_loss(
        "cross_entropy, smoothed",
        lambda x, y, reduction: F.cross_entropy(x, y, label_smoothing=0.2, reduction=reduction),
        real(N, 4),
        ints(4, N),
    ),
    *_loss(
        "cross_entropy with class weights",
        lambda x, y, w, reduction: F.cross_entropy(x, y, w.detach(), reduction=reduction),
        real(N, 4),
        ints(4, N),
        positive(4),
    ),
    *_loss(
        "cross_entropy with ignored labels",
        lambda x, y, reduction: F.cross_entropy(x, y, ignore_index=0, reduction=reduction),
        real(N, 4, 6),
        ints(4, N, 6),
    ),
    *_loss(
        "cross_entropy with chances",
        lambda x, y, reduction: F.cross_entropy(x, y.softmax(1), reduction=reduction),
        real(N, 4),
        real(N, 4),
    ),
    *_loss("cross_entropy of pixels", F.cross_entropy, real(N, 4, 2, 3), ints(4, N, 2, 3)),
    *_loss(
        "nll_loss",
        lambda x, y, reduction: F.nll_loss(x.log_softmax(1), y, reduction=reduction),
        real(N, 4),
        ints(4, N),
    ),
    *_loss(
        "binary_cross_entropy_with_logits",
        lambda x, y, reduction: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction=reduction),
        real(N, 4),
        real(N, 4),
    ),
    *_loss(
        "binary_cross_entropy",
        lambda x, y, reduction: F.binary_cross_entropy(
            x.sigmoid(), y.detach().sigmoid(), reduction=reduction
        ),
        real(N, 4),
        real(N, 4),
    ),
    *_loss("mse_loss", F.mse_loss, real(N, 4), real(N, 4)),
    *_loss("l1_loss", F.l1_loss, real(N, 4), real(N, 4)),
    *_loss("smooth_l1_loss", F.smooth_l1_loss, real(N, 4), real(N, 4)),
    *_loss("huber_loss", F.huber_loss, real(N, 4), real(N, 4)),
    *_loss(
        "kl_div",
        lambda x, y, reduction: F.kl_div(
            x.log_softmax(1),
            y.log_softmax(1),
            log_target=True,
            reduction="batchmean" if reduction == "mean" else reduction,
        ),
        real(N, 4),
        real(N, 4),
    ),
    *_loss("multi_margin_loss", F.multi_margin_loss, real(N, 4), ints(4, N)),
    *_loss("soft_margin_loss", _detached_second(F.soft_margin_loss), real(N, 4), unit(N, 4)),
    *_loss("multilabel_margin_loss", F.multilabel_margin_loss, real(N, 4), ints(4, N, 4)),
    *_loss(
        "multilabel_margin_loss over the batch",
        lambda x, y, reduction: F.multilabel_margin_loss(x, y % len(x), reduction=reduction),
        real(N),
        ints(9, N),
    ),
    *_loss("poisson_nll_loss", _detached_second(F.poisson_nll_loss), real(N, 4), positive(N, 4)),
    *_loss(
        "cosine_embedding_loss",
        lambda x, y, s, reduction: F.cosine_embedding_loss(x, y, 2 * s - 1, reduction=reduction),
        real(N, 4),
        real(N, 4),
        ints(2, N),
    ),
    *_loss("triplet_margin_loss", F.triplet_margin_loss, real(N, 4), real(N, 4), real(N, 4)),
    *_loss(
        "ctc_loss",
        lambda x, y, reduction: F.ctc_loss(
            x.permute(1, 0, 2).log_softmax(2),
            y,
            torch.full((len(x),), 8),
            torch.full((len(x),), 3),
            reduction=reduction,
        ),
        real(N, 8, 5),
        ints(5, N, 3, low=1),
    ),
    operator("cross_entropy of pairs", lambda x: F.cross_entropy(x @ x.T, torch.arange(len(x))), real(N, 3)),
    operator(
        "cross_entropy of pairs, transposed",
        lambda x, y: F.cross_entropy((x @ y.T).t(), torch.arange(len(x))),
        real(N, 3),
        real(N, 3),
    ),
    *_loss(
        "cross_entropy of pairs, transposed, some without a label",
        lambda x, y, label, reduction: F.cross_entropy(
            (x @ y.T).t(),
            # The first sample always has a label: the mean of no losses is NaN.
            torch.where((label < 20) & (torch.arange(len(x)) > 0), -100, label % len(x)),
            reduction=reduction,
        ),
        real(N, 3),
        real(N, 3),
        ints(50, N),
    ),
    *_loss(
        "cross_entropy of pairs, transposed, weighted",
        lambda x, y, w, reduction: F.cross_entropy(
            (x @ y.T).t(), torch.arange(len(x)).flip(0), w.detach(), reduction=reduction
        ),
        real(N, 3),
        real(N, 3),
        positive(N),
    ),
    operator(
        "mse_loss with a plain target", lambda x, y: F.mse_loss(x, y), real(N, 4), real(N, 4), plain=(1,)
    ),
]
