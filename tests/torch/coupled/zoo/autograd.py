"""Cases that use autograd: custom functions, hooks, checkpoints, several backward calls, frozen layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.torch.coupled import custom_ops, data, losses, models
from tests.torch.coupled.case import Apply, Case, between
from tests.torch.coupled.zoo.architectures import cross_entropy


class Swish(Function):
    """Per-sample function; saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grads[0] * (s + x * s * (1 - s))


class Reversal(Function):
    """Gradient reversal (domain adversarial training)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return -ctx.weight * grads[0], None


class BatchStandard(Function):
    """Normalization over the batch, with a handwritten backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor) -> Tensor:
        mean = x.mean(0)
        inverse = 1 / (x.var(0, unbiased=False) + 1e-3).sqrt()
        normed = (x - mean) * inverse
        ctx.save_for_backward(normed, inverse, gamma)
        return normed * gamma

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # decorated
        normed, inverse, gamma = ctx.saved_tensors
        g = grads[0] * gamma
        dx = inverse * (g - g.mean(0) - normed * (g * normed).mean(0))
        return dx, (grads[0] * normed).sum(0)


class OwnLinear(Function):
    """A linear layer; the weight's gradient is a product over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.mm(weight.t()) + bias

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        (g,) = grads
        wanted = ctx.needs_input_grad
        return (
            g.mm(weight) if wanted[0] else None,
            g.t().mm(x) if wanted[1] else None,
            g.sum(0) if wanted[2] else None,
        )


class RoundUp(Function):
    """Two outputs, one of them an integer without a gradient; straight-through gradient of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        levels = torch.ceil(x * 4).long()
        ctx.mark_non_differentiable(levels)
        return levels.to(x.dtype) / 4, levels

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0]


class ClipByBatch(Function):
    """Identity; its backward clips by the gradient norm of the whole batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0] * (0.01 / grads[0].norm()).clamp(max=1.0)


def own_linear(net: Any, h: Tensor) -> Tensor:
    out: Any = OwnLinear.apply(h, net.inner.weight, net.inner.bias)
    return out.tanh()


def rounded(net: Any, h: Tensor) -> Tensor:
    out, levels = RoundUp.apply(h)  # pyright: ignore[reportGeneralTypeIssues]  # two outputs
    return out + 0.1 * levels.to(h.dtype)


def hook_of_tensor(net: Any, h: Tensor) -> Tensor:
    """A hook changes the gradient of a hidden tensor."""
    h = net.norm(h)
    h.register_hook(lambda grad: 0.5 * grad.clamp(-0.01, 0.01))
    return h.sin()


def hook_by_batch(net: Any, h: Tensor) -> Tensor:
    """A hook divides the gradient by its norm over the batch."""
    h = h.sin()
    h.register_hook(lambda grad: grad / grad.norm())
    return h


def hooks_of_modules() -> nn.Module:
    model = models.mlp()
    model[1].register_forward_hook(lambda _, __, out: out * 1.5)  # pyright: ignore[reportIndexIssue]
    model[3].register_forward_pre_hook(lambda _, args: (args[0] + 0.1,))  # pyright: ignore[reportIndexIssue]
    model[3].register_full_backward_hook(lambda _, grads, __: (grads[0] * 2,))  # pyright: ignore[reportIndexIssue]
    return model


def hooks_of_parameters() -> nn.Module:
    """A hook on each parameter clips the gradient: it must run once, on the gradient of the whole batch."""
    model = models.mlp(norm=nn.LayerNorm)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad / (1 + grad.norm()))
    return model


def features_by_hook(model: Any, batch: Any) -> Tensor:
    """A forward hook captures features for the loss."""
    caught: list[Tensor] = []
    handle = model[2].register_forward_hook(lambda _, __, out: caught.append(out))
    try:
        z = model(batch["x"])
    finally:
        handle.remove()
    return F.cross_entropy(z, batch["y"]) + 0.1 * caught[0].var(0).sum()


def checkpointed(*, reentrant: bool, dropout: float = 0) -> Callable[[], nn.Module]:
    def block() -> nn.Module:
        layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 8)]
        return nn.Sequential(*layers)

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.first(x)
        for one in (net.one, net.two):
            out: Any = checkpoint(one, h, use_reentrant=reentrant)
            h = h + out
        return net.last(h)

    return lambda: Apply(forward, first=nn.Linear(6, 8), one=block(), two=block(), last=nn.Linear(8, 3))


def in_segments(net: Any, x: Tensor) -> Tensor:
    return net.last(checkpoint_sequential(net.body, 3, net.first(x), use_reentrant=False))


def checkpointed_loss(model: Any, batch: Any) -> Tensor:
    """The loss over all pairs is recomputed too."""
    z1, z2 = model(batch["x1"]), model(batch["x2"])
    loss: Any = checkpoint(losses.info_nce, z1, z2, use_reentrant=False)
    return loss


def two_backwards(model: Any, batch: Any) -> Tensor:
    h = model.body(batch["x"])
    F.cross_entropy(model.first(h), batch["y"]).backward(retain_graph=True)
    return model.second(h).var(0).sum()


def backward_of_each_head(model: Any, batch: Any) -> Tensor:
    """Cut the graph at the features: backward of each head first, then one backward through the body."""
    h = model.body(batch["x"])
    cut = h.detach().requires_grad_()
    F.cross_entropy(model.first(cut), batch["y"]).backward()
    model.second(cut).pow(2).mean().backward()
    return (h * cut.grad).sum()


def backward_of_vector(model: Any, batch: Any) -> Tensor:
    """`backward` of a tensor, with a gradient for each sample."""
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    each.backward(torch.full_like(each, 0.5 / len(each)), retain_graph=True)
    return each.std()


def two_forwards(model: Any, batch: Any) -> Tensor:
    """Two forwards; the backward of the first runs before the second forward."""
    F.cross_entropy(model(batch["x"]), batch["y"]).backward()
    return model(batch["x"] * 2).pow(2).mean()


def generator_then_critic(model: Any, batch: Any) -> Tensor:
    """Two losses of a GAN; the critic's runs first, on detached fakes."""
    fake = model.make(batch["z"])
    critic = F.softplus(model.critic(fake.detach())).mean() + F.softplus(-model.critic(batch["x"])).mean()
    critic.backward()
    return F.softplus(-model.critic(fake)).mean()


def _latent(n: int) -> dict[str, Tensor]:
    return {"x": data.normal(n, 6), "z": data.normal(n, 4, seed=1), "y": data.integers(3, n)}


def gan(norm: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: models.Named(
        make=nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6)),
        critic=nn.Sequential(nn.Linear(6, 8), norm(8), nn.Softplus(), nn.Linear(8, 1)),
    )


def detached_features(net: Any, h: Tensor) -> Tensor:
    return h * net.norm(h.detach()).sigmoid() + h.data.mean(0)


def no_grad_pass(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        gate = net.norm(h).tanh()
    with torch.enable_grad():
        return h * gate


def inference_pass(net: Any, h: Tensor) -> Tensor:
    """Multiply by the sign of a mean that was computed in inference mode."""
    with torch.inference_mode():
        mean = h.detach().mean(0)
    return h * torch.sign(mean.clone())


def straight_through(net: Any, h: Tensor) -> Tensor:
    soft = h.softmax(1)
    hard = torch.zeros_like(soft).scatter_(1, soft.argmax(1, keepdim=True), 1.0)
    return net.norm(h + (hard - soft).detach() + soft)


def frozen_first(*, whole: bool) -> Callable[[], nn.Module]:
    """Fine-tuning with frozen first layers."""

    def build() -> nn.Module:
        model = models.conv_net()
        for index in (0, 1) if not whole else range(11):
            model[index].requires_grad_(requires_grad=False)  # pyright: ignore[reportIndexIssue]  # a Sequential
        return model

    return build


def unused_head(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model.first(model.body(batch["x"])), batch["y"])


def two_heads() -> nn.Module:
    body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
    return models.Named(body=body, first=nn.Linear(8, 3), second=nn.Linear(8, 2))


def _norm() -> nn.Module:
    return nn.BatchNorm1d(8)


def case_of_rows(name: str, build: Any, loss: Any = cross_entropy, **options: Any) -> Case:
    values: dict[str, Any] = {"data": data.rows, "coupled": True, **options}
    return Case(name=name, build=build, loss=loss, **values)


CASES = [
    case_of_rows("own function", between(lambda _, h: Swish.apply(h)), coupled=False, min_n=1),
    case_of_rows(
        "own function, BatchNorm", between(lambda net, h: Swish.apply(net.norm(h)), norm=_norm), buffers=True
    ),
    case_of_rows(
        "gradient reversal",
        between(lambda net, h: Reversal.apply(net.norm(h), 0.7), norm=_norm),
        buffers=True,
    ),
    case_of_rows(
        "own function over the batch",
        between(lambda net, h: BatchStandard.apply(h, net.gamma), gamma=lambda: nn.Parameter(torch.ones(8))),
    ),
    case_of_rows(
        "own linear layer", between(own_linear, inner=lambda: nn.Linear(8, 8)), coupled=False, min_n=1
    ),
    case_of_rows("own function with an integer output", between(rounded), coupled=False, min_n=1),
    case_of_rows("own function that clips over the batch", between(lambda _, h: ClipByBatch.apply(h.sin()))),
    case_of_rows("custom operator", between(lambda _, h: custom_ops.bent(h, 0.7)), coupled=False, min_n=1),
    case_of_rows("custom operator over the batch", between(lambda _, h: custom_ops.centred(h).sin())),
    case_of_rows("hook of a tensor", between(hook_of_tensor, norm=_norm), buffers=True),
    case_of_rows("hook of a tensor, over the batch", between(hook_by_batch)),
    case_of_rows("hooks of modules", hooks_of_modules, buffers=True),
    case_of_rows("hooks of parameters", hooks_of_parameters, min_n=1),
    case_of_rows("features by a hook", models.mlp, features_by_hook, buffers=True),
    case_of_rows(
        "checkpoint",
        checkpointed(reentrant=False),
        buffers=True,
        note="BatchNorm updates its buffers twice, as in plain PyTorch",
    ),
    case_of_rows("checkpoint, reentrant", checkpointed(reentrant=True), buffers=True),
    case_of_rows(
        "checkpoint with dropout", checkpointed(reentrant=False, dropout=0.3), buffers=True, random=True
    ),
    case_of_rows(
        "checkpoint in segments",
        lambda: Apply(
            in_segments,
            first=nn.Linear(6, 8),
            body=nn.Sequential(
                *(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.SiLU()))
            ),
            last=nn.Linear(8, 3),
        ),
        buffers=True,
    ),
    case_of_rows(
        "checkpoint of the loss", models.encoder, checkpointed_loss, data=data.image_views, buffers=True
    ),
    case_of_rows("two backward calls", two_heads, two_backwards, buffers=True),
    case_of_rows("backward of each head", two_heads, backward_of_each_head, buffers=True),
    case_of_rows("backward of a vector", models.mlp, backward_of_vector, buffers=True),
    case_of_rows("two forwards, two backwards", models.mlp, two_forwards, buffers=True),
    case_of_rows("GAN", gan(nn.LayerNorm), generator_then_critic, data=_latent, buffers=True),
    case_of_rows(
        "GAN, BatchNorm in the critic", gan(nn.BatchNorm1d), generator_then_critic, data=_latent, buffers=True
    ),
    case_of_rows("detached features", between(detached_features, norm=_norm), buffers=True),
    case_of_rows(
        "a pass without gradients",
        between(no_grad_pass, norm=_norm),
        buffers=True,
        without_gradient=("norm.weight", "norm.bias"),
    ),
    case_of_rows("a pass in inference mode", between(inference_pass)),
    case_of_rows("straight-through", between(straight_through, norm=_norm), buffers=True),
    case_of_rows(
        "first layers frozen",
        frozen_first(whole=False),
        data=data.images,
        buffers=True,
        without_gradient=("0.weight", "0.bias", "1.weight", "1.bias"),
    ),
    case_of_rows(
        "all but the head frozen",
        frozen_first(whole=True),
        data=data.images,
        buffers=True,
        without_gradient=tuple(
            name for name, _ in models.conv_net().named_parameters() if not name.startswith("12.")
        ),
    ),
    case_of_rows(
        "a head that is not used",
        two_heads,
        unused_head,
        buffers=True,
        without_gradient=("second.weight", "second.bias"),
    ),
]
