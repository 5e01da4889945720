"""An optimizer that raises: all is as before the window if its step had not begun, whatever its state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from superbatch.errors import OutOfMemoryError
from superbatch.torch import Accumulator
from tests.torch.helpers import mlp, mse, rows, start_of

TEXT = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
AS_BEFORE, BEGUN = "All is as before the window", "Memory ran out inside the optimizer.s step"


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
    "a parameter written": lambda o: o.param_groups[0]["params"][0].detach().mul_(2),
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


def test_a_state_replaced_between_windows_is_noted_anew() -> None:
    model, optimizer, accumulate, batch = trained(OnlyTensors, 3)
    replaced(middle_state(optimizer))
    before = start_of(model)
    optimizer.first = UNMOVED["nothing"]
    with pytest.raises(OutOfMemoryError, match=AS_BEFORE):
        accumulate(batch)
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())


OPAQUE: dict[str, Callable[[Any], Any]] = {
    "a dict in a state": lambda state: {**state, "more": {"m": torch.ones(2)}},
    "a list in a state": lambda state: {**state, "more": [torch.ones(2)]},
    "an object": lambda state: Opaque(),
    "nothing": lambda state: None,
}


class Opaque:
    pass


@pytest.mark.parametrize("opaque", OPAQUE.values(), ids=OPAQUE)
def test_where_a_change_would_not_be_seen_it_is_not_said_that_there_is_none(opaque: Any) -> None:
    _, optimizer, accumulate, batch = trained(Breaking, 2)
    key = optimizer.param_groups[0]["params"][1]
    optimizer.state[key] = opaque(optimizer.state[key])
    optimizer.first = UNMOVED["nothing"]
    with pytest.raises(OutOfMemoryError, match=BEGUN):
        accumulate(batch)
    assert accumulate.updates == 2


def test_a_state_without_a_version_counter() -> None:
    _, optimizer, accumulate, batch = trained(Breaking, 1)
    with torch.inference_mode():
        last_state(optimizer)["more"] = torch.ones(2)
    assert accumulate(batch).made and accumulate(batch).made
    optimizer.first = UNMOVED["nothing"]
    with pytest.raises(OutOfMemoryError, match=BEGUN):
        accumulate(batch)


def test_a_fused_step_before_another_optimizer_that_breaks() -> None:
    first, second = mlp(), mlp()
    fused = torch.optim.SGD(first.parameters(), lr=0.1, fused=True)
    breaking = Breaking(second.parameters())
    accumulate = Accumulator(
        [first, second],
        [fused, breaking],
        lambda mb: mse(first, mb) + mse(second, mb),
        check=False,
        microbatch_size=4,
    )
    batch = rows(8)[0]
    accumulate(batch)
    before = start_of(first)
    breaking.first = UNMOVED["nothing"]
    with pytest.raises(OutOfMemoryError, match=BEGUN):
        accumulate(batch)
    assert not all(torch.equal(before[name], value) for name, value in first.named_parameters()), (
        "the premise"
    )


def test_a_hook_after_a_fused_step_that_breaks() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    accumulate = Accumulator(model, optimizer, lambda mb: mse(model, mb), check=False, microbatch_size=4)
    before = start_of(model)

    def breaks(*_: Any) -> None:
        raise RuntimeError(TEXT)

    optimizer.register_step_post_hook(breaks)
    with pytest.raises(OutOfMemoryError, match=BEGUN):
        accumulate(rows(8)[0])
    assert not all(torch.equal(before[name], value) for name, value in model.named_parameters()), (
        "the premise"
    )


def test_a_step_that_adds_a_group_and_breaks_says_why() -> None:
    _, optimizer, accumulate, batch = trained(Breaking, 1)

    def grow(o: Breaking) -> None:
        o.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.1})

    optimizer.first = grow
    with pytest.raises(OutOfMemoryError, match=BEGUN):
        accumulate(batch)


@pytest.mark.parametrize("made", MAKERS.values(), ids=MAKERS)
def test_between_windows_no_state_is_kept_alive(made: Any) -> None:
    _, optimizer, accumulate, batch = trained(made, 2)
    other = last_state(optimizer)["more"] = Counted()
    assert accumulate(batch).made
    held = [weakref.ref(other), *(weakref.ref(s["momentum"]) for s in optimizer.state.values())]
    del other
    optimizer.state.clear()
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)


class Counted:
    """Something in a state that is no tensor."""


def test_nothing_old_is_kept_alive_while_an_optimizer_makes_new_state() -> None:
    """Peak memory of such a step is that of a loop by hand."""
    alive: list[int] = []

    class Counting(OnlyTensors):
        def step(self, closure: Any = None) -> Any:
            old = [weakref.ref(state["momentum"]) for state in self.state.values()]
            super().step(closure)
            alive.append(sum(reference() is not None for reference in old))

    trained(lambda parameters: Counting(parameters, in_place=False), 3)
    assert alive == [0, 0, 0]


def test_where_there_is_no_memory_to_note_anything_nothing_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, accumulate, batch = trained(Breaking, 2)
    before, state = start_of(model), values_of(optimizer)
    random = torch.get_rng_state()

    def loss_fn(mb: Any) -> Tensor:
        torch.rand(())
        return mse(model, mb)

    accumulate = Accumulator(model, optimizer, loss_fn, check=False, microbatch_size=4)

    def fails(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("superbatch.torch.window.before_step.BeforeStep.savepoint", fails)
    with pytest.raises(OutOfMemoryError, match=AS_BEFORE):
        accumulate(batch)
    monkeypatch.undo()
    assert torch.equal(torch.get_rng_state(), random) and values_of(optimizer) == state
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    assert accumulate(batch).made
