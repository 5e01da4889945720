"""Edge cases of the seven rate policies: close drops, ends, large numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superbatch.caffe import SolverConfig, multistep_drops, parse_solver, rate_schedule
from superbatch.caffe.config import POLICIES
from superbatch.errors import InputError


def simulated(stepvalue: tuple[int, ...], updates: int) -> list[int]:
    """Simulate Caffe's loop: current_step_ rises by one if its value is reached (sgd_solver.cpp:47)."""
    current, found = 0, []
    for iteration in range(updates):
        if current < len(stepvalue) and iteration >= stepvalue[current]:
            current += 1
        found.append(current)
    return found


@given(st.lists(st.integers(-3, 12), max_size=6).map(tuple))
def test_multistep_equals_caffes_loop(stepvalue: tuple[int, ...]) -> None:
    drops = multistep_drops(stepvalue)
    assert [sum(drop <= update for drop in drops) for update in range(30)] == simulated(stepvalue, 30)


def test_close_drops_come_one_per_update() -> None:
    config = parse_solver('base_lr: 0.1 gamma: 0.5 lr_policy: "multistep" stepvalue: [2, 2, 3]')
    rate = rate_schedule(config)
    assert [round(rate(update), 6) for update in range(5)] == [0.1, 0.1, 0.05, 0.025, 0.0125]


def test_without_the_limit_of_one_per_update_the_rates_differ() -> None:
    """The mutant, torch's MultiStepLR, drops twice at update 2."""
    values = (2, 2, 3)
    at_once = [sum(value <= update for value in values) for update in range(5)]
    assert at_once != simulated(values, 5)


def test_poly_ends_where_training_ends() -> None:
    config = SolverConfig(base_lr=1.0, lr_policy="poly", power=0.5, max_iter=4)
    rate = rate_schedule(config)
    assert [rate(update) for update in (0, 3, 4, 5, 100)] == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert rate_schedule(SolverConfig(base_lr=1.0, lr_policy="poly", power=-1, max_iter=4))(4) == math.inf


def test_large_numbers_do_not_raise() -> None:
    grows = rate_schedule(SolverConfig(base_lr=1.0, lr_policy="exp", gamma=2.0))
    assert grows(10_000) == math.inf
    late = rate_schedule(SolverConfig(base_lr=1.0, lr_policy="sigmoid", gamma=1.0, stepsize=100_000))
    assert (late(0), late(10**9)) == (0.0, 1.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_rate_is_indexed_by_updates(policy: str) -> None:
    text = f'base_lr: 1 lr_policy: "{policy}" gamma: 0.5 stepsize: 2 max_iter: 9'
    rate = rate_schedule(parse_solver(text))
    assert rate(0) <= 1.0
    with pytest.raises(InputError, match="is not the index of an update"):
        rate(-1)
