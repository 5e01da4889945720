"""CPU tensors beside a batch on an accelerator, with a stand-in that refuses them where CUDA does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.torch import virtual_batch
from tests.gpu import operators
from tests.gpu.check import Run
from tests.torch.accelerator_stand_in import DEVICE, Elsewhere, made_in_operators, stand_in

# The stand-in lacks as_strided_, and tensors that these make inside of operators are on the CPU.
NOT_EMULATED = {
    "quantile over the batch",
    "quantile over features",
    "set by a mask",
    "over the batch, one per sample",
    "linear of one sample vector",
    "affine_grid",
    "GRU",
    "cross_entropy with class weights, mean",
    "cross_entropy with class weights, sum",
}


@pytest.fixture
def device() -> Iterator[None]:
    with stand_in():
        yield


def test_operators_leave_all_tensors_on_the_device(device: None) -> None:
    figures = operators.table(Run(DEVICE, small=False), NOT_EMULATED)
    assert figures["operators"] > 700, "premise: the whole table"


def test_the_stand_in_refuses_cpu_tensors(device: None) -> None:
    x = Elsewhere(torch.ones(3))
    with pytest.raises(RuntimeError, match="same device"):
        torch.mul(x, torch.ones(3))
    assert (x * torch.tensor(2.0)).sum().item() == 6, "numbers are accepted"


def _ctc(reduction: str) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        lengths = torch.full((len(x),), 8), torch.tensor([3, 1, 2, 3, 2, 1, 3])
        return F.ctc_loss(x.permute(1, 0, 2).log_softmax(2), y, *lengths, reduction=reduction).sum()

    return loss


def _masked(x: Tensor, y: Tensor) -> Tensor:
    x = x * 1.0
    x[:, torch.tensor([True, False, True, False, True, False, False, True])] = 0.5
    return (x.square() * x.mean(0)).sum()


def _labelled(x: Tensor, y: Tensor) -> Tensor:
    # One label for each sample, made on the host.
    picked = x[torch.arange(len(x)), torch.tensor([0, 3, 2, 7, 1, 5, 4])]
    return (picked.square() * picked.mean()).sum()


def _copied(x: Tensor, y: Tensor) -> Tensor:
    x = x * 1.0
    x[:, 0] = torch.arange(5.0, dtype=x.dtype)
    x[2].copy_(torch.ones(8, 5, dtype=torch.float32))
    return (x.square() * x.mean(0)).sum()


@pytest.mark.parametrize(
    "loss", [_ctc("mean"), _ctc("sum"), _ctc("none"), _masked, _labelled, _copied], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("size", [1, 3, 7])
def test_lengths_masks_and_indices_on_the_host(
    loss: Callable[[Tensor, Tensor], Tensor], size: int, device: None
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(7, 8, 5, dtype=torch.float64), torch.randint(1, 5, (7, 3))
    weight = torch.randn(5, 5, dtype=torch.float64)
    by_batch = weight.clone().requires_grad_()
    value = loss(x @ by_batch, y)
    value.backward()
    model = nn.Module()
    model.weight = nn.Parameter(Elsewhere(weight.clone()))
    with made_in_operators(), virtual_batch(model, size, device=DEVICE) as batch:
        ours = loss(batch(x) @ model.weight, batch(y))
        ours.backward()
        assert ours.item() == pytest.approx(value.item(), rel=1e-12)
    assert by_batch.grad is not None and by_batch.grad.norm() > 0.01, "premise: there is a gradient"
    assert isinstance(model.weight.grad, Elsewhere)
    assert (model.weight.grad.held - by_batch.grad).norm() < 1e-12 * by_batch.grad.norm()


def test_a_cpu_tensor_of_numbers_is_refused_as_by_torch(device: None) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(Elsewhere(torch.ones(3)))
    with pytest.raises(RuntimeError, match="same device"), virtual_batch(model, 2, device=DEVICE) as batch:
        ((batch(torch.ones(4, 3)) * model.weight) * torch.ones(3)).sum().backward()
