"""Cases whose loss uses gradients: penalties, adversarial samples, inner updates, forces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from tests.torch.coupled import data, models
from tests.torch.coupled.zoo.autograd import case_of_rows, two_heads


def image_critic(norm: str) -> nn.Module:
    return models.encoder(norm, outs=1)


def smooth_critic(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm(4), nn.Softplus(), nn.Flatten(), nn.Linear(144, 1))


def gradient_penalty(model: Any, batch: Any) -> Tensor:
    """WGAN-GP, at points between two views."""
    mix = (0.3 * batch["x1"] + 0.7 * batch["x2"]).requires_grad_()
    score = model(mix)
    grad = torch.autograd.grad(score, mix, torch.ones_like(score), create_graph=True, retain_graph=True)[0]
    penalty = ((grad.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
    return model(batch["x2"]).mean() - model(batch["x1"]).mean() + 10 * penalty + score.mean() ** 2


def real_penalty(model: Any, batch: Any) -> Tensor:
    """R1 (StyleGAN): gradient penalty at real samples only."""
    x = batch["x1"].detach().requires_grad_(requires_grad=True)
    score = model(x)
    (grad,) = torch.autograd.grad(outputs=score.sum(), inputs=x, create_graph=True)
    return F.softplus(-score).mean() + 5 * grad.square().sum([1, 2, 3]).mean()


def adversarial(model: Any, batch: Any) -> Tensor:
    """FGSM: a backward to the inputs, then a forward of the perturbed inputs."""
    x = batch["x"].clone().requires_grad_()
    (grad,) = torch.autograd.grad(F.cross_entropy(model(x), batch["y"]), x)
    return F.cross_entropy(model((x + 0.1 * grad.sign()).detach()), batch["y"])


def inner_update(model: Any, batch: Any) -> Tensor:
    """MAML: loss after one update of the weights; the gradient flows through that update."""
    weights = dict(model.named_parameters())
    first = F.cross_entropy(functional_call(model, weights, (batch["x1"],)), batch["y"])
    grads = torch.autograd.grad(first, list(weights.values()), create_graph=True)
    fast = {name: value - 0.3 * grad for (name, value), grad in zip(weights.items(), grads, strict=True)}
    return F.cross_entropy(functional_call(model, fast, (batch["x2"],)), batch["y"])


def gradient_norm_in_loss(model: Any, batch: Any) -> Tensor:
    """Penalty on the norm of the weights' gradient (flat minima)."""
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.ndim > 1], create_graph=True)
    return loss + 0.1 * torch.sqrt(sum((g.pow(2).sum() for g in grads), torch.zeros(())))


def balanced_gradients(model: Any, batch: Any) -> Tensor:
    """VQGAN: the second loss is weighted by the ratio of two gradient norms at the last layer."""
    h = model.body(batch["x"])
    z = model.first(h)
    a, b = F.cross_entropy(z, batch["y"]), z.var(0).sum()
    grads = [torch.autograd.grad(loss, model.first.weight, retain_graph=True)[0] for loss in (a, b)]
    weight = (grads[0].norm() / (grads[1].norm() + 1e-4)).clamp(0, 1e4).detach()
    return a + weight * b + 0 * model.second(h).sum()


def sharpness(model: Any, batch: Any) -> Tensor:
    """SAM: loss after an ascent step, which is constant for the gradient."""
    parameters = list(model.parameters())
    grads = torch.autograd.grad(F.cross_entropy(model(batch["x"]), batch["y"]), parameters)
    norm = torch.stack([g.norm() for g in grads]).norm()
    up = {n: p + 0.05 * g / norm for (n, p), g in zip(model.named_parameters(), grads, strict=True)}
    return F.cross_entropy(functional_call(model, up, (batch["x"],)), batch["y"])


def energy_forces(model: Any, batch: Any) -> Tensor:
    """Force fields: the target is the gradient with respect to the positions."""
    x = batch["x"].clone().requires_grad_()
    energy = model(x).sum(1)
    (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return F.mse_loss(-force[:, :3], batch["y"]) + 0.1 * energy.pow(2).mean()


CASES = [
    case_of_rows(
        "WGAN-GP with GroupNorm",
        lambda: smooth_critic(lambda width: nn.GroupNorm(2, width)),
        gradient_penalty,
        data=data.image_views,
    ),
    case_of_rows(
        "WGAN-GP with BatchNorm",
        lambda: smooth_critic(nn.BatchNorm2d),
        gradient_penalty,
        data=data.image_views,
        buffers=True,
    ),
    case_of_rows(
        "WGAN-GP of an encoder with ReLU",
        lambda: image_critic("group"),
        gradient_penalty,
        data=data.image_views,
    ),
    case_of_rows(
        "R1 penalty",
        lambda: smooth_critic(lambda width: nn.GroupNorm(2, width)),
        real_penalty,
        data=data.image_views,
        coupled=False,
        min_n=1,
    ),
    case_of_rows("adversarial samples", models.mlp, adversarial, buffers=True),
    case_of_rows(
        "adversarial samples without BatchNorm",
        lambda: models.mlp(norm=nn.LayerNorm),
        adversarial,
        coupled=False,
        min_n=1,
    ),
    case_of_rows(
        "loss after an inner update",
        lambda: models.mlp(norm=nn.LayerNorm),
        inner_update,
        data=data.row_views,
        min_n=1,
    ),
    case_of_rows(
        "norm of the gradient in the loss",
        lambda: models.mlp(norm=nn.LayerNorm),
        gradient_norm_in_loss,
        min_n=1,
    ),
    case_of_rows("weight by norms of gradients", two_heads, balanced_gradients, buffers=True),
    case_of_rows("sharpness-aware", lambda: models.mlp(norm=nn.LayerNorm), sharpness, min_n=1),
    case_of_rows(
        "energies and forces",
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 3)),
        energy_forces,
        data=data.targets,
        coupled=False,
        min_n=1,
    ),
]
