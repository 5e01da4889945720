"""The reference definition of the update agrees with the large batch and with the Accumulator."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.torch import Accumulator, Window, reference
from tests.torch.helpers import mlp, rows, sgd

Batch = tuple[Tensor, Tensor, Tensor]
SIZES = (1, 4, 2, 3)


def make_batch() -> Batch:
    """Samples with unequal counts; those of the third micro-batch are 0."""
    x, y = rows(10, updates=1)[0]
    return x, y, torch.tensor([2, 1, 0, 3, 1, 0, 0, 1, 5, 2], dtype=torch.float64)


def counted_sum(model: nn.Module, batch: Batch) -> Tensor:
    x, y, count = batch
    return ((model(x) - y).square().sum(1) * count).sum()


def counted_mean(model: nn.Module, batch: Batch) -> Tensor:
    return counted_sum(model, batch) / batch[2].sum()  # NaN if all counts are 0


def background_sum(model: nn.Module, batch: Batch) -> Tensor:
    return counted_sum(model, batch) + 0.3 * model(batch[0]).square().sum()


LOSSES: dict[str, tuple[Any, Any]] = {
    "mean": (counted_mean, counted_mean),
    "sum": (background_sum, lambda model, batch: background_sum(model, batch) / batch[2].sum()),
    "total": (background_sum, background_sum),
}


def make_microbatches() -> list[Batch]:
    columns = [leaf.split(list(SIZES)) for leaf in make_batch()]
    return [(x, y, count) for x, y, count in zip(*columns, strict=True)]


def assert_close(found: list[Tensor], wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert other.norm() > 0
        assert (one - other).norm() <= 1e-12 * other.norm()


@pytest.mark.parametrize("reduction", LOSSES)
def test_the_definition_the_large_batch_and_the_accumulator(reduction: Any) -> None:
    model, microbatches = mlp(), make_microbatches()
    loss, objective = LOSSES[reduction]
    weights = [float(mb[2].sum()) for mb in microbatches]
    assert weights[2] == 0
    assert len(set(weights)) == 4
    found, value = reference.gradient(
        model.parameters(), microbatches, [(reduction, lambda b: loss(model, b), weights)]
    )
    expected = objective(model, make_batch())
    assert value == pytest.approx(expected.item(), rel=1e-12)
    assert_close(found, torch.autograd.grad(expected, list(model.parameters())))
    optimizer, seen = sgd(model.parameters()), list[Tensor]()
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
    )
    accumulate = Accumulator(
        model,
        optimizer,
        lambda b: loss(model, b),
        reduction=reduction,
        weight=None if reduction == "total" else lambda b: float(b[2].sum()),
        check=False,
    )
    assert accumulate(Window(microbatches)).loss == pytest.approx(value, rel=1e-12)
    assert_close(seen, found)


def test_coupled_samples() -> None:
    model, microbatches = mlp(), make_microbatches()

    def contrast(embeddings: Tensor) -> Tensor:
        return (embeddings @ embeddings.T).logsumexp(1).mean()

    found, value = reference.coupled_gradient(
        model.parameters(), microbatches, lambda b: model(b[0]), contrast
    )
    expected = contrast(model(make_batch()[0]))
    assert value == pytest.approx(expected.item(), rel=1e-12)
    assert_close(found, torch.autograd.grad(expected, list(model.parameters())))


def test_only_normalize_divides() -> None:
    source = inspect.getsource(reference)
    assert " / " not in "".join(source.split('"""')[::2])  # its docstrings may
    assert len(source.splitlines()) <= 105
