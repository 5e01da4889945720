"""Double backward of convolutions in micro-batches, where samples take the place of channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.torch import virtual_batch
from superbatch.torch.memory.meter import peak_bytes
from superbatch.torch.virtual.rules import convolution_rules, lookup
from superbatch.torch.virtual.run import memo

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Conv2d(2, 4, 3),
    "stride": lambda: nn.Conv2d(2, 4, 3, stride=2),
    "stride with a remainder": lambda: nn.Conv2d(2, 4, 4, stride=3, padding=1),
    "padding without bias": lambda: nn.Conv2d(2, 4, 3, padding=2, bias=False),
    "dilation": lambda: nn.Conv2d(2, 4, 3, dilation=2, padding=1),
    "groups": lambda: nn.Conv2d(2, 4, 3, groups=2, stride=2),
    "depthwise": lambda: nn.Conv2d(2, 2, 3, groups=2, padding=1),
    "one by one": lambda: nn.Conv2d(2, 4, 1),
    "transposed": lambda: nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1),
    "transposed, no output padding": lambda: nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1),
    "circular padding": lambda: nn.Conv2d(2, 4, 3, padding="same", padding_mode="circular"),
    "one dimension": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(2, 4, 5, stride=2)),
    "three dimensions": lambda: nn.Sequential(nn.Unflatten(2, (2, 4)), nn.Conv3d(2, 4, 2, padding=1)),
}


def network(layer: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(LAYERS[layer](), nn.SiLU(), nn.Flatten(), nn.LazyLinear(3), nn.Tanh()).double()


def images(samples: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(samples, 2, 8, 9).double()


def input_gradient(model: nn.Module, x: Tensor) -> Tensor:
    """Return the differentiable gradient with respect to the inputs."""
    (found,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return found


def gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """Return the gradient penalty of WGAN-GP."""
    return (input_gradient(model, x.detach().requires_grad_()).flatten(1).norm(dim=1) - 1).square().mean()


def norm_of_weight_gradients(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    grads = torch.autograd.grad(
        input_gradient(model, x).square().sum(), list(model.parameters()), create_graph=True
    )
    return sum(((grad**2).sum() for grad in grads), start=torch.zeros(())) + gradient_penalty(model, x)


def gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def compare(name: str, loss: Callable[[nn.Module, Any], Tensor], size: int) -> Any:
    model, x = network(name), images(5)
    model(x)  # initialize the lazy layer
    loss(model, x).backward()
    expected = gradients(model)
    model.zero_grad()
    with virtual_batch(model, size) as batch:
        loss(model, batch(x)).backward()
    assert any(grad.norm() > 1e-3 for grad in expected), "premise"
    for one, other in zip(gradients(model), expected, strict=True):
        assert (one - other).norm() <= 1e-11 * (1 + other.norm())
    return batch.report()


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("name", LAYERS)
def test_a_gradient_penalty_equals_that_of_the_batch_without_gathering(name: str, size: int) -> None:
    assert compare(name, gradient_penalty, size).whole == ()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "name", ["plain", "stride", "dilation", "transposed, no output padding", "one dimension"]
)
def test_the_gradient_of_a_norm_of_weight_gradients(name: str, size: int) -> None:
    compare(name, norm_of_weight_gradients, size)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("filters_of_the_batch", [False, True])
def test_convolutions_with_samples_as_channels(
    *, transposed: bool, bias: bool, filters_of_the_batch: bool
) -> None:
    """The bias is added once; filters are virtual, or real with one row per sample."""
    x = images(5)
    torch.manual_seed(2)
    shift = torch.randn(3).double() if bias else None
    real = torch.randn(5, 3, 2, 2).double()
    convolve = F.conv_transpose2d if transposed else F.conv2d

    def summed(samples: Any, filters: Any) -> Tensor:
        filters = filters if transposed else filters.transpose(0, 1)
        return convolve(samples.transpose(0, 1), filters, shift)

    with virtual_batch(nn.Identity(), 2) as batch:
        found = summed(batch(x), batch(real) if filters_of_the_batch else real)
        assert torch.allclose(torch.as_tensor(found.numpy()), summed(x, real), rtol=1e-12, atol=1e-12)


def wgan_gp() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 16, 1), (16, 32, 2), (32, 32, 2)):
        layers += [nn.Conv2d(before, after, 2 + stride, stride=stride, padding=1), nn.SiLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 1)), torch.randn(64, 3, 16, 16)


def peaks(size: int) -> tuple[int, int]:
    """Return peak bytes of a gradient penalty in a virtual batch and in plain accumulation."""
    model, x = wgan_gp()

    def virtual() -> None:
        model.zero_grad()
        with virtual_batch(model, size, device_budget=0) as batch:
            gradient_penalty(model, batch(x)).backward()

    def accumulated() -> None:
        model.zero_grad()
        for microbatch in x.split(size):
            gradient_penalty(model, microbatch).backward()

    return peak_bytes(virtual), peak_bytes(accumulated)


def test_a_gradient_penalty_takes_the_memory_of_a_micro_batch() -> None:
    virtual, accumulated = peaks(4)
    assert virtual <= 1.25 * accumulated


@pytest.fixture
def without_rules(monkeypatch: pytest.MonkeyPatch) -> Any:
    for packet in convolution_rules.RULES:
        monkeypatch.delitem(lookup.OWN, packet)
    memo._cached.cache_clear()
    yield
    memo._cached.cache_clear()


@pytest.mark.usefixtures("without_rules")
def test_without_the_rule_the_batch_is_gathered_and_reported() -> None:
    report = compare("plain", gradient_penalty, 2)
    assert [value.operation for value in report.whole] == ["aten.convolution.default"]
    virtual, accumulated = peaks(4)
    assert virtual > 3 * accumulated
