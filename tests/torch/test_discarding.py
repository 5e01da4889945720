"""Discarding a loaded window restores the training before that window."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import WindowError
from superbatch.torch import Accumulator
from tests.torch.helpers import rows


class WithRunningMean(nn.Module):
    """A layer with a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3).double()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(), alpha=0.1)
        return self.layer(x)


def training(into: Any) -> tuple[WithRunningMean, torch.optim.SGD, Accumulator]:
    model = WithRunningMean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accumulate = Accumulator(
        model, optimizer, lambda b: loss(model, b), microbatch_size=2, gradient_sum=into, check=False
    )
    return model, optimizer, accumulate


def loss(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def saved_in_flight(into: Any, updates: int) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Return states saved inside a window, the state of the model before the window, and the batches."""
    model, optimizer, accumulate = training(into)
    batches = rows(8, updates=4)
    for batch in batches[:updates]:
        accumulate(batch)
    before = copy.deepcopy(model.state_dict())
    saved: list[Any] = []
    with accumulate.window(batches[updates]) as window:
        for index, microbatch in enumerate(window):
            window.backward(loss(model, microbatch))
            if index == 1:
                saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), accumulate.state_dict()])
                break
    return dict(zip(("model", "optimizer", "accumulate"), saved, strict=True)), before, batches


@pytest.mark.parametrize("into", ["auto", "momentum"])
@pytest.mark.parametrize("updates", [0, 2])
def test_the_next_update_is_that_of_a_training_without_the_window(into: Any, updates: int) -> None:
    saved, before, batches = saved_in_flight(into, updates)
    reference, _, by_hand = training(into)
    for batch in [*batches[:updates], batches[3]]:
        by_hand(batch)

    model, optimizer, accumulate = training(into)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    accumulate.load_state_dict(saved["accumulate"])
    assert not torch.equal(model.mean, before["mean"]), "premise: the window changed the buffer"
    accumulate.discard()
    assert torch.equal(model.mean, before["mean"])
    accumulate(batches[3])
    for name, parameter in reference.named_parameters():
        assert torch.allclose(dict(model.named_parameters())[name], parameter, rtol=1e-12), name


def test_a_window_of_other_parameters_is_refused_and_nothing_changes() -> None:
    saved, _, _ = saved_in_flight("momentum", 1)
    gradients = saved["accumulate"]["window"]["gradients"]
    gradients["before"] = {"other": next(iter(gradients["before"].values()))}
    del saved["accumulate"]["window"]["digest"]
    model, _, accumulate = training("momentum")
    accumulate.load_state_dict(saved["accumulate"])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(WindowError, match="momentum buffer of 'other', which is not a parameter here"):
        accumulate.discard()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_mutant_without_restoring_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("superbatch.torch.window.engine.discard_saved", lambda state, plan: None)
    with pytest.raises(AssertionError):
        test_the_next_update_is_that_of_a_training_without_the_window("momentum", 2)
