"""Solvers with subtle errors: the golden trajectories must reject each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from superbatch.caffe import SolverConfig, rates
from superbatch.torch.caffe import CaffeSolver, rules, solver
from tests.caffe import golden

Mutate = Callable[[pytest.MonkeyPatch], None]


def rule(name: str, mutant: rules.Rule) -> Mutate:
    return lambda patch: patch.setitem(rules.RULES, name, (mutant, rules.RULES[name][1]))


def factor(name: str, mutant: Callable[[SolverConfig], Callable[[int], float]]) -> Mutate:
    return lambda patch: patch.setitem(rates._FACTORS, name, mutant)  # pyright: ignore[reportPrivateUsage]  (the mutant's place)


def rate_outside(gradient: Tensor, history: dict[str, Tensor], group: Any, iteration: int) -> Tensor:
    """torch.optim.SGD: the rate multiplies the whole buffer."""
    return history["history"].mul_(group["momentum"]).add_(gradient) * group["lr"]


def nesterov_as_in_papers(gradient: Tensor, history: dict[str, Tensor], group: Any, iteration: int) -> Tensor:
    """Nesterov's update as in papers: it does not subtract the previous momentum step."""
    history["history"].mul_(group["momentum"]).add_(gradient, alpha=group["lr"])
    return (1 + group["momentum"]) * history["history"]


def adam_of_torch(gradient: Tensor, history: dict[str, Tensor], group: Any, iteration: int) -> Tensor:
    """Adam of torch: delta is added to the bias-corrected root."""
    rules.adam(gradient, history, group, iteration)
    count = iteration + 1
    root = (history["squares"] / (1 - group["momentum2"] ** count)).sqrt()
    mean = history["history"] / (1 - group["momentum"] ** count)
    return group["lr"] * mean / (root + group["delta"])


def delta_inside(gradient: Tensor, history: dict[str, Tensor], group: Any, iteration: int) -> Tensor:
    history["history"].addcmul_(gradient, gradient)
    return group["lr"] * gradient / (history["history"] + group["delta"]).sqrt()


def adadelta_forgetful(gradient: Tensor, history: dict[str, Tensor], group: Any, iteration: int) -> Tensor:
    """AdaDelta whose average of updates decays by 1/1000 more at each update."""
    update = rules.adadelta(gradient, history, {**group, "lr": 1.0}, iteration)
    history["updates"].mul_(0.999)
    return update * group["lr"]


def rms_unaveraged(gradient: Tensor, history: dict[str, Tensor], group: Any, iteration: int) -> Tensor:
    history["history"].mul_(group["rms_decay"]).addcmul_(gradient, gradient)
    return group["lr"] * gradient / (history["history"].sqrt() + group["delta"])


MUTANTS: dict[str, tuple[str, Mutate]] = {
    "the rate outside the momentum buffer (step)": (
        "lr_policy:linear/SGD/step/iter_size=4",
        rule("SGD", rate_outside),
    ),
    "the rate outside the momentum buffer (exp)": (
        "lr_policy:linear/SGD/exp/iter_size=1",
        rule("SGD", rate_outside),
    ),
    "Nesterov without the step back": (
        "solver_type:linear/Nesterov/iter_size=1",
        rule("Nesterov", nesterov_as_in_papers),
    ),
    "Adam's delta as in torch": ("solver_type:linear/Adam/iter_size=4", rule("Adam", adam_of_torch)),
    "AdaGrad's delta inside the root": (
        "solver_type:lenet/AdaGrad/iter_size=1",
        rule("AdaGrad", delta_inside),
    ),
    "AdaDelta's average of updates": (
        "solver_type:linear/AdaDelta/iter_size=1",
        rule("AdaDelta", adadelta_forgetful),
    ),
    "RMSProp without 1 - decay": ("solver_type:linear/RMSProp/iter_size=1", rule("RMSProp", rms_unaveraged)),
    "inv in double precision": (
        "lr_policy:linear/SGD/inv/iter_size=1",
        factor("inv", lambda config: lambda update: (1 + config.gamma * update) ** -config.power),
    ),
    "step counted from one": (
        "lr_policy:linear/SGD/step/iter_size=1",
        factor("step", lambda config: lambda update: config.gamma ** ((update + 1) // config.stepsize)),
    ),
    "parameters in double precision": (
        "lr_policy:linear/SGD/exp/iter_size=4",
        factor("exp", lambda config: lambda update: 0.9**update),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, mutate = MUTANTS[name]
    mutate(monkeypatch)
    found = golden.train(golden.cases()[case])
    assert found.worst > golden.TOLERANCE, found


def _train_groups(change: Callable[[list[dict[str, Any]]], Any]) -> golden.Trained:
    def make(config: SolverConfig, groups: list[dict[str, Any]]) -> CaffeSolver:
        change(groups)
        return solver(config, groups)

    return golden.train(golden.cases()["lr_policy:linear/SGD/fixed/iter_size=4"], make)


def test_missing_multipliers_are_found() -> None:
    assert _train_groups(lambda groups: None).worst <= golden.TOLERANCE, "the premise"
    for name in ("lr_mult", "decay_mult"):
        assert _train_groups(lambda groups, name=name: groups[1].pop(name)).weights > 1e-6


def test_another_decay_or_an_undivided_sum_is_found() -> None:
    case = golden.cases()["lr_policy:linear/SGD/fixed/iter_size=4"]
    text = case["solver_prototxt"].replace("weight_decay: 0.01", "weight_decay: 0.04")
    assert golden.train(case, text=text).weights > 1e-4
    model = golden.net(case)
    made = solver(golden.parse_solver(case["solver_prototxt"]), golden.groups(model, case))
    loss_fn, read = golden.loss_of(model), golden.microbatches(case)
    for _ in range(4):
        loss_fn(next(read)).backward()  # the sum of a hand-written loop without division
    made.optimizer.step()
    assert golden.largest_difference(list(model.parameters()), case["iterations"][0]["weights"]) > 0.01
    assert not torch.equal(next(model.parameters()), next(golden.net(case).parameters()))
