"""Operators that write into their input, or into a view of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.torch.coupled import data
from tests.torch.coupled.case import Apply, Case, between
from tests.torch.coupled.zoo.architectures import cross_entropy


def arithmetic(net: Any, h: Tensor) -> Tensor:
    h = net.norm(h)
    h += 0.5
    h *= 2
    h.add_(h.detach(), alpha=0.1).mul_(0.3).sub_(1).neg_()
    return h


def residual(net: Any, h: Tensor) -> Tensor:
    out = net.norm(h)
    out += h
    return F.relu_(out)


def modules(net: Any, h: Tensor) -> Tensor:
    for act in (nn.ReLU(inplace=True), nn.LeakyReLU(0.2, inplace=True), nn.SiLU(inplace=True)):
        h = act(net.norm(h))
    return F.hardtanh_(h, -0.5, 2.0)


def clamped(net: Any, h: Tensor) -> Tensor:
    return net.norm(h).clamp_(min=-1.0).clamp_max_(1.5)


def filled(net: Any, h: Tensor) -> Tensor:
    h = net.norm(h)
    h.masked_fill_(h > 1, 0.5)
    return h.clone().masked_fill_(torch.eye(8, dtype=torch.bool)[0], -1.0)


def shifted_by_batch(net: Any, h: Tensor) -> Tensor:
    """Write in place with statistics of the written tensor."""
    h = h.clone()
    h -= h.mean(0, keepdim=True)
    h /= h.detach().std(0) + 0.1
    return h


def written_columns(net: Any, h: Tensor) -> Tensor:
    h = net.norm(h)
    h[:, 0] = 0.0
    h[:, 1] *= 3
    h[..., 2:4] = h[..., 4:6].tanh()
    h[:, [5, 6]] += 1.0
    return h


def written_rows(net: Any, h: Tensor) -> Tensor:
    h = net.norm(h)
    h[0] = 0.0
    h[2:5] *= 3
    h[-1] = h[1].detach()
    return h


def written_mask(net: Any, h: Tensor) -> Tensor:
    h = net.norm(h)
    h[h < -1] = -1.0
    h[h[:, 0] > 1] *= 0.5
    return h


def written_view(net: Any, h: Tensor) -> Tensor:
    """Write through views, then read the base."""
    h = net.norm(h)
    part = h.view(-1, 2, 4)
    part[:, 1].mul_(2.0)
    h.narrow(1, 0, 2).add_(1.0)
    h.t()[3].zero_()
    return h


def written_base(net: Any, h: Tensor) -> Tensor:
    """Write into the base, then read the view."""
    h = net.norm(h).clone()
    part = h[:, 2:6]
    h.mul_(2.0)
    return torch.cat([part, h[:, :4]], 1)


def written_chunks(net: Any, h: Tensor) -> Tensor:
    normed = net.norm(h)
    h = normed.clone()
    a, b = torch.tensor_split(h, 2, dim=1)
    a.add_(1.0)
    b.copy_(normed[:, :4].sin())
    return h


def filled_up(net: Any, h: Tensor) -> Tensor:
    """Fill an empty output column by column."""
    out = torch.empty_like(h)
    normed = net.norm(h)
    for column in range(8):
        out[:, column] = normed[:, column] * (column + 1) / 8
    return out


def filled_rows(net: Any, h: Tensor) -> Tensor:
    """Fill an output row by row, over the batch."""
    out = h.new_zeros(h.shape)
    for row in range(h.shape[0]):
        out[row] = h[row] - h[row - 1]
    return out


def accumulated(net: Any, h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for scale in (0.5, 1.0, 2.0):
        out += torch.tanh(net.norm(h) * scale)
    return out


def scattered(net: Any, h: Tensor) -> Tensor:
    order = h.argsort(1)
    out = torch.zeros_like(h).scatter_(1, order, net.norm(h))
    return out.scatter_add_(1, order[:, :3], h[:, :3]).index_add_(1, torch.tensor([0, 5]), h[:, 6:])


def copied(net: Any, h: Tensor) -> Tensor:
    out = torch.zeros(h.shape, dtype=h.dtype)
    out.copy_(net.norm(h))
    out.add_(h, alpha=0.5)
    return out.index_fill_(1, torch.tensor([3]), 0.1)


def addcmul(net: Any, h: Tensor) -> Tensor:
    h = net.norm(h)
    return (
        torch.zeros_like(h).addcmul_(h, h.detach(), value=0.5).addcdiv_(h, h.detach().abs() + 1).lerp_(h, 0.2)
    )


def pre_activation(net: Any, x: Tensor) -> Tensor:
    """Pre-activation ResNet: the in-place ReLU overwrites the output of BatchNorm."""
    h = net.conv(x)
    for norm in (net.norm1, net.norm2):
        h = h + net.inner(F.relu(norm(h), inplace=True))
    return net.last(h.mean((2, 3)))


def inputs_written(net: Any, x: Tensor) -> Tensor:
    """Normalize a copy of the input in place."""
    x = x.clone()
    x.sub_(x.mean((0, 2, 3), keepdim=True)).div_(x.std((0, 2, 3), keepdim=True))
    return net.last(net.conv(x).relu_().mean((2, 3)))


def _norm() -> nn.Module:
    return nn.BatchNorm1d(8)


_ALONE: dict[str, Callable[..., Any]] = {
    "in place by a statistic of the batch": shifted_by_batch,
    "rows filled one by one": filled_rows,
}
_NORMED: dict[str, Callable[..., Any]] = {
    "in-place arithmetic": arithmetic,
    "in-place residual": residual,
    "in-place activations": modules,
    "in-place clamp": clamped,
    "in-place fill": filled,
    "columns written": written_columns,
    "rows written": written_rows,
    "masks written": written_mask,
    "a view written": written_view,
    "a base written": written_base,
    "chunks written": written_chunks,
    "columns filled one by one": filled_up,
    "accumulated in place": accumulated,
    "scattered in place": scattered,
    "copied in place": copied,
    "addcmul, addcdiv and lerp in place": addcmul,
}


def _case(name: str, build: Callable[[], nn.Module], **options: Any) -> Case:
    values: dict[str, Any] = {"data": data.rows, "buffers": True, **options}
    return Case(name=name, build=build, loss=cross_entropy, coupled=True, **values)


CASES = [
    *(_case(name, between(function), buffers=False, min_n=6) for name, function in _ALONE.items()),
    *(
        _case(name, between(function, norm=_norm), min_n=6, n=18, microbatch=7)
        for name, function in _NORMED.items()
    ),
    _case(
        "pre-activation ResNet, in place",
        lambda: Apply(
            pre_activation,
            conv=nn.Conv2d(3, 4, 3),
            inner=nn.Conv2d(4, 4, 3, padding=1),
            norm1=nn.BatchNorm2d(4),
            norm2=nn.BatchNorm2d(4),
            last=nn.Linear(4, 3),
        ),
        data=data.images,
    ),
    _case(
        "inputs normalised in place",
        lambda: Apply(inputs_written, conv=nn.Conv2d(3, 4, 3), last=nn.Linear(4, 3)),
        data=data.images,
        buffers=False,
    ),
]
