"""Trajectories computed by Caffe, and the same nets in torch."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.caffe import SolverConfig, parse_solver
from superbatch.torch import Accumulator, windows
from superbatch.torch.caffe import CaffeSolver, solver

DATA = Path(__file__).parent / "data"
TOLERANCE = 1e-15


@functools.cache
def cases() -> dict[str, dict[str, Any]]:
    """Return every trajectory by its name."""
    found: dict[str, dict[str, Any]] = {}
    for name in ("lr_policy", "solver_type"):
        for case in json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))["cases"]:
            found[f"{name}:{case['case']}"] = case
    return found


def net(case: dict[str, Any]) -> nn.Module:
    """Return the net of a case in float64 with its initial weights."""
    if case["net"] == "linear":
        model: nn.Module = nn.Linear(4, 3)
    else:
        # Caffe: convolution 3x3 to 2 channels, max pooling 2x2, ReLU, inner product.
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3))
    model.double()
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), case["initial_weights"], strict=True):
            parameter.copy_(torch.tensor(values, dtype=torch.float64).view(parameter.shape))
    return model


def groups(model: nn.Module, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a parameter group for each blob, with its multipliers."""
    return [
        {"params": [parameter], "lr_mult": rate, "decay_mult": decay}
        for parameter, rate, decay in zip(
            model.parameters(), case["lr_mult"], case["decay_mult"], strict=True
        )
    ]


def microbatches(case: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the micro-batches of the data layer: rows in order, in an endless cycle."""
    data = torch.tensor(case["inputs"]["data"], dtype=torch.float64)
    labels = torch.tensor(case["inputs"]["label"], dtype=torch.int64)
    rows = itertools.cycle(range(len(data)))
    while True:
        chosen = list(itertools.islice(rows, case["batch_size"]))
        yield data[chosen], labels[chosen]


def loss_of(model: nn.Module) -> Callable[[Any], Tensor]:
    return lambda microbatch: nn.functional.cross_entropy(model(microbatch[0]), microbatch[1])


@dataclass(frozen=True)
class Trained:
    """Largest differences of a run from Caffe, by kind."""

    weights: float
    rates: float
    losses: float
    smoothed: float
    histories: float

    @property
    def worst(self) -> float:
        return max(self.weights, self.rates, self.losses, self.smoothed, self.histories)


def train(
    case: dict[str, Any],
    make: Callable[[SolverConfig, list[dict[str, Any]]], CaffeSolver] = solver,
    text: str | None = None,
) -> Trained:
    """Train by a solver with the Accumulator on windows, and compare every update."""
    model = net(case)
    caffe = make(parse_solver(text or case["solver_prototxt"]), groups(model, case))
    accumulate = Accumulator(model, caffe.optimizer, loss_of(model), scheduler=caffe.scheduler)
    weights = rates = losses = smoothed = 0.0
    moved = case["initial_weights"]
    for expected, window in zip(
        case["iterations"], windows(microbatches(case), caffe.accumulation_steps), strict=False
    ):
        assert len(window) == caffe.config.iter_size
        update = accumulate(window)
        rates = max(rates, abs(update.learning_rates[0] - expected["lr"]))
        losses = max(losses, abs(update.loss - expected["loss"]))
        smoothed = max(smoothed, abs(caffe.smoothed_loss.add(update.loss) - expected["smoothed_loss"]))
        weights = max(weights, largest_difference(list(model.parameters()), expected["weights"]))
        assert expected["weights"] != moved, "the premise: Caffe's weights have moved"
        moved = expected["weights"]
    assert accumulate.updates == len(case["iterations"]) == 8
    return Trained(
        weights, rates, losses, smoothed, largest_difference(histories(caffe, model), case["history"])
    )


def histories(caffe: CaffeSolver, model: nn.Module) -> list[Tensor]:
    """Return the solver's state in the order of Caffe's snapshots: each kind for all parameters."""
    states = [caffe.optimizer.state[parameter] for parameter in model.parameters()]
    return [state[name] for name in states[0] for state in states]


def largest_difference(actual: Sequence[Tensor], expected: list[list[float]]) -> float:
    """Return the largest difference of an element: absolute, or relative for numbers above 1."""
    largest = 0.0
    for tensor, values in zip(actual, expected, strict=True):
        wanted = torch.tensor(values, dtype=torch.float64)
        assert wanted.abs().max() > 0
        difference = (tensor.detach().flatten() - wanted).abs() / wanted.abs().clamp(min=1.0)
        largest = max(largest, float(difference.max()))
    return largest
