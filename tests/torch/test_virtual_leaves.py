"""Gradients of tensors outside the block's models, first used before or inside the block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from superbatch.torch import virtual_batch

N = 7
DATA = torch.Generator().manual_seed(3)
X = torch.randn(N, 5, generator=DATA, dtype=torch.float64)
Z = torch.randn(N, 3, generator=DATA, dtype=torch.float64)
MASK = torch.rand(N, 5, generator=DATA) > 0.4


class Case(NamedTuple):
    """Program that uses tensors outside the model.

    Attributes:
        leaves: makes the tensors that get gradients.
        first: computes a tensor from them, before or inside the block.
        then: computes the outputs for the loss.
    """

    leaves: Callable[[], Any]
    first: Callable[[Any], Tensor]
    then: Callable[[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Tensor], Tensor]


class Broken(Exception):
    """Error of the program."""


def scale() -> list[Tensor]:
    return [nn.Parameter(torch.tensor(0.3, dtype=torch.float64))]


def codes() -> list[Tensor]:
    return [nn.Parameter(X.flip(0).clone())]


def generator() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh()).double()


CASES = {
    "a scale": Case(scale, lambda made: made[0].exp(), lambda model, batch, e: model(batch(X)) * e),
    "a scale, unchanged": Case(scale, lambda made: made[0], lambda model, batch, e: model(batch(X)) * e),
    "a code for each sample": Case(
        codes, lambda made: 2 * made[0], lambda model, batch, e: model(batch(X) + e)
    ),
    "codes, unchanged": Case(codes, lambda made: made[0], lambda model, batch, e: model(batch(X) + e)),
    "codes as the batch": Case(codes, lambda made: 2 * made[0], lambda model, batch, e: model(batch(e))),
    "codes with the mask as batch": Case(
        codes, lambda made: made[0], lambda _, batch, e: torch.masked.logsumexp(e, 0, mask=batch(MASK))
    ),
    "computed codes with the mask as batch": Case(
        codes, lambda made: made[0] * 1, lambda _, batch, e: torch.masked.logsumexp(e, 0, mask=batch(MASK))
    ),
    "net before the model": Case(generator, lambda net: net(Z), lambda model, batch, e: model(batch(e))),
    "net times the batch": Case(generator, lambda net: net(Z), lambda model, batch, e: model(batch(X) * e)),
}


def tensors_of(made: Any) -> list[Tensor]:
    return list(made.parameters()) if isinstance(made, nn.Module) else made


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()


def prepared(case: Case, *, had: bool) -> tuple[Any, list[Tensor], list[Tensor | None]]:
    made = case.leaves()
    leaves = tensors_of(made)
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf) if had else None
    return made, leaves, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("had", [False, True], ids=["no gradient yet", "a gradient before"])
@pytest.mark.parametrize("inside", [False, True], ids=["used before the block", "used in the block"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_leaves_are_real_and_equal_the_real_batch(name: str, inside: bool, had: bool) -> None:
    case = CASES[name]
    made, leaves, _ = prepared(case, had=had)
    case.then(model_of(), lambda x: x, case.first(made)).square().mean().backward()
    expected = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert any((grad - int(had)).abs().max() > 1e-3 for grad in expected), "premise: they get gradients"

    made, leaves, before = prepared(case, had=had)
    model, above = model_of(), None if inside else case.first(made)
    with virtual_batch(model, 2) as batch:
        outputs = case.then(model, batch, case.first(made) if above is None else above)
        outputs.square().mean().backward()
    for leaf, old, wanted in zip(leaves, before, expected, strict=True):
        assert type(leaf.grad) is Tensor, "the gradient is still virtual"
        assert old is None or leaf.grad is old, "the existing grad tensor is kept"
        torch.testing.assert_close(leaf.grad, wanted, rtol=1e-12, atol=1e-12)


def test_an_exception_rolls_back_gradients_of_leaves() -> None:
    case = CASES["a scale"]
    made, leaves, before = prepared(case, had=True)
    above, model = case.first(made), model_of()
    with suppress(Broken), virtual_batch(model, 2) as batch:
        case.then(model, batch, above).square().mean().backward()
        raise Broken
    for leaf, old in zip(leaves, before, strict=True):
        assert leaf.grad is old
        assert type(leaf.grad) is Tensor and bool((leaf.grad == 1).all())


@pytest.mark.parametrize("of", ["the inputs", "the batch"])
def test_a_gradient_penalty_on_the_inputs_or_on_the_batch(of: str) -> None:
    def found(model: nn.Module, batch: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x = X.clone().requires_grad_()
        given = batch(x)
        scores = model(given)
        wanted = given if of == "the batch" else x
        (gradient,) = torch.autograd.grad(scores.sum(), wanted, create_graph=True)
        (scores.mean() + (gradient.norm(dim=1) - 1).square().mean()).backward()
        return [x, *model.parameters()]

    expected = [tensor.grad for tensor in found(model_of(), lambda x: x)]
    model = model_of()
    model(X).mean().backward()
    counts = [
        bool((wanted - parameter.grad).abs().max() > 1e-3)
        for wanted, parameter in zip(expected[1:], model.parameters(), strict=True)
        if wanted is not None and parameter.grad is not None
    ]
    assert any(counts), "premise: the penalty counts"
    model = model_of()
    with virtual_batch(model, 2) as batch:
        tensors = found(model, batch)
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert type(tensor.grad) is Tensor
        torch.testing.assert_close(tensor.grad, wanted, rtol=1e-12, atol=1e-12)
