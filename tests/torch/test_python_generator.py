"""Python's generator is as before a window that failed, whatever it was drawn for between windows."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import NonFiniteError
from superbatch.torch import Accumulator, fastpaths

DRAWS = {
    "nothing": lambda: None,
    "a number": random.random,
    "a normal number, whose second one is held back": lambda: random.gauss(0.0, 1.0),
    "two normal numbers": lambda: [random.gauss(0.0, 1.0), random.gauss(0.0, 1.0)],
    "a new seed": lambda: random.seed(5),
    "more numbers than the state has words": lambda: [random.random() for _ in range(700)],
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    state = random.getstate()
    random.seed(0)
    yield
    random.setstate(state)


@pytest.fixture(params=["memory is compared", "memory is laid out otherwise"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "memory is laid out otherwise":
        monkeypatch.setattr(fastpaths, "python_memory", lambda: None)
    else:
        assert fastpaths.python_memory() is not None, "the premise: this interpreter's layout is known"


@pytest.mark.parametrize("between", DRAWS)
@pytest.mark.parametrize("inside", DRAWS)
@pytest.mark.usefixtures("layout")
def test_a_failed_window_leaves_the_generator_as_it_was(between: str, inside: str) -> None:
    model = nn.Linear(2, 1)
    factor = 1.0

    def loss_fn(x: Tensor) -> Tensor:
        DRAWS[inside]()
        return model(x).square().mean() * factor

    accumulate = Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, microbatch_size=2, check=False
    )
    for _ in range(3):
        DRAWS[between]()
        factor = 1.0
        accumulate(torch.ones(4, 2))
        DRAWS[between]()
        before = random.getstate()
        factor = float("nan")
        with pytest.raises(NonFiniteError):
            accumulate(torch.ones(4, 2))
        assert random.getstate() == before
        if inside != "nothing":
            loss_fn(torch.ones(1, 2))
            moved = random.getstate() != before
            assert moved or inside == "a new seed", "the premise: the loss draws"
            random.setstate(before)
