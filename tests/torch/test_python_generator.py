"""A failed window restores Python's generator, whatever was drawn between windows."""

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
    "a normal number, with the second one cached": lambda: random.gauss(0.0, 1.0),
    "two normal numbers": lambda: [random.gauss(0.0, 1.0), random.gauss(0.0, 1.0)],
    "a new seed": lambda: random.seed(5),
    "more numbers than the state has words": lambda: [random.random() for _ in range(700)],
}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    state = random.getstate()
    random.seed(0)
    yield
    random.setstate(state)


@pytest.fixture(params=["known memory layout", "unknown memory layout"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "unknown memory layout":
        monkeypatch.setattr(fastpaths, "python_memory", lambda: None)
    else:
        assert fastpaths.python_memory() is not None, "premise: this interpreter's layout is known"


@pytest.mark.parametrize("between", DRAWS)
@pytest.mark.parametrize("inside", DRAWS)
@pytest.mark.usefixtures("layout")
def test_a_failed_window_restores_the_generator(between: str, inside: str) -> None:
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
            assert moved or inside == "a new seed", "premise: the loss draws"
            random.setstate(before)
