"""BatchNorm of a virtual batch with a kernel that behaves as the one of CUDA does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.torch import virtual_batch
from superbatch.torch.virtual.trace import batch_norm

KERNEL = batch_norm._backward_kernel
CALLS: list[bool] = []


def kernel_of_cuda(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    training: bool,
    eps: float,
    mask: list[bool],
) -> Any:
    """The kernel of the CPU, with two differences that were seen on a GPU (torch 2.11)."""
    CALLS.append(training)
    if save_mean is None or save_invstd is None:
        raise RuntimeError("save_mean->defined() INTERNAL ASSERT FAILED")
    found = KERNEL(grad, x, weight, mean, var, save_mean, save_invstd, training, eps, mask)
    return found if weight is not None else (found[0], x.new_empty(0), x.new_empty(0))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_gradient_of_the_batch(
    size: int, affine: bool, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_norm, "_backward_kernel", kernel_of_cuda)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, affine=affine), nn.Tanh(), nn.Linear(4, 2)
    ).double()
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    model.train(training)
    x = torch.randn(7, 3, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        y = model(x)
        return (y * y.mean(0)).square().sum()

    parameters = dict(model.named_parameters())
    expected = torch.autograd.grad(loss(x), list(parameters.values()))
    CALLS.clear()
    with virtual_batch(model, size) as batch:
        loss(batch(x)).backward()
    assert set(CALLS) == {training}, "premise: the kernel ran in this mode"
    for (name, parameter), right in zip(parameters.items(), expected, strict=True):
        assert parameter.grad is not None
        assert (parameter.grad - right).norm() <= 1e-12 * max(1.0, float(right.norm())), name
