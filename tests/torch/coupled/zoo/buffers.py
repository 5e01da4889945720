"""State written by the forward: queues, memory banks, centres, weight averages, codebooks, observers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.torch.coupled import data, losses, models
from tests.torch.coupled.case import Case, between
from tests.torch.coupled.zoo.architectures import cross_entropy


class Momentum(nn.Module):
    """MoCo: a momentum key encoder and a queue of keys."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.query = models.encoder(norm)
        self.key = models.encoder(norm).requires_grad_(requires_grad=False)
        self.register_buffer("queue", F.normalize(torch.randn(5, 40), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.queue: Tensor
        self.place: Tensor

    @torch.no_grad()
    def _push(self, keys: Tensor) -> None:
        n, place = keys.shape[0], int(self.place)
        self.queue[:, place : place + n] = keys.T
        self.place[0] = (place + n) % 40

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        q = F.normalize(self.query(x1), dim=1)
        with torch.no_grad():
            for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                ours.mul_(0.9).add_(theirs, alpha=0.1)
            k = F.normalize(self.key(x2), dim=1)
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / 0.2
        self._push(k)
        return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


def of_views(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x1"], batch["x2"])


class Centred(nn.Module):
    """DINO: the forward updates a moving average that centres the teacher's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.student = models.mlp(norm=nn.LayerNorm)
        self.teacher = models.mlp(norm=nn.LayerNorm).requires_grad_(requires_grad=False)
        self.register_buffer("centre", torch.zeros(1, 3))
        self.centre: Tensor

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        student = F.log_softmax(self.student(torch.cat([x1, x2])) / 0.3, dim=-1).chunk(2)
        with torch.no_grad():
            out = self.teacher(torch.cat([x1, x2]))
            self.centre = self.centre * 0.9 + out.sum(dim=0, keepdim=True) / len(out) * 0.1
            teacher = F.softmax((out - self.centre) / 0.1, dim=-1).chunk(2)
        first = torch.sum(-teacher[0] * student[1], dim=-1).mean()
        return (first + torch.sum(-teacher[1] * student[0], dim=-1).mean()) / 2


class Bank(nn.Module):
    """Instance discrimination: a memory bank with one embedding per sample of the data set."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 5)
        self.register_buffer("bank", F.normalize(torch.randn(40, 5)))
        self.bank: Tensor

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        z = F.normalize(self.encode(x))
        logits = z @ self.bank.clone().T / 0.2
        with torch.no_grad():
            self.bank[index] = F.normalize(0.5 * self.bank[index] + 0.5 * z)
        return F.cross_entropy(logits, index)


def indexed(n: int) -> dict[str, Tensor]:
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))[:n]
    return {"x": data.normal(n, 6), "index": order}


def of_index(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"], batch["index"])


class Codebook(nn.Module):
    """VQ-VAE; the codebook is learnt, or follows the means of the vectors assigned to its entries."""

    def __init__(self, *, learnt: bool) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(4, 6)
        codes = torch.randn(5, 4)
        self.learnt = learnt
        self.codes: Tensor
        if learnt:
            self.codes = nn.Parameter(codes)
        else:
            self.register_buffer("codes", codes)
            self.register_buffer("counts", torch.ones(5))
            self.register_buffer("sums", codes.clone())
        self.counts: Tensor
        self.sums: Tensor

    def _follow(self, z: Tensor, chosen: Tensor) -> None:
        one_hot = F.one_hot(chosen, 5).type(z.dtype)
        self.counts.data.mul_(0.8).add_(one_hot.sum(0), alpha=0.2)
        self.sums.data.mul_(0.8).add_(one_hot.t() @ z.detach(), alpha=0.2)
        self.codes.data.copy_(self.sums / self.counts.unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        distance = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.codes.t() + self.codes.pow(2).sum(1)
        chosen = distance.argmin(dim=1)
        code = F.embedding(chosen, self.codes.clone())
        commitment = 0.25 * F.mse_loss(z, code.detach())
        if self.learnt:
            commitment = commitment + F.mse_loss(code, z.detach())
        else:
            self._follow(z, chosen)
        straight = z + (code - z).detach()
        use = F.one_hot(chosen, 5).to(x.dtype).mean(0)
        perplexity = torch.exp(-(use * torch.log(use + 1e-10)).sum()).detach()
        return F.mse_loss(self.decode(straight), x) + commitment + 0.01 * perplexity


def of_x(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"])


def observed(net: Any, h: Tensor) -> Tensor:
    """Quantization-aware training: moving range of the batch, rounding with a straight-through gradient."""
    with torch.no_grad():
        net.low.copy_(torch.minimum(net.low, h.min()))
        net.high.mul_(0.5).add_(0.5 * h.max())
    scale = (net.high - net.low) / 15
    return h + (torch.round((h - net.low) / scale) * scale + net.low - h).detach()


def observed_before(net: Any, h: Tensor) -> Tensor:
    """Divide by a running scale, then update it: only the buffer couples samples."""
    out = h / net.scale
    net.scale = 0.9 * net.scale + 0.1 * h.detach().abs().mean()
    return out


def counted(net: Any, h: Tensor) -> Tensor:
    """Integer counts of samples, calls and active units."""
    net.samples += h.shape[0]
    net.calls.add_(1)
    net.active += (h > 0).sum(0)
    return h * net.active / net.samples


def welford(net: Any, h: Tensor) -> Tensor:
    """Running moments of all samples, as reinforcement learning normalizes observations."""
    with torch.no_grad():
        mean, var, n = h.mean(0), h.var(0, unbiased=False), h.shape[0]
        delta, total = mean - net.mean, net.count + n
        net.var = (net.var * net.count + var * n + delta**2 * net.count * n / total) / total
        net.mean = net.mean + delta * n / total
        net.count = total
    return (h - net.mean) / torch.sqrt(net.var + 1e-8)


def class_centres(model: Any, batch: Any) -> Tensor:
    """Class centres: the loss reads them, then `index_add_` updates them."""
    z, y = model.encode(batch["x"]), batch["y"]
    loss = (z - model.centres[y]).pow(2).sum(1).mean() + F.cross_entropy(model.last(z), y)
    with torch.no_grad():
        model.centres.index_add_(0, y, z.detach() - model.centres[y], alpha=0.1)
    return loss


def followed_weights(model: Any, batch: Any) -> Tensor:
    """Mean teacher: the loss updates the weight average, which has its own BatchNorm."""
    with torch.no_grad():
        for slow, fast in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            slow.lerp_(fast, 0.05)
        aim = model.teacher(batch["x2"]).softmax(1)
    z = model.student(batch["x1"])
    return F.cross_entropy(z, batch["y"]) + F.mse_loss(z.softmax(1), aim)


def queue_list(model: Any, batch: Any) -> Tensor:
    """Store embeddings, and use them in the same forward as negatives."""
    z1, z2 = model.encode(batch["x1"]), model.encode(batch["x2"])
    model.stored = torch.cat([F.normalize(z2.detach(), dim=1), model.stored])[:20]
    logits = torch.cat([F.normalize(z1) @ F.normalize(z2).T, F.normalize(z1) @ model.stored.T], 1) / 0.2
    return F.cross_entropy(logits, torch.arange(z1.shape[0]))


def barlow_ema(model: Any, batch: Any) -> Tensor:
    """Moving average of the cross-correlation; only the new term has a gradient."""
    z1, z2 = model.encode(batch["x1"]), model.encode(batch["x2"])
    c = 0.7 * model.average + 0.3 * (z1 - z1.mean(0)).T @ (z2 - z2.mean(0)) / z1.shape[0]
    model.average = c.detach()
    return (c - torch.eye(5, dtype=c.dtype)).pow(2).sum() + losses.negative_cosine(z1, z2)


class WithBuffer(nn.Module):
    """Linear encoder, an optional head, and a named buffer."""

    def __init__(self, name: str, buffer: Tensor, *, head: bool = False) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 5)
        if head:
            self.last = nn.Linear(5, 3)
        self.register_buffer(name, buffer)


def _parameter_names(name: str, model: nn.Module) -> tuple[str, ...]:
    return tuple(f"{name}.{parameter}" for parameter, _ in model.named_parameters())


def _case(name: str, build: Callable[[], nn.Module], loss: Any, **options: Any) -> Case:
    values: dict[str, Any] = {"data": data.rows, "coupled": True, **options}
    return Case(name=name, build=build, loss=loss, buffers=True, **values)


def _buffer(value: Tensor) -> Callable[[], Tensor]:
    return value.clone


CASES = [
    _case(
        "MoCo with BatchNorm",
        lambda: Momentum("batch"),
        of_views,
        data=data.image_views,
        without_gradient=_parameter_names("key", models.encoder("batch")),
    ),
    _case(
        "MoCo",
        lambda: Momentum("group"),
        of_views,
        data=data.image_views,
        without_gradient=_parameter_names("key", models.encoder("group")),
        note="only the queue and the key encoder, updated once per forward, couple samples",
    ),
    _case(
        "DINO",
        Centred,
        of_views,
        data=data.row_views,
        without_gradient=_parameter_names("teacher", models.mlp(norm=nn.LayerNorm)),
        min_n=1,
    ),
    _case(
        "memory bank",
        Bank,
        of_index,
        data=indexed,
        min_n=1,
        note="plain accumulation reads rows that earlier micro-batches wrote",
    ),
    _case("codebook that follows", lambda: Codebook(learnt=False), of_x, min_n=1),
    Case(
        name="codebook that is learnt",
        build=lambda: Codebook(learnt=True),
        data=data.rows,
        loss=of_x,
        coupled=False,
        min_n=1,
    ),
    _case(
        "quantisation with an observer",
        between(observed, low=_buffer(torch.zeros(())), high=_buffer(torch.ones(()))),
        cross_entropy,
    ),
    _case(
        "scale read before it moves", between(observed_before, scale=_buffer(torch.ones(()))), cross_entropy
    ),
    _case(
        "counts in integers",
        between(
            counted,
            samples=_buffer(torch.tensor(0)),
            calls=_buffer(torch.tensor(0)),
            active=_buffer(torch.zeros(8, dtype=torch.long)),
        ),
        cross_entropy,
        min_n=1,
    ),
    _case(
        "running moments of all samples",
        between(
            welford,
            mean=_buffer(torch.zeros(8)),
            var=_buffer(torch.ones(8)),
            count=_buffer(torch.tensor(1e-4)),
        ),
        cross_entropy,
    ),
    _case(
        "moving centres of classes",
        lambda: WithBuffer("centres", torch.randn(3, 5), head=True),
        class_centres,
        min_n=1,
    ),
    _case(
        "mean teacher",
        lambda: models.Named(student=models.mlp(), teacher=models.mlp().requires_grad_(requires_grad=False)),
        followed_weights,
        data=data.row_views,
        without_gradient=_parameter_names("teacher", models.mlp()),
    ),
    _case(
        "stored embeddings as negatives",
        lambda: WithBuffer("stored", F.normalize(torch.randn(20, 5))),
        queue_list,
        data=data.row_views,
    ),
    _case(
        "moving cross-correlation",
        lambda: WithBuffer("average", torch.zeros(5, 5)),
        barlow_ema,
        data=data.row_views,
    ),
]
