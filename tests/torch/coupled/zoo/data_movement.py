"""Samples reordered, joined, split, selected or summed along the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.torch.coupled import data, models
from tests.torch.coupled.case import Apply, Case, between
from tests.torch.coupled.zoo.architectures import cross_entropy


def flipped(net: Any, h: Tensor) -> Tensor:
    return h + 0.5 * h.flip(0) * h


def rolled(net: Any, h: Tensor) -> Tensor:
    return h * torch.roll(h, 3, 0)


def sorted_by_size(net: Any, h: Tensor) -> Tensor:
    order = h.norm(dim=1).argsort(descending=True)
    place = torch.arange(h.size(0), dtype=h.dtype) / h.size(0)
    return (h[order] * place[:, None])[torch.argsort(order)]


def sorted_values(net: Any, h: Tensor) -> Tensor:
    return h + torch.sort(h, dim=0).values


def top_rows(net: Any, h: Tensor) -> Tensor:
    return h - h.topk(3, dim=0).values.mean(0)


def nearest_row(net: Any, h: Tensor) -> Tensor:
    distance = torch.cdist(h, h) + 1e6 * torch.eye(h.shape[0], dtype=h.dtype)
    return h + 0.3 * h[distance.argmin(1)]


def row_of_largest(net: Any, h: Tensor) -> Tensor:
    return h - h[h.sum(1).argmax()]


def first_row(net: Any, h: Tensor) -> Tensor:
    """Gate every sample by the first sample, and add the last one."""
    return h * torch.sigmoid(h[0]) + h[-1:]


def other_rows(net: Any, h: Tensor) -> Tensor:
    return h + h[torch.arange(h.size(0)) - 1].detach() * h


def halves(net: Any, h: Tensor) -> Tensor:
    a, b = h[: len(h) // 2], h[len(h) // 2 :]
    return torch.cat([a * 2 + b[: len(a)], b.sin()])


def even_and_odd(net: Any, h: Tensor) -> Tensor:
    even, odd = h[::2], h[1::2]
    return torch.cat([even[: len(odd)] * odd, even[len(odd) :], odd])


def split_and_joined(net: Any, h: Tensor) -> Tensor:
    """Uneven chunks that do not align with micro-batches."""
    parts = h.split([5, len(h) - 5])
    return torch.cat([net.norm(parts[1]), net.norm(parts[0])]).flip(0)


def unbound(net: Any, h: Tensor) -> Tensor:
    rows = list(h.unbind(0))
    return torch.stack([row * rows[i - 1] for i, row in enumerate(rows)])


def repeated(net: Any, h: Tensor) -> Tensor:
    """Repeat each sample three times, then the batch twice: a larger batch inside the model."""
    many = net.norm(
        h.repeat_interleave(3, dim=0) * torch.arange(1, 4, dtype=h.dtype).repeat(h.shape[0])[:, None]
    )
    return many.view(h.shape[0], 3, -1).mean(1) + net.norm(h.repeat(2, 1)).chunk(2)[1]


def masked_rows(net: Any, h: Tensor) -> Tensor:
    keep = h[:, 0] > 0
    out = torch.zeros_like(h)
    out[keep] = net.norm(h[keep])
    return out + 0.1 * h


def nonzero_rows(net: Any, h: Tensor) -> Tensor:
    rows = (h.sum(1) > 0).nonzero().squeeze(1)
    return h.index_copy(0, rows, h[rows] * h[rows].mean(0))


def index_added(net: Any, h: Tensor) -> Tensor:
    """Message passing: sum over data-dependent clusters, then gather each row's sum."""
    cluster = h[:, :4].argmax(1)
    total = torch.zeros(4, 8, dtype=h.dtype).index_add_(0, cluster, h)
    return h + total[cluster]


def scattered(net: Any, h: Tensor) -> Tensor:
    cluster = h[:, :4].argmax(1)[:, None].expand_as(h)
    largest = torch.full((4, 8), -9.0, dtype=h.dtype).scatter_reduce(0, cluster, h, "amax")
    return h + largest.gather(0, cluster)


def segments(net: Any, h: Tensor) -> Tensor:
    edges = torch.bincount(h[:, :3].argmax(1), minlength=3).cumsum(0)
    total = torch.cat([torch.zeros(1, 8, dtype=h.dtype), h.cumsum(0)])
    return h * total.index_select(0, edges).mean(0)


def running_sums(net: Any, h: Tensor) -> Tensor:
    return h.cumsum(0) / torch.arange(1, h.shape[0] + 1, dtype=h.dtype).unsqueeze(1) + h.cummax(0).values


def differences(net: Any, h: Tensor) -> Tensor:
    return F.pad(h.diff(dim=0), (0, 0, 1, 0)) + h


def transposed(net: Any, h: Tensor) -> Tensor:
    """Transpose the batch, and add a weighted mean over the samples."""
    mix = torch.softmax(torch.arange(h.shape[0], dtype=h.dtype), 0)
    return h + (h.T * mix).sum(1)


def gram(net: Any, h: Tensor) -> Tensor:
    return h + torch.softmax(h @ h.T / 3, dim=1) @ h


def gram_by_einsum(net: Any, h: Tensor) -> Tensor:
    return h + torch.einsum("if,jf,jg->ig", h, h, h) / 30


def pairs_by_broadcast(net: Any, h: Tensor) -> Tensor:
    """Broadcast (N, 1, F) against (1, N, F), as in relation networks."""
    return torch.tanh(h.unsqueeze(1) - h.unsqueeze(0)).mean(1) + h


def pairs_by_expand(net: Any, h: Tensor) -> Tensor:
    n = h.size(0)
    a, b = h.unsqueeze(1).expand(n, n, -1), h.unsqueeze(0).expand(n, n, -1)
    return net.pair(torch.cat([a, b], dim=-1).reshape(n * n, -1)).relu().view(n, n, -1).sum(1) / n


def convolution_over_batch(net: Any, h: Tensor) -> Tensor:
    return h + F.avg_pool1d(h.T[None], 3, 1, 1)[0].T


def one_to_all(net: Any, h: Tensor) -> Tensor:
    """Attention with a batch of one: the samples are its sequence."""
    return net.attend(h[None], h[None], h[None], need_weights=False)[0].squeeze(0)


def window_sums(net: Any, h: Tensor) -> Tensor:
    return F.pad(h, (0, 0, 2, 0)).unfold(0, 3, 1).sum(-1)


def padded_batch(net: Any, h: Tensor) -> Tensor:
    """Pad the batch with zeros to a multiple of 16, and drop the padding after the norm."""
    more = -h.size(0) % 16
    filled = torch.cat([h, h.new_zeros(more, h.size(1))])
    return net.norm(filled)[: h.size(0)]


def arange_weights(net: Any, h: Tensor) -> Tensor:
    place = torch.linspace(0, 1, h.shape[0], dtype=h.dtype)
    return h * place[:, None] + (
        h * torch.full_like(h, 0.5) + torch.zeros_like(h) - torch.ones_like(h[:, :1])
    )


def shuffled_norm(model: Any, batch: Any) -> Tensor:
    """MoCo's shuffled BatchNorm: shuffle the samples, and restore their order."""
    order = torch.randperm(batch["x"].shape[0])
    z = model(batch["x"][order])[torch.argsort(order)]
    return F.cross_entropy(z, batch["y"])


def several_sizes(model: Any, batch: Any) -> Tensor:
    """Two forwards with different batch sizes in one loss."""
    x = batch["x"]
    first, second = model(x), model(x[3:] * 0.5)
    return F.cross_entropy(first, batch["y"]) + second.pow(2).mean()


def labelled_and_not(model: Any, batch: Any) -> Tensor:
    """Semi-supervised loss: unlabelled samples get pseudo-labels where the model is confident."""
    z, labelled = model(batch["x"]), batch["labelled"]
    chance, guess = z.detach().softmax(1).max(1)
    each = F.cross_entropy(z, guess, reduction="none") * (chance > 0.4) * ~labelled
    return F.cross_entropy(z[labelled], batch["y"][labelled]) + each.sum() / (~labelled).sum()


def sequences_merged(net: Any, x: Tensor) -> Tensor:
    """(N, T, F) -> (N * T, F) through BatchNorm -> (N, T, F)."""
    n, t, f = x.shape
    h = net.norm(net.first(x.reshape(n * t, f))).tanh()
    return net.last(h.reshape(n, t, -1).mean(1))


def time_merged(net: Any, x: Tensor) -> Tensor:
    """`sequences_merged` with time first: the batch is the faster of the merged dimensions."""
    h = x.transpose(0, 1)
    t, n, f = h.shape
    h = net.norm(net.first(h.contiguous().view(t * n, f))).tanh()
    return net.last(h.view(t, n, -1).transpose(0, 1).mean(1))


def channels_and_batch(net: Any, x: Tensor) -> Tensor:
    """(N, C, H, W) -> (N * C, 1, H, W): one filter for all channels."""
    n, c, height, width = x.shape
    h = net.norm(net.conv(x.view(n * c, 1, height, width)))
    return net.last(h.view(n, c, *h.shape[1:]).flatten(1).tanh())


def valid_tokens(model: Any, batch: Any) -> Tensor:
    """BatchNorm over the valid tokens only; their number depends on the data."""
    h = model.words(batch["x"])
    flat = model.norm(h[batch["mask"]])
    h = torch.zeros_like(h).masked_scatter(batch["mask"][..., None].expand_as(h), flat)
    return F.cross_entropy(model.last(h.sum(1)), batch["y"])


def packed(model: Any, batch: Any) -> Tensor:
    """Packed sequences: rows are regrouped by time step."""
    h = model.words(batch["x"])
    run = nn.utils.rnn.pack_padded_sequence(h, batch["lengths"].cpu(), batch_first=True, enforce_sorted=False)
    out, _ = nn.utils.rnn.pad_packed_sequence(model.rnn(run)[0], batch_first=True)
    return F.cross_entropy(model.last(model.norm(out.sum(1))), batch["y"])


@dataclass
class Inputs:
    x: Tensor
    y: Tensor
    extra: dict[str, list[Tensor]]


class Pair(NamedTuple):
    first: Tensor
    second: tuple[Tensor, Tensor]


def as_dataclass(n: int) -> Inputs:
    return Inputs(data.normal(n, 6), data.integers(3, n), {"more": [data.normal(n, 8, seed=1)]})


def as_named_tuple(n: int) -> Pair:
    return Pair(data.normal(n, 6), (data.normal(n, 8, seed=1), data.integers(3, n)))


def of_dataclass(model: Any, batch: Inputs) -> Tensor:
    return F.cross_entropy(model(batch.x) + batch.extra["more"][0].sum(1, keepdim=True), batch.y)


def of_named_tuple(model: Any, batch: Pair) -> Tensor:
    return F.cross_entropy(model(batch.first) * batch.second[0].std(0).mean(), batch.second[1])


def of_one_tensor(model: Any, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch), batch[:, :3])


def labelled(n: int) -> dict[str, Tensor]:
    return {**data.rows(n), "labelled": torch.arange(n) % 3 != 1}


def _norm() -> nn.Module:
    return nn.BatchNorm1d(8)


def _attention() -> nn.Module:
    return nn.MultiheadAttention(8, 2, batch_first=True)


_HIDDEN: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "the batch in reverse": (flipped, {}),
    "the batch rolled": (rolled, {}),
    "rows sorted by size, and back": (sorted_by_size, {}),
    "values sorted over the batch": (sorted_values, {}),
    "top-k over the batch": (top_rows, {}),
    "nearest row": (nearest_row, {}),
    "row of the largest sum": (row_of_largest, {}),
    "first and last row": (first_row, {}),
    "the row before, detached": (other_rows, {}),
    "two halves": (halves, {}),
    "even and odd rows": (even_and_odd, {}),
    "split unevenly and joined": (split_and_joined, {"norm": _norm}),
    "unbound into rows": (unbound, {}),
    "repeated rows": (repeated, {"norm": _norm}),
    "rows by a mask": (masked_rows, {"norm": _norm}),
    "rows by nonzero": (nonzero_rows, {}),
    "sums of clusters": (index_added, {}),
    "maxima of clusters": (scattered, {}),
    "sums up to the data's edges": (segments, {}),
    "running sums over the batch": (running_sums, {}),
    "differences of neighbours": (differences, {}),
    "the batch transposed": (transposed, {}),
    "attention between samples by hand": (gram, {}),
    "attention between samples by einsum": (gram_by_einsum, {}),
    "pairs by broadcasting": (pairs_by_broadcast, {}),
    "pairs by expand": (pairs_by_expand, {"pair": lambda: nn.Linear(16, 8)}),
    "pooling over the batch": (convolution_over_batch, {}),
    "the batch as one sequence": (one_to_all, {"attend": _attention}),
    "sliding windows over the batch": (window_sums, {}),
    "filled up to a multiple of 16": (padded_batch, {"norm": _norm}),
    "weights by place in the batch": (arange_weights, {}),
}  # fmt: skip


def _apply(function: Any, **parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    return lambda: Apply(function, **{name: part() for name, part in parts.items()})


_MERGED = partial(
    _apply, norm=lambda: nn.BatchNorm1d(5), first=lambda: nn.Linear(8, 5), last=lambda: nn.Linear(5, 3)
)


def _parts(**parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    return lambda: models.Named(**{name: part() for name, part in parts.items()})


def _words() -> nn.Module:
    return nn.Embedding(11, 8)


CASES = [
    *(
        Case(
            name=name,
            build=between(function, **parts),
            data=data.rows,
            loss=cross_entropy,
            coupled=True,
            buffers="norm" in parts,
            min_n=8,
            n=23 if "norm" in parts else 15,
            microbatch=8 if "norm" in parts else 4,
        )
        for name, (function, parts) in _HIDDEN.items()
    ),
    Case(
        name="batch and features alike",
        build=between(gram),
        data=data.rows,
        loss=cross_entropy,
        coupled=True,
        n=8,
        microbatch=3,
        note="as many samples as features",
    ),
    Case(
        name="shuffled BatchNorm",
        build=models.mlp,
        data=data.rows,
        loss=shuffled_norm,
        coupled=True,
        random=True,
        buffers=True,
    ),
    Case(
        name="two batches of different sizes",
        build=models.mlp,
        data=data.rows,
        loss=several_sizes,
        coupled=True,
        buffers=True,
        n=16,
        microbatch=7,
        min_n=5,
    ),
    Case(
        name="labelled and unlabelled samples",
        build=lambda: models.mlp(norm=nn.LayerNorm),
        data=labelled,
        loss=labelled_and_not,
        coupled=True,
        n=17,
        microbatch=5,
    ),
    Case(
        name="steps merged into the batch",
        build=_MERGED(sequences_merged),
        data=data.sequences,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
    ),
    Case(
        name="steps merged into the batch, time first",
        build=_MERGED(time_merged),
        data=data.sequences,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
        n=7,
        microbatch=3,
        min_n=1,
    ),
    Case(
        name="channels merged into the batch",
        build=_apply(
            channels_and_batch,
            conv=lambda: nn.Conv2d(1, 2, 3),
            norm=lambda: nn.BatchNorm2d(2),
            last=lambda: nn.Linear(216, 3),
        ),
        data=data.images,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
        min_n=1,
    ),
    Case(
        name="BatchNorm over valid tokens",
        build=_parts(words=_words, norm=_norm, last=lambda: nn.Linear(8, 3)),
        data=data.tokens,
        loss=valid_tokens,
        coupled=True,
        buffers=True,
        min_n=1,
    ),
    Case(
        name="packed sequences",
        build=_parts(
            words=_words, rnn=lambda: nn.GRU(8, 8, batch_first=True), norm=_norm, last=lambda: nn.Linear(8, 3)
        ),
        data=data.tokens,
        loss=packed,
        coupled=True,
        buffers=True,
        n=15,
        note="the lengths are copied to the host",
    ),
    Case(
        name="a dataclass of inputs",
        build=models.mlp,
        data=as_dataclass,
        loss=of_dataclass,
        coupled=True,
        buffers=True,
    ),
    Case(
        name="a named tuple of inputs",
        build=lambda: models.mlp(norm=nn.LayerNorm),
        data=as_named_tuple,
        loss=of_named_tuple,
        coupled=True,
    ),
    Case(
        name="one tensor as the batch",
        build=models.mlp,
        data=lambda n: data.normal(n, 6),
        loss=of_one_tensor,
        coupled=True,
        buffers=True,
    ),
]
