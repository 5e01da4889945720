"""Rare routine checks find denominators that depend on the model, which the data cannot show."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import CoupledSamplesError, LossSpecError
from superbatch.torch import Accumulator
from superbatch.torch.checks import check_schedule
from tests.torch.helpers import sgd

MICROBATCHES = 16
Loss = Callable[[nn.Module, Any], Tensor]


def batch_of(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * MICROBATCHES, 4, dtype=torch.float64, generator=generator)
    return x, (x[:, 0] + 0.5 * x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()


def each(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def hard_ones(model: nn.Module, batch: Any) -> Tensor:
    """Online hard example mining: before training, every sample is hard."""
    losses = each(model, batch)
    weights = torch.where(losses.detach() > 0.6, 1.0, 0.05).double()
    return (losses * weights).sum() / weights.sum()


def classes_in_microbatch(model: nn.Module, batch: Any) -> Tensor:
    """Weights by predicted class: before training, all predictions are class 0."""
    predicted = model(batch[0]).detach().argmax(1)
    weights = 1.0 + predicted.double()
    return (each(model, batch) * weights).sum() / weights.sum()


def by_confident_ones(model: nn.Module, batch: Any) -> Tensor:
    """A denominator that counts confident predictions: before training, there are none."""
    confident = (model(batch[0]).detach().softmax(1).amax(1) > 0.6).double()
    losses = each(model, batch)
    return losses.sum() / (len(losses) + confident.sum())


WRONG: dict[str, Loss] = {
    "hard examples": hard_ones,
    "class weights of predictions": classes_in_microbatch,
    "confident predictions": by_confident_ones,
}


def trained(loss: Loss, updates: int, **options: Any) -> tuple[Accumulator, list[int], nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, dtype=torch.float64)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    calls: list[int] = []

    def loss_fn(microbatch: Any) -> Tensor:
        calls.append(1)
        return loss(model, microbatch)

    accumulate = Accumulator(model, sgd(model.parameters()), loss_fn, **{"microbatch_size": 2, **options})
    calls_after = []
    for update in range(updates):
        assert accumulate(batch_of(update)).made
        calls_after.append(len(calls))
    return accumulate, calls_after, model


@pytest.mark.parametrize("case", WRONG)
def test_a_denominator_that_training_changes_is_found(case: str) -> None:
    with pytest.raises((LossSpecError, CoupledSamplesError), match="was not made") as raised:
        trained(WRONG[case], 250)
    found = re.search(r"Update (\d+), which .* from (\d+) on \(counted", str(raised.value))
    assert found is not None and int(found[2]) < int(found[1]) and int(found[1]) >= 10


@pytest.mark.parametrize("case", WRONG)
def test_mutant_without_routine_checks_finds_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_schedule, "ROUTINE", 10**9)
    assert trained(WRONG[case], 250)[0].updates == 250


@pytest.mark.parametrize("microbatch_size", [1, 2, 8])
def test_routine_checks_cost_at_most_one_percent_of_the_calls(microbatch_size: int) -> None:
    loss: Loss = lambda model, batch: each(model, batch).mean()  # noqa: E731
    accumulate, calls, _ = trained(loss, 600, microbatch_size=microbatch_size)
    per_window = 2 * MICROBATCHES // microbatch_size
    extra = [b - a - per_window for a, b in itertools.pairwise(calls)]
    checked = [window for window, number in enumerate(extra) if number]
    assert checked, "premise: the budget allows some checks"
    assert all(sum(extra[:end]) <= 0.01 * calls[end] for end in range(1, 600)), "after every update"
    assert all(b >= 2 * a for a, b in itertools.pairwise(checked))
    assert accumulate.updates == 600


def test_a_resumed_run_does_not_check_again_at_once() -> None:
    loss: Loss = lambda model, batch: each(model, batch).mean()  # noqa: E731
    accumulate, _, model = trained(loss, 120)
    assert (number := accumulate.state_dict()["check"]["routine"]) > 0
    resumed = Accumulator(model, sgd(model.parameters()), lambda mb: loss(model, mb), microbatch_size=2)
    resumed.load_state_dict(accumulate.state_dict())
    for update in range(5):
        resumed(batch_of(update))
    assert resumed.state_dict()["check"]["routine"] == number
    old = accumulate.state_dict()
    del old["check"]["routine"]
    resumed.load_state_dict(old)
    assert resumed.state_dict()["check"]["routine"] == 0
