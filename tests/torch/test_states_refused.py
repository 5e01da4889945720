"""Unreadable states and arguments that are no numbers raise InputError and change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from superbatch import NoiseMeter
from superbatch.errors import InputError
from superbatch.torch import Accumulator
from superbatch.torch.tuning import rescale
from superbatch.tuning.growing import grow_batch

SIZES: dict[str, Any] = {
    "no fields": {"Fixed": {}},
    "a number": {"Fixed": 3},
    "no mapping": 3,
    "windows without waits": {"of windows": {"most": None}},
    "a size as a string": {"Fixed": {"most": "many", "wait": 1, "until": 2}},
    "waits as strings": {"Fixed": {"most": None, "wait": "a", "until": "b"}},
}


def accumulator(**options: Any) -> Accumulator:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Accumulator(model, optimizer, lambda x: model(x).mean(), microbatch_size=2, **options)


@pytest.mark.parametrize("sizing", SIZES.values(), ids=SIZES)
def test_unreadable_sizes_raise(sizing: Any) -> None:
    accumulate = accumulator(observers=[NoiseMeter()])
    for _ in range(3):
        accumulate(torch.randn(4, 2))
    before, other = accumulate.state_dict(), accumulator(observers=[NoiseMeter()])
    other(torch.randn(4, 2))
    assert other.state_dict() != before, "premise: the states differ"
    with pytest.raises(InputError, match=r"The micro-batch sizes in the saved state cannot be read"):
        accumulate.load_state_dict({**other.state_dict(), "sizing": sizing})
    assert accumulate.state_dict() == before


def test_sizes_are_unchanged_if_the_noise_is_unreadable() -> None:
    accumulate = accumulator(observers=[NoiseMeter()])
    accumulate(torch.randn(4, 2))
    before = accumulate.state_dict()
    failed = {"most": 1, "wait": 100, "until": 50}
    state = {**before, "sizing": {"Fixed": failed, "of windows": failed}}
    with pytest.raises(InputError):
        accumulate.load_state_dict({**state, "noise": {"beta": "none"}})
    assert accumulate.state_dict() == before
    accumulate.load_state_dict(state)
    assert accumulate.state_dict()["sizing"] == state["sizing"], "premise: the state itself is readable"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("32", 64), "from_batch='32'"),
        ((32, None), "to_batch=None"),
        ((32, [64]), r"to_batch=\[64\]"),
        ((32, 64, "noisy"), "noise='noisy'"),
    ],
)
def test_rescale_raises_on_arguments_that_are_no_numbers(arguments: tuple[Any, ...], text: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(InputError, match=text):
        rescale(optimizer, *arguments)
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(InputError, match=r"^rescale\(\) cannot scale an optimizer of type int"):
        rescale(3, 32, 64)  # type: ignore[arg-type]  (the case tested)


@pytest.mark.parametrize("factor", [0.1, None, "halves", lambda samples: "0.5", lambda samples: None])
def test_a_schedule_that_returns_no_number_raises(factor: Any) -> None:
    text = "The rate schedule returns .* at sample 0" if callable(factor) else "factor=.* is not callable"
    with pytest.raises(InputError, match=rf"^{text}\. Pass a function of the samples"):
        grow_batch(factor, batch=4, microbatch=2)  # type: ignore[arg-type]  (the case tested)


def test_an_error_inside_a_schedule_propagates_unchanged() -> None:
    def broken(samples: float) -> float:
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        grow_batch(broken, batch=4, microbatch=2)
