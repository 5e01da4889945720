"""Normalization over the batch in all forms: modules, functions, by hand, partly in eval mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.torch.coupled import data, models
from tests.torch.coupled.case import Apply, Case, between
from tests.torch.coupled.zoo.architectures import cross_entropy


def three_calls() -> nn.Module:
    """One BatchNorm with a cumulative average, called three times."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.first(x)
        for _ in range(3):
            h = torch.tanh(net.norm(h)) + h
        return net.last(h)

    norm = nn.BatchNorm1d(8, momentum=None)  # pyright: ignore[reportArgumentType]  # None is documented
    return Apply(forward, first=nn.Linear(6, 8), norm=norm, last=nn.Linear(8, 3))


def partly_frozen() -> nn.Module:
    model = models.conv_net()
    model[1].eval()  # pyright: ignore[reportIndexIssue]  # a Sequential
    return model


def all_frozen() -> nn.Module:
    model = models.conv_net()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def functional(net: Any, h: Tensor) -> Tensor:
    return F.batch_norm(h, net.mean, net.var, net.gamma, None, training=True, momentum=0.3, eps=1e-3)


def functional_without_buffers(net: Any, h: Tensor) -> Tensor:
    return F.batch_norm(h, None, None, training=True)


def by_hand(net: Any, h: Tensor) -> Tensor:
    mean, var = h.mean(dim=0), h.var(dim=0, unbiased=False)
    return (h - mean) / torch.sqrt(var + 1e-5) * net.gamma


def by_sums(net: Any, h: Tensor) -> Tensor:
    """Mean and variance from sums and sums of squares, as synchronized BatchNorm computes them."""
    count = h.numel() // h.size(1)
    mean = h.sum(0) / count
    var = (h * h).sum(0) / count - mean * mean
    return (h - mean[None, :]) * torch.rsqrt(var[None, :] + 1e-5)


def by_var_mean(net: Any, h: Tensor) -> Tensor:
    var, mean = torch.var_mean(h, dim=0, keepdim=True)
    return (h - mean) * (var + 1e-5).rsqrt()


def by_std_mean(net: Any, h: Tensor) -> Tensor:
    std, mean = torch.std_mean(h, dim=0)
    return (h - mean) / (std + 1e-3)


def centred(net: Any, h: Tensor) -> Tensor:
    return h - h.mean(0)


def centred_in_all(net: Any, h: Tensor) -> Tensor:
    return (h - h.mean()) / h.std()


def largest(net: Any, h: Tensor) -> Tensor:
    return h / h.abs().max()


def smallest_and_largest(net: Any, h: Tensor) -> Tensor:
    low, high = h.amin(0), h.amax(0)
    return (h - low) / (high - low)


def quantile_clip(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        low, high = torch.quantile(h, 0.1), torch.quantile(h, 0.9)
    return h.clamp(low, high)


def median_shift(net: Any, h: Tensor) -> Tensor:
    return h - h.median(dim=0).values


def softmax_over_batch(net: Any, h: Tensor) -> Tensor:
    return h * torch.softmax(h, dim=0) * 5


def log_softmax_over_batch(net: Any, h: Tensor) -> Tensor:
    return h + F.log_softmax(h, dim=0)


def unit_over_batch(net: Any, h: Tensor) -> Tensor:
    return 3 * F.normalize(h, dim=0)


def attention_over_batch(net: Any, h: Tensor) -> Tensor:
    """Attention between samples."""
    q, k, v = net.qkv(h).chunk(3, dim=-1)
    return h + F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


def renorm(net: Any, h: Tensor) -> Tensor:
    """Batch renormalization: no gradient through r and d; running statistics updated in place."""
    mean, std = h.mean(0), h.std(0, unbiased=False) + 1e-3
    r = (std.detach() / net.std).clamp(1 / 3, 3)
    d = ((mean.detach() - net.mean) / net.std).clamp(-5, 5)
    with torch.no_grad():
        net.mean += 0.1 * (mean.detach() - net.mean)
        net.std += 0.1 * (std.detach() - net.std)
    return (h - mean) / std * r + d


def drifting_mean(net: Any, h: Tensor) -> Tensor:
    """A running mean that is updated and read in the same forward."""
    with torch.no_grad():
        net.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h - net.mean


def own_norm_of_batch(net: Any, h: Tensor) -> Tensor:
    """Gate computed from batch statistics by a linear layer."""
    summary = torch.cat([h.mean(0), h.var(0)])
    return h * torch.sigmoid(net.gate(summary))


def whitening(net: Any, h: Tensor) -> Tensor:
    centre = h - h.mean(0)
    covariance = centre.T @ centre / (h.shape[0] - 1) + 0.1 * torch.eye(8, dtype=h.dtype)
    return torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), centre.T, upper=False).T


def covariance(net: Any, h: Tensor) -> Tensor:
    return h @ torch.cov(h.T) / 4


def correlation(net: Any, h: Tensor) -> Tensor:
    return h @ torch.corrcoef(h.T)


def ghost(net: Any, h: Tensor) -> Tensor:
    """Ghost BatchNorm: each half of the batch is normalized alone."""
    return torch.cat([net.norm(part) for part in h.chunk(2)])


def in_groups(net: Any, x: Tensor) -> Tensor:
    """Minibatch standard deviation of StyleGAN: a feature map with the spread over the batch."""
    h = net.conv(x)
    spread = (h - h.mean(0, keepdim=True)).square().mean(0).add(1e-8).sqrt().mean()
    h = torch.cat([h, spread.view(1, 1, 1, 1).expand(h.shape[0], 1, h.shape[2], h.shape[3])], 1)
    return net.last(F.relu(h).flatten(1))


def instance_norm(*, track: bool) -> nn.Module:
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=track)
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


def _rows(name: str, function: Any, *, parts: dict[str, Any] | None = None, **options: Any) -> Case:
    values = {"data": data.rows, "loss": cross_entropy, "coupled": True, **options}
    return Case(name=name, build=between(function, **(parts or {})), **values)


def _gamma() -> nn.Parameter:
    return nn.Parameter(torch.ones(8))


def _norm() -> nn.Module:
    return nn.BatchNorm1d(8)


CASES = [
    Case(
        name="one BatchNorm called three times, cumulative average",
        build=three_calls,
        data=data.rows,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
    ),
    _rows(
        "F.batch_norm",
        functional,
        parts={"mean": lambda: torch.zeros(8), "var": lambda: torch.ones(8), "gamma": _gamma},
        buffers=True,
    ),
    _rows("F.batch_norm without buffers", functional_without_buffers),
    Case(
        name="BatchNorm partly in eval mode",
        build=partly_frozen,
        data=data.images,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
    ),
    Case(
        name="BatchNorm all in eval mode",
        build=all_frozen,
        data=data.images,
        loss=cross_entropy,
        coupled=False,
        min_n=1,
        note="samples are not coupled: no separate pass is needed",
    ),
    Case(
        name="BatchNorm without running statistics",
        build=lambda: nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Tanh(), nn.Linear(8, 3)
        ),
        data=data.rows,
        loss=cross_entropy,
        coupled=True,
    ),
    Case(
        name="BatchNorm without weights",
        build=lambda: nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False), nn.Tanh(), nn.Linear(8, 3)
        ),
        data=data.rows,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
    ),
    Case(
        name="BatchNorm of the inputs",
        build=lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)),
        data=data.rows,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
    ),
    Case(
        name="BatchNorm1d over channels and steps",
        build=lambda: nn.Sequential(
            nn.Conv1d(4, 5, 3), nn.BatchNorm1d(5), nn.Tanh(), nn.Flatten(), nn.Linear(50, 3)
        ),
        data=data.signals,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
    ),
    Case(
        name="BatchNorm3d",
        build=lambda: nn.Sequential(
            nn.Unflatten(1, (1, 3)),
            nn.Conv3d(1, 2, 2),
            nn.BatchNorm3d(2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(196, 3),
        ),
        data=data.images,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
    ),
    _rows("mean and variance by hand", by_hand, parts={"gamma": _gamma}),
    _rows("mean and variance by sums", by_sums),
    _rows("torch.var_mean over the batch", by_var_mean),
    _rows("torch.std_mean over the batch", by_std_mean),
    _rows("centred", centred),
    _rows("centred over all elements", centred_in_all),
    _rows("divided by the largest element", largest),
    _rows("scaled between smallest and largest", smallest_and_largest),
    _rows("clipped at quantiles", quantile_clip),
    _rows("shifted by the median", median_shift),
    _rows("softmax over the batch", softmax_over_batch),
    _rows("log-softmax over the batch", log_softmax_over_batch),
    _rows("unit length over the batch", unit_over_batch),
    _rows("attention over the batch", attention_over_batch, parts={"qkv": lambda: nn.Linear(8, 24)}),
    _rows(
        "batch renormalisation",
        renorm,
        parts={"mean": lambda: torch.zeros(8), "std": lambda: torch.ones(8)},
        buffers=True,
    ),
    _rows(
        "running mean used in the same forward",
        drifting_mean,
        parts={"mean": lambda: torch.zeros(8)},
        buffers=True,
    ),
    _rows("gate made of batch statistics", own_norm_of_batch, parts={"gate": lambda: nn.Linear(16, 8)}),
    _rows("whitening by Cholesky", whitening),
    _rows("covariance over the batch", covariance),
    _rows("correlation over the batch", correlation),
    _rows("ghost BatchNorm", ghost, parts={"norm": _norm}, buffers=True, min_n=4, n=16, microbatch=6),
    Case(
        name="minibatch standard deviation",
        build=lambda: Apply(in_groups, conv=nn.Conv2d(3, 4, 3, stride=2), last=nn.Linear(45, 3)),
        data=data.images,
        loss=cross_entropy,
        coupled=True,
    ),
    Case(
        name="InstanceNorm",
        build=lambda: instance_norm(track=False),
        data=data.images,
        loss=cross_entropy,
        coupled=False,
        min_n=1,
    ),
    Case(
        name="InstanceNorm with running statistics",
        build=lambda: instance_norm(track=True),
        data=data.images,
        loss=cross_entropy,
        coupled=False,
        buffers=True,
        min_n=1,
        note="only the running statistics couple samples",
    ),
]
