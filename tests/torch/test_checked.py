"""The result of a check tells whether it could have found a wrong declaration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.torch import count_tokens
from superbatch.torch.checks.checked import ALIKE, ALL_ZERO, NOT_CUT, NOT_REPEATABLE, WEIGHTLESS
from superbatch.torch.checks.declared_loss import check_declaration
from superbatch.torch.checks.probing.problem import Problem
from tests.torch.helpers import mlp, mse, rows, tiny_lm, token_mean, tokens

LENGTHS = [5, 1, 2, 7, 3, 6]


def hinge(model: nn.Module, batch: Any) -> Tensor:
    """A loss over hard samples, of which there are none."""
    return (model(batch[0]).square().sum(1) - 1e6).clamp(min=0).mean()


def unseeded(model: nn.Module, batch: Any) -> Tensor:
    import os

    return mse(model, batch) * (1 + int.from_bytes(os.urandom(4), "big") / 2**32)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any, Any, str]] = {
    "floats alone": (mlp, mse, rows(6, 1)[0], None, ""),
    "unequal tokens": (tiny_lm, token_mean, tokens(LENGTHS), count_tokens("labels"), ""),
    "equal tokens": (tiny_lm, token_mean, tokens([4] * 6), None, ALIKE),
    "no hard sample": (mlp, hinge, rows(6, 1)[0], None, ALL_ZERO),
    "no token": (tiny_lm, token_mean, tokens([0] * 6), count_tokens("labels"), WEIGHTLESS),
    "one sample": (mlp, mse, rows(1, 1)[0], None, NOT_CUT),
    "the system's generator": (mlp, unseeded, rows(6, 1)[0], None, NOT_REPEATABLE),
}


@pytest.mark.filterwarnings("ignore:superbatch could not check")
@pytest.mark.parametrize("case", CASES)
def test_a_check_reports_whether_it_was_informative(case: str) -> None:
    make, loss, batch, weight, reason = CASES[case]
    model = make()
    checked = check_declaration(Problem(model, lambda mb: loss(model, mb), weight=weight), [batch])
    assert (checked.informative, checked.reason) == (not reason, reason)


def test_one_informative_micro_batch_is_enough() -> None:
    model = tiny_lm()
    problem = Problem(model, lambda mb: token_mean(model, mb), weight=count_tokens("labels"))
    alike, unequal = tokens([4] * 6), tokens(LENGTHS)
    assert not check_declaration(problem, [alike]).informative
    assert check_declaration(problem, [alike, unequal]).informative


def test_the_loss_without_hard_samples_has_a_zero_gradient() -> None:
    """The premise of "no hard sample": its loss and gradient are exactly 0."""
    model = mlp()
    loss = hinge(model, rows(6, 1)[0])
    assert loss == 0 and all(not g.any() for g in torch.autograd.grad(loss, list(model.parameters())))
