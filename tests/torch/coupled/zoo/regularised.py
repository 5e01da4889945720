"""Parametrized weights, routing, drop-path, control flow: mostly effects per batch, not per sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.torch.coupled import data, models
from tests.torch.coupled.case import Apply, Case, between
from tests.torch.coupled.zoo.architectures import cross_entropy


def spectral(kind: Any, *, norm: bool) -> nn.Module:
    """Spectral norm by power iteration, which updates a buffer once per forward."""
    layers = [
        kind(nn.Linear(6, 8)),
        nn.BatchNorm1d(8) if norm else nn.Identity(),
        nn.Tanh(),
        kind(nn.Linear(8, 3)),
    ]
    return nn.Sequential(*layers)


def spectral_conv() -> nn.Module:
    conv = parametrizations.spectral_norm(nn.Conv2d(3, 4, 3), n_power_iterations=2)
    return nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


def weight_norm() -> nn.Module:
    # BatchNorm cancels the norm of the weights, except for eps: a large eps keeps its gradient.
    first = parametrizations.weight_norm(nn.Linear(6, 8))
    return nn.Sequential(
        first, nn.BatchNorm1d(8, eps=0.1), nn.Tanh(), parametrizations.weight_norm(nn.Linear(8, 3), dim=1)
    )


def orthogonal() -> nn.Module:
    turn = parametrizations.orthogonal(nn.Linear(6, 6))
    return nn.Sequential(turn, nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def standardised(net: Any, x: Tensor) -> Tensor:
    """Weight standardization: statistics of the weights, not of the batch."""
    weight = net.conv.weight
    mean, std = weight.mean((1, 2, 3), keepdim=True), weight.std((1, 2, 3), keepdim=True)
    return net.last(F.relu(F.group_norm(F.conv2d(x, (weight - mean) / std, net.conv.bias), 2)).mean((2, 3)))


def dynamic_weights(net: Any, h: Tensor) -> Tensor:
    """A weight matrix for each sample, computed from the sample."""
    return torch.bmm(net.weights(h).view(-1, 8, 8), h.unsqueeze(2)).squeeze(2)


def weight_of_batch(net: Any, h: Tensor) -> Tensor:
    """One weight matrix for all samples, computed from the mean of the batch."""
    return F.linear(h, net.weights(h.mean(0)).view(8, 8))


class Experts(nn.Module):
    """Switch transformer: one expert per sample; capacity is filled in batch order."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.capacity = capacity
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        chances = F.softmax(self.gate(x), dim=-1)
        chance, expert = chances.max(dim=-1)
        chosen = F.one_hot(expert, 3).to(x.dtype)
        place = (chosen.cumsum(0) * chosen).sum(-1)
        kept = (place <= self.capacity).to(x.dtype)
        self.balance = 3 * (chosen.mean(0) * chances.mean(0)).sum()
        out = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (out * chosen.unsqueeze(-1)).sum(1) * (chance * kept).unsqueeze(-1)


class RoutedExperts(nn.Module):
    """Top-2 experts, each run on the rows routed to it (as in Mixtral's reference)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 5), nn.SiLU(), nn.Linear(5, 3)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(F.softmax(self.gate(x), dim=1), 2, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        mask = F.one_hot(chosen, num_classes=3).permute(2, 1, 0)
        out = torch.zeros(x.shape[0], 3, dtype=x.dtype, device=x.device)
        for index, expert in enumerate(self.experts):
            place, row = torch.where(mask[index])
            out.index_add_(0, row, expert(x[row]) * weights[row, place, None])
        return out


def balanced(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"]) + 0.5 * model.balance


def expert_choice(net: Any, h: Tensor) -> Tensor:
    """Experts choose samples by top-k over the batch."""
    scores = F.softmax(net.gate(h), dim=-1)
    value, row = torch.topk(scores.t(), 5, dim=-1)
    out = h.clone()
    for index in range(2):
        out = out.index_add(0, row[index], torch.tanh(h[row[index]]) * value[index][:, None])
    return out


class Blocks(nn.Module):
    """Residual blocks, dropped at random: one draw for the batch (`whole`), or one for each sample."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)
        )
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            if self.whole:
                if torch.rand(1).item() < 0.7:
                    h = h + block(h) / 0.7
            else:
                h = h + models.drop_path(block(h), 0.3)
        return self.last(h)


def branch_on_maximum(net: Any, h: Tensor) -> Tensor:
    if h.abs().max() > 2:
        return h * 2 / h.abs().max().detach()
    return torch.tanh(h)


def branch_on_mean(net: Any, h: Tensor) -> Tensor:
    return h.exp() if h.mean().item() > 0 else h.sin()


def loop_until_small(net: Any, h: Tensor) -> Tensor:
    """Iterate as often as the largest row needs."""
    while bool((h.norm(dim=1) > 1.5).any()):
        h = h * 0.7 + 0.1 * torch.tanh(h)
    return h


def fixed_point(net: Any, h: Tensor) -> Tensor:
    """Deep equilibrium: iterate to convergence without gradients, then one step with gradients."""
    with torch.no_grad():
        z = torch.zeros_like(h)
        for _ in range(50):
            new = torch.tanh(0.2 * net.inner(z) + h)
            if (new - z).norm() < 1e-6:
                break
            z = new
    return torch.tanh(0.2 * net.inner(z) + h)


def halting(net: Any, h: Tensor) -> Tensor:
    """Adaptive computation: finished rows stop changing."""
    total = torch.zeros(h.shape[0], dtype=h.dtype)
    for _ in range(4):
        running = total < 0.9
        if not running.any():
            break
        chance = torch.sigmoid(net.halt(h)).squeeze(-1) * running
        total = total + chance
        h = torch.where(running[:, None], torch.tanh(net.inner(h)) + h * chance[:, None], h)
    return h


def mixup(model: Any, batch: Any) -> Tensor:
    order = torch.randperm(batch["x"].size(0))
    share = torch.distributions.Beta(1.0, 1.0).sample().item()
    z = model(share * batch["x"] + (1 - share) * batch["x"][order])
    return share * F.cross_entropy(z, batch["y"]) + (1 - share) * F.cross_entropy(z, batch["y"][order])


def mixup_by_flip(model: Any, batch: Any) -> Tensor:
    """Mixup of timm: the partner is the reversed batch."""
    x, y = batch["x"], F.one_hot(batch["y"], 3).to(batch["x"].dtype)
    return F.cross_entropy(model(0.7 * x + 0.3 * x.flip(0)), 0.7 * y + 0.3 * y.flip(0))


def cutmix(model: Any, batch: Any) -> Tensor:
    x = batch["x"].clone()
    x[:, :, 2:5, 3:7] = x.flip(0)[:, :, 2:5, 3:7]
    share = 1 - 12 / 64
    z = model(x)
    return share * F.cross_entropy(z, batch["y"]) + (1 - share) * F.cross_entropy(z, batch["y"].flip(0))


def manifold_mixup(net: Any, h: Tensor) -> Tensor:
    return 0.8 * h + 0.2 * h.roll(shifts=1, dims=0)


def tied_autoencoder(model: Any, batch: Any) -> Tensor:
    """Autoencoder whose decoder weight is the transposed encoder weight."""
    code = torch.tanh(model.norm(model.first(batch["x"])))
    return F.mse_loss(F.linear(code, model.first.weight.t()), batch["x"])


def sparse_code(model: Any, batch: Any) -> Tensor:
    """Penalty on the mean activation over the batch."""
    code = torch.sigmoid(model.first(batch["x"]))
    mean = code.mean(0)
    penalty = (0.1 * torch.log(0.1 / mean) + 0.9 * torch.log(0.9 / (1 - mean))).sum()
    return F.cross_entropy(model.last(code), batch["y"]) + 0.3 * penalty


def sparse_winners(net: Any, h: Tensor) -> Tensor:
    """Winner takes all: each feature keeps its largest third over the batch."""
    bar = h.topk(max(h.shape[0] // 3, 1), dim=0).values[-1:]
    return h * (h >= bar)


def _rows(name: str, build: Any, **options: Any) -> Case:
    values: dict[str, Any] = {"data": data.rows, "loss": cross_entropy, "coupled": True, **options}
    return Case(name=name, build=build, **values)


def _experts(capacity: int) -> Any:
    return lambda: Experts(capacity)


CASES = [
    _rows(
        "spectral norm",
        lambda: spectral(parametrizations.spectral_norm, norm=False),
        buffers=True,
        min_n=1,
        note="only the power iteration couples samples: it runs once per forward",
    ),
    _rows(
        "spectral norm and BatchNorm",
        lambda: spectral(parametrizations.spectral_norm, norm=True),
        buffers=True,
    ),
    _rows(
        "old spectral norm and BatchNorm", lambda: spectral(nn.utils.spectral_norm, norm=True), buffers=True
    ),
    _rows("spectral norm of a convolution", spectral_conv, data=data.images, buffers=True),
    _rows("weight norm and BatchNorm", weight_norm, buffers=True),
    _rows("orthogonal weights and BatchNorm", orthogonal, buffers=True),
    _rows(
        "standardised weights",
        lambda: Apply(standardised, conv=nn.Conv2d(3, 4, 3), last=nn.Linear(4, 3)),
        data=data.images,
        coupled=False,
        min_n=1,
    ),
    _rows(
        "weights made from the sample",
        between(dynamic_weights, weights=lambda: nn.Linear(8, 64)),
        coupled=False,
        min_n=1,
    ),
    _rows("weights made from the batch", between(weight_of_batch, weights=lambda: nn.Linear(8, 64)), min_n=1),
    _rows("experts with capacity and balance", _experts(4), loss=balanced, n=26, microbatch=6, min_n=1),
    _rows("experts with balance alone", _experts(100), loss=balanced, min_n=1),
    _rows(
        "experts with rows of their own",
        RoutedExperts,
        coupled=False,
        min_n=1,
        n=18,
        note="the number of rows of an expert depends on the data",
    ),
    _rows(
        "experts that choose their samples",
        between(expert_choice, gate=lambda: nn.Linear(8, 2)),
        n=17,
        microbatch=6,
        min_n=5,
    ),
    _rows(
        "drop-path, one coin for the batch",
        lambda: Blocks(whole=True),
        random=True,
        buffers=True,
        without_gradient=tuple(f"blocks.2.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")),
    ),
    _rows("drop-path, one coin for each sample", lambda: Blocks(whole=False), random=True, buffers=True),
    _rows("branch on the largest activation", between(branch_on_maximum)),
    _rows("branch on the mean activation", between(branch_on_mean), microbatch=3),
    _rows("loop until all rows are small", between(loop_until_small)),
    _rows(
        "fixed point",
        between(fixed_point, inner=lambda: nn.Linear(8, 8)),
        coupled=False,
        tolerance=1e-11,
        min_n=1,
    ),
    _rows(
        "adaptive computation",
        between(halting, inner=lambda: nn.Linear(8, 8), halt=lambda: nn.Linear(8, 1)),
        coupled=False,
        min_n=1,
        note="where() keeps finished rows unchanged",
    ),
    _rows("mixup", lambda: models.mlp(norm=nn.LayerNorm), loss=mixup, random=True),
    _rows("mixup with the reversed batch", lambda: models.mlp(norm=nn.LayerNorm), loss=mixup_by_flip),
    _rows("CutMix", models.conv_net, data=data.images, loss=cutmix, buffers=True),
    _rows("manifold mixup", between(manifold_mixup)),
    _rows(
        "tied autoencoder",
        lambda: Apply(tied_autoencoder, first=nn.Linear(6, 4), norm=nn.BatchNorm1d(4)),
        loss=tied_autoencoder,
        buffers=True,
    ),
    _rows(
        "penalty on mean activations",
        lambda: models.Named(first=nn.Linear(6, 8), last=nn.Linear(8, 3)),
        loss=sparse_code,
        min_n=1,
    ),
    _rows("winners over the batch", between(sparse_winners)),
]
