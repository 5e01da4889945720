"""Operators that move, merge, split or join dimensions, including the batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.torch.coupled.operator_case import N, ints, operator, real


def _merged(x: Tensor) -> Tensor:
    b, t, f = x.shape
    return (x.reshape(b * t, f) * torch.arange(b * t, dtype=x.dtype)[:, None]).reshape(b, t, f)


def _merged_second(x: Tensor) -> Tensor:
    """Merge two dimensions; the batch is the faster one."""
    b, t, f = x.shape
    y = x.transpose(0, 1).reshape(t * b, f)
    return (y.cumsum(1)).view(t, b, f).transpose(0, 1)


def _split_batch(x: Tensor) -> Tensor:
    return x[: len(x) // 2 * 2].view(2, -1, 3).sin().sum(0)


def _windows(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    y = x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).contiguous().view(-1, 4, c)
    y = y.softmax(1).view(n, h // 2, w // 2, 2, 2, c)
    return y.permute(0, 5, 1, 3, 2, 4).reshape(n, c, h, w)


_MOVED = [
    operator("transpose and back", lambda x: (x.transpose(0, 1) * 2).transpose(0, 1), real(N, 3, 4)),
    operator("transpose", lambda x: x.transpose(0, 2).sin(), real(N, 3, 4)),
    operator("transpose of features", lambda x: x.transpose(1, 2).exp(), real(N, 3, 4)),
    operator("t and T", lambda x: (x.t().sin(), x.T * 2), real(N, 3)),
    operator("mT and adjoint", lambda x: x.mT + x.adjoint(), real(N, 3, 4)),
    operator("permute", lambda x: x.permute(2, 0, 1).cos(), real(N, 3, 4)),
    operator("movedim", lambda x: torch.movedim(x, 0, -1).cos(), real(N, 3, 4)),
    operator("swapaxes", lambda x: x.swapaxes(0, 1).cos(), real(N, 3, 4)),
    operator("transposed, then with samples", lambda x, y: x.T * y[None, :, 0], real(N, 3), real(N, 2)),
    operator("transposed, then softmax over the batch", lambda x: x.T.softmax(1), real(N, 3)),
    operator("transposed, then sum over the batch", lambda x: x.transpose(0, 1).sum(1), real(N, 3, 4)),
    operator("transposed, then mean over features", lambda x: x.permute(1, 0, 2).mean((0, 2)), real(N, 3, 4)),
    operator("contiguous", lambda x: x.permute(1, 2, 0).contiguous().view(12, -1), real(N, 3, 4)),
    operator("reshape of features", lambda x: x.reshape(x.shape[0], 12) + x.view(-1, 12), real(N, 3, 4)),
    operator("view of -1", lambda x: x.view(x.size(0), -1, 2, 2).sin(), real(N, 3, 4)),
    operator(
        "view of no rows", lambda x: x.transpose(0, 1)[:0].reshape(2, -1, 3).sum(1) + x[0], real(N, 2, 3)
    ),
    operator("view_copy of a transposed batch", lambda x: torch.view_copy(x.T, (-1, 2, 2)), real(N, 4)),
    operator("flatten", lambda x: x.flatten(1) + torch.flatten(x, 1, -1), real(N, 3, 4)),
    operator("flatten of all", lambda x: x.flatten() * torch.arange(x.numel(), dtype=x.dtype), real(N, 3)),
    operator("unflatten", lambda x: x.unflatten(1, (2, 2)).sin(), real(N, 4)),
    operator("merge and split the batch", _merged, real(N, 3, 4)),
    operator("merge the batch as the second", _merged_second, real(N, 3, 4)),
    operator("flatten(0, 1)", lambda x: x.flatten(0, 1).cumsum(1).unflatten(0, (-1, 3)), real(N, 3, 4)),
    operator("split the batch in two", _split_batch, real(N, 3), min_n=2),
    operator("windows of images", _windows, real(N, 2, 4, 4)),
    operator("unsqueeze", lambda x: (x.unsqueeze(0).sin(), x.unsqueeze(1).cos(), x[..., None]), real(N, 3)),
    operator("unsqueeze and squeeze", lambda x: (x.unsqueeze(0) * 2).squeeze(0), real(N, 3)),
    operator("squeeze of a feature", lambda x: x.squeeze(1).sin(), real(N, 1, 3)),
    operator("squeeze", lambda x: x.squeeze().sin(), real(N, 1, 3, 1)),
    operator("expand of features", lambda x: x.unsqueeze(1).expand(-1, 5, -1).sin(), real(N, 3)),
    operator("expand before the batch", lambda x: x.expand(5, *x.shape).sin().sum(0), real(N, 3)),
    operator("expand to the batch", lambda x, w: w.expand(x.shape[0], -1) * x, real(N, 3), real(1, 3)),
    operator("expand_as", lambda x, w: w.expand_as(x) + x, real(N, 3), real(3)),
    operator("repeat", lambda x: x.repeat(1, 2) + x.tile(2), real(N, 3)),
    operator("repeat of the batch", lambda x: x.repeat(2, 1).cumsum(1), real(N, 3)),
    operator("tile without elements", lambda x: x[:, :0].tile(2, 1).sum(1) + x.tile(2, 1).sum(1), real(N, 3)),
    operator("tile no times", lambda x: (x.tile(0, 1), x.tile(0, 2).sum(0) + x.sum()), real(N, 3)),
    operator("repeat_interleave", lambda x: x.repeat_interleave(3, dim=0).cumsum(1), real(N, 3)),
    operator("repeat_interleave of features", lambda x: x.repeat_interleave(3, dim=1), real(N, 3)),
    operator("broadcast_tensors", lambda x, w: torch.broadcast_tensors(x, w), real(N, 1, 3), real(2, 1)),
    operator("pairs", lambda x: (x[:, None] - x[None]).abs().sum(-1), real(N, 3)),
    operator("pairs of two", lambda x, y: (x.unsqueeze(1) * y.unsqueeze(0)).sum(2), real(N, 3), real(N, 3)),
    operator("pairs of labels", lambda y: y.view(-1, 1) == y.view(1, -1), ints(3, N)),
    operator(
        "diagonal of features", lambda x: x.diagonal(dim1=1, dim2=2) + x[:, :3, :3].sum(1), real(N, 3, 4)
    ),
    operator("diagonal of pairs", lambda x: torch.diagonal(x @ x.T) + (x @ x.T).diag(), real(N, 3)),
    operator("diag_embed", lambda x: torch.diag_embed(x), real(N, 3)),
    operator("triu and tril", lambda x: (x.triu(1), x.tril()), real(N, 3, 4)),
    operator("triu of pairs", lambda x: (x @ x.T).triu(1), real(N, 3)),
    operator("flip of features", lambda x: x.flip(1) + x.fliplr(), real(N, 3)),
    operator("flip of the batch", lambda x: x.flip(0) + torch.flipud(x), real(N, 3)),
    operator("roll of features", lambda x: x.roll(2, 1), real(N, 3)),
    operator("roll of the batch", lambda x: torch.roll(x, 1, 0), real(N, 3)),
    operator("rot90 of features", lambda x: torch.rot90(x, 1, (1, 2)), real(N, 3, 4)),
    operator("unfold of features", lambda x: x.unfold(1, 2, 1), real(N, 4)),
    operator("as_strided of none", lambda x: x.view_as(x).reshape(x.shape), real(N, 4)),
    operator("view_copy", lambda x: torch.view_copy(x, (-1, 2, 2)).sin(), real(N, 4)),
    operator(
        "_reshape_alias",
        lambda x: torch.ops.aten._reshape_alias(x, [len(x), 2, 3], [6, 3, 1]).sin(),
        real(N, 6),
    ),
    operator("lift_fresh", lambda x: torch.ops.aten.lift_fresh(x.detach()) * x, real(N, 3)),
    operator("alias", lambda x: torch.ops.aten.alias(x) * x, real(N, 3)),
    operator("meshgrid", lambda x: torch.meshgrid(x[:, 0], x[:, 0], indexing="ij"), real(N, 2)),
    operator("outer", lambda x: torch.outer(x[:, 0], x[:, 1]), real(N, 2)),
    operator(
        "block_diag of features", lambda x: torch.block_diag(x.sum(0)[None], x.mean(0)[None]), real(N, 2)
    ),
]

_JOINED = [
    operator("cat of features", lambda x, y: torch.cat([x, y], 1), real(N, 3), real(N, 2)),
    operator("cat of the batch", lambda x, y: torch.cat([x, y]).cumsum(1), real(N, 3), real(N, 3)),
    operator("cat with a plain tensor", lambda x, y: torch.cat([x, y]), real(N, 3), real(5, 3)),
    operator("cat and chunk", lambda x, y: torch.cat([x, y]).sin().chunk(2), real(N, 3), real(N, 3)),
    operator("cat of transposed", lambda x, y: torch.cat([x.T, y.T], 1).sin(), real(N, 3), real(N, 3)),
    operator("stack of features", lambda x, y: torch.stack([x, y], 1), real(N, 3), real(N, 3)),
    operator("stack in front", lambda x, y: torch.stack([x, y]).sum(0), real(N, 3), real(N, 3)),
    operator("stack at the end", lambda x, y: torch.stack([x, y], -1), real(N, 3), real(N, 3)),
    operator(
        "hstack, vstack, dstack",
        lambda x, y: (torch.hstack([x, y]), torch.vstack([x, y]), torch.dstack([x, y])),
        real(N, 3),
        real(N, 3),
    ),
    operator("chunk of features", lambda x: x.chunk(2, 1), real(N, 4)),
    operator("chunk of the batch", lambda x: x.chunk(2), real(N, 3), min_n=2),
    operator("split of features", lambda x: x.split([1, 3], 1), real(N, 4)),
    operator("split of the batch", lambda x: x.split(2)[0].sin(), real(N, 4), min_n=2),
    operator(
        "tensor_split", lambda x: (*torch.tensor_split(x, 3, 1), *x.tensor_split(2)), real(N, 4), min_n=2
    ),
    operator("unsafe_split of features", lambda x: torch.unsafe_split(x, 2, 1), real(N, 4)),
    operator(
        "unsafe_split_with_sizes of features",
        lambda x: torch.unsafe_split_with_sizes(x, [1, 3], 1),
        real(N, 4),
    ),
    operator("unbind of features", lambda x: x.unbind(1), real(N, 3)),
    operator("unbind of the batch", lambda x: torch.stack(x.unbind(0), 1), real(N, 3)),
    operator("pad of features", lambda x: F.pad(x, (1, 2), value=0.5), real(N, 3)),
    operator("pad of the batch", lambda x: F.pad(x, (0, 0, 1, 2)), real(N, 3)),
    operator("pad, reflected", lambda x: F.pad(x, (1, 2, 1, 1), mode="reflect"), real(N, 2, 4, 4)),
    operator("pad of signals, reflected", lambda x: F.pad(x, (1, 2), mode="reflect"), real(N, 2, 4)),
    operator(
        "pad of volumes, reflected",
        lambda x: F.pad(x, (1, 0, 1, 1, 0, 1), mode="reflect"),
        real(N, 1, 2, 3, 2),
    ),
    operator(
        "pad of images, replicated", lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate"), real(N, 2, 3, 4)
    ),
    operator(
        "pad of volumes, replicated",
        lambda x: F.pad(x, (1, 0, 1, 1, 0, 1), mode="replicate"),
        real(N, 1, 2, 3, 2),
    ),
    operator("pad, replicated", lambda x: F.pad(x, (1, 2), mode="replicate"), real(N, 2, 4)),
    operator("pad, circular", lambda x: F.pad(x, (1, 2), mode="circular"), real(N, 2, 4)),
    operator("pad cut", lambda x: F.pad(x, (-1, 1)), real(N, 4)),
]

OPERATORS = [*_MOVED, *_JOINED]
