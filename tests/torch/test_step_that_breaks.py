"""An optimizer that raises: all is as before the window if its step had not begun, whatever its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from superbatch.errors import OutOfMemoryError
from superbatch.torch import Accumulator
from tests.torch.helpers import mlp, mse, rows, start_of

TEXT = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
AS_BEFORE, BEGUN = "everything else are as before the window", "the optimizer had begun"


class Breaking(torch.optim.Optimizer):
    """Momentum whose step may break, before or after `first` has done something."""

    first: Callable[[Breaking], None] | None = None

    def __init__(self, parameters: Any, *, in_place: bool = True) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.in_place = in_place

    def step(self, closure: Any = None) -> Any:
        if self.first is not None:
            self.first(self)
            raise RuntimeError(TEXT)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            momentum = state.get("momentum", torch.zeros_like(parameter)) * 0.9
            momentum = momentum + parameter.grad
            if self.in_place and "momentum" in state:
                state["momentum"].copy_(momentum)
            else:  # a new tensor, perhaps where the one of the last step lay
                state["momentum"] = momentum
            state["steps"] = state.get("steps", 0) + 1
            with torch.no_grad():
                parameter -= 0.1 * momentum


class OnlyTensors(Breaking):
    """Without the number of steps: its states are noted in a shorter way."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for state in self.state.values():
            state.pop("steps", None)


def last_state(optimizer: Breaking) -> dict[str, Any]:
    return optimizer.state[optimizer.param_groups[0]["params"][-1]]


def middle_state(optimizer: Breaking) -> dict[str, Any]:
    return optimizer.state[optimizer.param_groups[0]["params"][1]]


def replaced(state: dict[str, Any]) -> None:
    state["momentum"] = state["momentum"].clone()


UNMOVED: dict[str, Callable[[Breaking], None]] = {
    "nothing": lambda o: None,
    "a new value of a state": lambda o: last_state(o).update(new=torch.ones(2), number=3),
    "an option of a group": lambda o: o.param_groups[0].update(lr=7.0),
}
MOVED: dict[str, Callable[[Breaking], None]] = {
    "a state written": lambda o: middle_state(o)["momentum"].mul_(2),
    "the last state written": lambda o: last_state(o)["momentum"].mul_(2),
    "a state replaced": lambda o: replaced(middle_state(o)),
    "a state taken away": lambda o: middle_state(o).pop("momentum"),
}


def trained(optimizer_of: Callable[..., Breaking], updates: int) -> tuple[Any, Breaking, Accumulator, Any]:
    model = mlp()
    optimizer = optimizer_of(model.parameters())
    accumulate = Accumulator(model, optimizer, lambda mb: mse(model, mb), check=False, microbatch_size=4)
    batch = rows(8)[0]
    for _ in range(updates):
        assert accumulate(batch).made
    return model, optimizer, accumulate, batch


def values_of(optimizer: Breaking) -> list[Any]:
    """All of its state and options, tensors as copies."""
    plain = optimizer.state_dict()
    return [
        [
            {k: v.tolist() if isinstance(v, Tensor) else v for k, v in s.items()}
            for s in plain["state"].values()
        ],
        plain["param_groups"],
    ]


MAKERS = {
    "tensors and numbers": Breaking,
    "tensors": OnlyTensors,
    "new tensors at each step": lambda parameters: Breaking(parameters, in_place=False),
    "new tensors alone": lambda parameters: OnlyTensors(parameters, in_place=False),
}


@pytest.mark.parametrize("updates", [1, 2, 3])
@pytest.mark.parametrize("made", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("first", UNMOVED.values(), ids=UNMOVED)
def test_a_step_that_had_not_begun_leaves_all_as_before(first: Any, made: Any, updates: int) -> None:
    model, optimizer, accumulate, batch = trained(made, updates)
    before, state = start_of(model), values_of(optimizer)
    optimizer.first = first
    with pytest.raises(OutOfMemoryError, match=AS_BEFORE):
        accumulate(batch)
    assert values_of(optimizer) == state
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    optimizer.first = None
    assert accumulate(batch).made


@pytest.mark.parametrize("updates", [1, 2, 3])
@pytest.mark.parametrize("made", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("first", MOVED.values(), ids=MOVED)
def test_a_step_that_had_begun_is_said_to_have(first: Any, made: Any, updates: int) -> None:
    _, optimizer, accumulate, batch = trained(made, updates)
    optimizer.first = first
    with pytest.raises(OutOfMemoryError, match=BEGUN):
        accumulate(batch)


@pytest.mark.parametrize("made", MAKERS.values(), ids=MAKERS)
def test_a_loaded_state_is_noted_anew(made: Any) -> None:
    model, optimizer, accumulate, batch = trained(made, 3)
    optimizer.load_state_dict(optimizer.state_dict())
    state = values_of(optimizer)
    optimizer.first = UNMOVED["a new value of a state"]
    with pytest.raises(OutOfMemoryError, match=AS_BEFORE):
        accumulate(batch)
    assert values_of(optimizer) == state
    assert model is not None


def test_nothing_old_is_kept_alive_while_an_optimizer_makes_new_state() -> None:
    """Peak memory of such a step is that of a loop by hand."""
    import weakref

    alive: list[int] = []

    class Counting(OnlyTensors):
        def step(self, closure: Any = None) -> Any:
            old = [weakref.ref(state["momentum"]) for state in self.state.values()]
            super().step(closure)
            alive.append(sum(reference() is not None for reference in old))

    trained(lambda parameters: Counting(parameters, in_place=False), 3)
    assert alive == [0, 0, 0]
