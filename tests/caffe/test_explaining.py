"""Explanation of a solver file: its program trains as Caffe does, and its warnings are right."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from superbatch.caffe import SolverConfig, explain_solver, parse_solver
from superbatch.caffe.config import POLICIES, TYPES, float32
from superbatch.errors import InputError
from superbatch.lab.report.caffe_text import findings, settings_table
from superbatch.lab.report.json import to_json
from superbatch.results.caffe import CaffeExplained
from tests.caffe import golden
from tests.caffe.test_options import both, data_of, largest, model_of
from tests.report_json import from_json

CASES = golden.cases()


def program(config: SolverConfig) -> dict[str, Any]:
    """Return the names that the generated program defines."""
    names: dict[str, Any] = {"__name__": "train"}
    exec(compile(explain_solver(config).code, "train.py", "exec"), names)
    return names


@pytest.mark.parametrize("name", CASES)
def test_the_program_trains_as_caffe(name: str) -> None:
    case = CASES[name]
    model = golden.net(case)
    train = program(parse_solver(case["solver_prototxt"]))["train"]
    given = {"lr_mult": case["lr_mult"], "decay_mult": case["decay_mult"]}
    train(model.parameters(), golden.loss_of(model), golden.microbatches(case), **given)
    last = case["iterations"][-1]["weights"]
    assert golden.largest_difference(list(model.parameters()), last) <= golden.TOLERANCE


@pytest.mark.parametrize("norm", ["L1", "L2"])
@pytest.mark.parametrize("kind", TYPES)
def test_the_program_clips_and_decays_as_caffe(kind: Any, norm: Any) -> None:
    config = SolverConfig(
        type=kind,
        base_lr=0.1,
        lr_policy="fixed",
        max_iter=5,
        weight_decay=0.03,
        regularization_type=norm,
        clip_gradients=0.3,
        iter_size=3,
        delta=1e-3,
    )
    parts = data_of([4] * 3)
    ours, _ = both(config, parts)
    model = model_of()

    def loss_fn(part: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(part[0]), part[1])

    given = {"lr_mult": [1.0, 2.0, 0.5, 1.0], "decay_mult": [1.0, 0.0, 2.0, 1.0]}
    program(config)["train"](model.parameters(), loss_fn, itertools.cycle(parts), **given)
    assert largest(model, ours) <= 1e-13
    assert largest(model, model_of()) > 1e-4


def stock_apart(case: dict[str, Any], config: SolverConfig) -> float:
    """Return the final difference between the named torch optimizer and Caffe, both without multipliers."""
    said = explain_solver(config).stock
    stock, theirs = golden.net(case), golden.net(case)
    names = {"torch": torch, "math": math, "parameters": stock.parameters()}
    # The settings are rounded as in Caffe, so only arithmetic can differ.
    in_float32 = re.sub(
        r"(?<==)[\d.]+(e-\d+)?", lambda number: repr(float32(float(number[0]))), said.optimizer
    )
    names["optimizer"] = optimizer = eval(in_float32, names)
    scheduler = eval(said.scheduler, names) if said.scheduler else None
    read, loss_fn = golden.microbatches(case), golden.loss_of(stock)
    for _ in range(8):
        optimizer.zero_grad()
        for _ in range(config.iter_size):
            (loss_fn(next(read)) / config.iter_size).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    program(config)["train"](theirs.parameters(), golden.loss_of(theirs), golden.microbatches(case))
    return largest(stock, theirs)


@pytest.mark.parametrize("name", CASES)
def test_the_claim_about_stock_torch_is_true(name: str) -> None:
    """Stock torch equals Caffe to the last digits if the report says so, and differs otherwise."""
    config = parse_solver(CASES[name]["solver_prototxt"])
    difference = stock_apart(CASES[name], config)
    if explain_solver(config).stock.same:
        assert difference <= golden.TOLERANCE
    else:
        assert config.type == "Adam" or config.lr_policy != "fixed"
        assert difference > 1e-6


@pytest.mark.parametrize("policy", POLICIES)
def test_stock_schedulers_have_the_rates(policy: Any) -> None:
    config = SolverConfig(
        base_lr=0.1,
        lr_policy=policy,
        gamma=0.5,
        power=2.0,
        stepsize=3,
        stepvalue=(2, 5, 5),
        max_iter=9,
    )
    report = explain_solver(config)
    names = {"torch": torch, "math": math, "parameters": [nn.Parameter(torch.zeros(1))]}
    names["optimizer"] = optimizer = eval(report.stock.optimizer, names)
    scheduler = eval(report.stock.scheduler, names) if report.stock.scheduler else None
    rates = []
    for _ in range(9):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    assert report.at == tuple(range(9))
    assert rates == pytest.approx(report.rates, rel=1e-6)
    assert (policy == "fixed") == (len(set(report.rates)) == 1)


def test_stock_torch_differs_by_the_documented_amounts() -> None:
    """Differences measured on this net."""
    step = CASES["lr_policy:linear/SGD/step/iter_size=1"]
    adam = CASES["solver_type:linear/Adam/iter_size=1"]
    assert stock_apart(step, parse_solver(step["solver_prototxt"])) == pytest.approx(0.108, abs=0.001)
    assert stock_apart(adam, parse_solver(adam["solver_prototxt"])) == pytest.approx(1.2e-6, rel=0.1)


def explained(text: str, **options: Any) -> CaffeExplained:
    return explain_solver(parse_solver(text), **options)


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("clip_gradients: 8 iter_size: 4", "clip_gradients", "clipped at 2, 4 times tighter than 8"),
        ("clip_gradients: 0", "clip_gradients", "0 makes every gradient zero"),
        ("iter_size: 2", "iter_size", "a mean of means"),
        ("type: 'Adam'", "momentum", "beta1 is the momentum, which is 0"),
        ("type: 'AdaDelta'", "momentum", "(rho) is the momentum, which is 0"),
        ("test_iter: 10", "test_interval", "Caffe refuses to start"),
        ("train_net: 'x'", "net", "exactly one of net, net_param"),
    ],
)
def test_a_trap_is_named(text: str, field: str, said: str) -> None:
    clean = 'net: "n" base_lr: 0.1 lr_policy: "fixed" max_iter: 100 '
    assert explained(clean).traps == (), "the premise"
    assert any(trap.field == field and said in trap.text for trap in explained(clean + text).traps)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('lr_policy: "multistep" gamma: 0.1 stepvalue: [20, 20, 30]', "order of the file: 20 happens at 21"),
        ('lr_policy: "multistep" gamma: 0.1 stepvalue: [20, 100]', "100 will not be reached"),
        ('lr_policy: "step" gamma: 0.1 stepsize: 100', "the first drop, at 100, will not be reached"),
        ('lr_policy: "exp"', "the rate becomes 0 at the first drop"),
    ],
)
def test_a_trap_of_the_rate_is_named(text: str, said: str) -> None:
    (trap,) = explained(f'net: "n" base_lr: 0.1 max_iter: 100 {text}').traps
    assert said in trap.text


def test_a_solver_that_learns_nothing_is_reported() -> None:
    traps = explained('net: "n" lr_policy: "fixed"').traps
    assert [trap.field for trap in traps] == ["base_lr", "max_iter"]


def test_batch_updates_and_samples() -> None:
    text = 'net: "n" base_lr: 0.1 lr_policy: "step" gamma: 0.5 stepsize: 3000 max_iter: 9000 iter_size: 4'
    report = explained(text, microbatch_size=16, source="my.prototxt")
    assert (report.accumulation_steps, report.effective_batch) == (4, 64)
    assert (report.updates, report.samples) == (9000, 576_000)
    assert {2999, 3000, 5999, 6000, 0, 8999} <= set(report.at)
    title = "my.prototxt: 9000 updates of 64 samples (4 micro-batches of 16), SGD, rate step"
    assert settings_table(report).title == title
    said = {setting.field: setting.meaning for setting in report.settings}
    assert said["iter_size"] == "accumulation_steps=4, an effective batch of 64"
    assert said["max_iter"] == "9000 updates, 576000 samples"
    assert explained(text).samples is None
    assert from_json(CaffeExplained, to_json(report)) == report
    with pytest.raises(InputError, match=r"^microbatch_size=0"):
        explained(text, microbatch_size=0)


def test_sentences_end_with_how_to_train() -> None:
    report = explained('net: "n" base_lr: 0.1 lr_policy: "fixed" max_iter: 9')
    same, train = findings(report)
    assert (
        same
        == "Stock torch is the same, on the mean gradient: torch.optim.SGD(parameters, lr=0.1, momentum=0)."
    )
    assert train.startswith('To train with it: superbatch.torch.caffe.solver(read_solver("solver")')
    differs = findings(dataclasses.replace(report, stock=dataclasses.replace(report.stock, differs=("so",))))
    assert "It differs: so." in differs
