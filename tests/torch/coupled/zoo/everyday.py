"""Other code in a training step: logs, checks, metrics, attributes, containers."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.torch.coupled import data, models
from tests.torch.coupled.case import Case, between
from tests.torch.coupled.zoo.architectures import cross_entropy


def metrics(model: Any, batch: Any) -> Tensor:
    """Accuracy, a confusion matrix and the loss as Python numbers, before the backward."""
    z, y = model(batch["x"]), batch["y"]
    loss = F.cross_entropy(z, y)
    guess = z.argmax(dim=1)
    log = {"loss": loss.item(), "accuracy": (guess == y).float().mean().item()}
    confusion = torch.zeros(3, 3, dtype=torch.long)
    for truth, said in zip(y.tolist(), guess.tolist(), strict=True):
        confusion[truth, said] += 1
    assert int(confusion.sum()) == len(y)
    assert 0 <= log["accuracy"] <= 1
    assert f"{loss:.4f}" == f"{log['loss']:.4f}"
    return loss


def checks(net: Any, h: Tensor) -> Tensor:
    """Assertions about values, as in debug code."""
    h = net.norm(h)
    assert not torch.isnan(h).any()
    assert torch.isfinite(h).all()
    if torch.any(h > 1e6) or not torch.all(h < 1e6).item():
        raise ValueError("too large")
    assert bool((h.abs().amax(dim=1) > 0).all())
    return h.tanh()


def attributes(net: Any, h: Tensor) -> Tensor:
    """Attributes that code reads from a tensor, without its values."""
    h = net.norm(h)
    assert h.shape == (h.size(0), 8)
    assert h.dim() == h.ndim == 2
    assert h.numel() == h.shape.numel() == len(h) * 8
    assert h.dtype == torch.float64 and h.is_floating_point() and not h.is_complex()
    assert h.device.type == "cpu" and not h.is_cuda and h.layout == torch.strided
    assert h.requires_grad and h.grad_fn is not None and not h.is_leaf and h.grad_fn.name()
    assert isinstance(h, Tensor) and torch.is_tensor(h) and h.is_contiguous() and h.stride(1) == 1
    assert len({h: 1, h.detach(): 2}) == 2
    assert h.element_size() == 8 and not h.is_sparse
    assert isinstance(repr(h), str)
    return h.to(h.device).to(dtype=h.dtype, non_blocking=True).type_as(h).contiguous().requires_grad_()


def moved(model: Any, batch: Any) -> Tensor:
    """Move the batch to the model's device and dtype, as training loops do."""
    like = next(model.parameters())
    x = batch["x"].to(like.device, non_blocking=True).to(like.dtype)
    return F.cross_entropy(model(x.cpu()), batch["y"].to(like.device).long())


@dataclass
class Output:
    """Output in the style of transformers."""

    loss: Tensor
    logits: Tensor
    hidden: tuple[Tensor, ...]


class Classifier(nn.Module):
    """Computes its own loss; returns hidden states in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        a = self.first(x)
        b = self.norm(a).relu()
        logits = self.last(b)
        return Output(F.cross_entropy(logits, labels), logits, (a, b))


def own_loss(model: Any, batch: Any) -> Tensor:
    out = model(batch["x"], labels=batch["y"])
    return out.loss + 0.1 * sum(h.var(0).mean() for h in out.hidden)


class Backbone(nn.Module):
    """Named feature maps in the style of torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU())
        self.lateral = nn.ModuleDict({"a": nn.Conv2d(4, 5, 1), "b": nn.Conv2d(6, 5, 1)})
        self.heads = nn.ModuleList([nn.Conv2d(5, 3, 1), nn.Conv2d(5, 4, 1)])

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        maps = OrderedDict(a=self.first(x))
        maps["b"] = self.second(maps["a"])
        low = self.lateral["b"](maps["b"])
        top = self.lateral["a"](maps["a"]) + F.interpolate(low, size=maps["a"].shape[-2:], mode="nearest")
        levels = [top, low]
        return {
            "classes": [self.heads[0](m).permute(0, 2, 3, 1).flatten(1, 2) for m in levels],
            "boxes": [self.heads[1](m).permute(0, 2, 3, 1).flatten(1, 2) for m in levels],
        }


def detector(model: Any, batch: Any) -> Tensor:
    """RetinaNet's loss: sums over matched anchors, divided by their number."""
    out = model(batch["x"])
    classes, boxes = torch.cat(out["classes"], 1), torch.cat(out["boxes"], 1)
    labels = (torch.arange(classes.shape[1]) + batch["y"][:, None]) % 5
    matched = labels < 3
    aim = F.one_hot(labels.clamp(max=2), 3).to(classes.dtype) * matched[..., None]
    found = F.binary_cross_entropy_with_logits(classes, aim, reduction="sum")
    placed = F.smooth_l1_loss(boxes[matched], torch.ones_like(boxes[matched]), reduction="sum")
    return (found + placed) / max(1, int(matched.sum()))


class ActNorm(nn.Module):
    """Glow's ActNorm: the first batch sets scale and shift of an affine layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6))
        self.turn = nn.Linear(6, 6)
        self.register_buffer("ready", torch.tensor(0, dtype=torch.uint8))
        self.ready: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.turn(x)
        if self.ready.item() == 0:
            with torch.no_grad():
                self.shift.data.copy_(-h.mean(0))
                self.scale.data.copy_(1 / (h.std(0) + 1e-6))
                self.ready.fill_(1)
        return self.scale * (h + self.shift), self.scale.abs().log().sum().expand(x.shape[0])


def likelihood(model: Any, batch: Any) -> Tensor:
    z, log_det = model(batch["x"])
    prior = -0.5 * (z**2 + math.log(2 * math.pi)).sum(1)
    return -(prior + log_det).mean()


def actnorm_then_more(model: Any, batch: Any) -> Tensor:
    return likelihood(model, batch) + 0.1 * model(batch["x"] * 1.5)[0].var(0).sum()


class Quantizer(nn.Module):
    """wav2vec 2.0: hard choices with soft gradients, a penalty on the mean use, negatives of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.codes = nn.Linear(8, 6), nn.Parameter(torch.randn(6, 4))
        self.context = nn.GRU(8, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        score = self.score(x)
        soft = score.softmax(-1)
        hard = F.one_hot(score.argmax(-1), 6).to(x.dtype) + soft - soft.detach()
        code, context = hard @ self.codes, self.context(x)[0]
        use = soft.flatten(0, 1).mean(0)
        n, t, _ = code.shape
        others = code.flatten(0, 1)[(torch.arange(n * t)[:, None] + torch.tensor([1, 8, 15])) % (n * t)]
        choices = torch.cat([code.reshape(n * t, 1, -1), others], 1)
        logits = F.cosine_similarity(context.reshape(n * t, 1, -1), choices, dim=-1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(n * t, dtype=torch.long))
        return loss + 0.1 * (use * (use + 1e-7).log()).sum()


def split_norms(net: Any, h: Tensor) -> Tensor:
    """Split BatchNorm of timm: each half has its own norm (adversarial and clean samples)."""
    half = h.shape[0] // 2
    return torch.cat([net.norm(h[:half]), net.other(h[half:])], dim=0)


def evolving_norm(net: Any, h: Tensor) -> Tensor:
    """EvoNorm-B0: the maximum of the batch's and the sample's deviation."""
    batch = h.var(0, unbiased=False).add(1e-5).sqrt()
    net.running.copy_(net.running * 0.9 + batch.detach() * 0.1)
    return h / torch.max(batch, net.v * h + h.var(1, keepdim=True).add(1e-5).sqrt())


def single_precision(net: Any, h: Tensor) -> Tensor:
    """Softmax in single precision, as in mixed-precision models."""
    return net.norm(h) * torch.softmax(h.float(), dim=-1).type_as(h)


def contexts(net: Any, h: Tensor) -> Tensor:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.profiler.record_function("norm"))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        return net.norm(h).sin()


def modes_changed(model: Any, batch: Any) -> Tensor:
    """Pseudo-labels in eval mode, then train mode again, within one loss."""
    model.eval()
    with torch.no_grad():
        guess = model(batch["x"]).argmax(1)
    model.train()
    return F.cross_entropy(model(batch["x"]), guess) + F.mse_loss(model(batch["x"] * 0.5), batch["x"][:, :3])


def two_optimisers(model: Any, batch: Any) -> Tensor:
    """Clear the gradient of the first loss for one head."""
    z = model.body(batch["x"])
    F.cross_entropy(model.first(z), batch["y"]).backward(retain_graph=True)
    for parameter in model.first.parameters():
        parameter.grad = None
    return model.second(z).pow(2).mean() + model.first(z.detach()).var(0).sum()


def two_heads() -> nn.Module:
    body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
    return models.Named(body=body, first=nn.Linear(8, 3), second=nn.Linear(8, 2))


def _norm() -> nn.Module:
    return nn.BatchNorm1d(8)


def _case(name: str, build: Callable[[], nn.Module], loss: Any = cross_entropy, **options: Any) -> Case:
    values: dict[str, Any] = {"data": data.rows, "coupled": True, "buffers": True, **options}
    return Case(name=name, build=build, loss=loss, **values)


CASES = [
    _case("metrics and logs", models.mlp, metrics),
    _case("assertions about values", between(checks, norm=_norm)),
    _case("attributes of a tensor", between(attributes, norm=_norm)),
    _case("moved to the model's device", models.mlp, moved),
    _case("a model with its own loss", Classifier, own_loss),
    _case("detector with two levels", Backbone, detector, data=data.images),
    _case(
        "initialised by the first batch",
        ActNorm,
        actnorm_then_more,
        note="plain accumulation would set the parameters from the first micro-batch only",
    ),
    _case(
        "quantizer with negatives of the batch",
        Quantizer,
        lambda model, batch: model(batch["x"]),
        data=data.sequences,
        buffers=False,
    ),
    _case(
        "BatchNorm of two halves", between(split_norms, norm=_norm, other=_norm), n=18, microbatch=7, min_n=4
    ),
    _case(
        "EvoNorm",
        between(evolving_norm, running=lambda: torch.ones(8), v=lambda: nn.Parameter(torch.ones(8))),
    ),
    _case("a part in single precision", between(single_precision, norm=_norm), tolerance=1e-6),
    _case("contexts", between(contexts, norm=_norm)),
    _case("eval and train mode in one loss", models.mlp, modes_changed),
    _case("a gradient taken away again", two_heads, two_optimisers),
]
