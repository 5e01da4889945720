"""Optimizers that raise: a failure before their first write is rolled back, a later one reported."""

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
AS_BEFORE, BEGUN = "Everything is as before the window", "Memory ran out inside the optimizer.s step"


class FailingOptimizer(torch.optim.Optimizer):
    """Momentum optimizer whose step calls `first`, if set, and then fails."""

    first: Callable[[FailingOptimizer], None] | None = None

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
            else:  # a new tensor, perhaps at the address of the last one
                state["momentum"] = momentum
            state["steps"] = state.get("steps", 0) + 1
            with torch.no_grad():
                parameter -= 0.1 * momentum


class FailingTensorOptimizer(FailingOptimizer):
    """Variant without a step count, so the state holds only tensors."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for state in self.state.values():
            state.pop("steps", None)


def last_state(optimizer: FailingOptimizer) -> dict[str, Any]:
    return optimizer.state[optimizer.param_groups[0]["params"][-1]]


def middle_state(optimizer: FailingOptimizer) -> dict[str, Any]:
    return optimizer.state[optimizer.param_groups[0]["params"][1]]


def replace_momentum(state: dict[str, Any]) -> None:
    state["momentum"] = state["momentum"].clone()


ROLLED_BACK: dict[str, Callable[[FailingOptimizer], None]] = {
    "nothing": lambda o: None,
    "a new value of a state": lambda o: last_state(o).update(new=torch.ones(2), number=3),
    "an option of a group": lambda o: o.param_groups[0].update(lr=7.0),
}
REPORTED: dict[str, Callable[[FailingOptimizer], None]] = {
    "a parameter written": lambda o: o.param_groups[0]["params"][0].detach().mul_(2),
    "a state written": lambda o: middle_state(o)["momentum"].mul_(2),
    "the last state written": lambda o: last_state(o)["momentum"].mul_(2),
    "a state replaced": lambda o: replace_momentum(middle_state(o)),
    "a state removed": lambda o: middle_state(o).pop("momentum"),
}


def after_updates(
    optimizer_of: Callable[..., FailingOptimizer], updates: int
) -> tuple[Any, FailingOptimizer, Accumulator, Any]:
    model = mlp()
    optimizer = optimizer_of(model.parameters())
    accumulate = Accumulator(model, optimizer, lambda mb: mse(model, mb), check=False, microbatch_size=4)
    batch = rows(8)[0]
    for _ in range(updates):
        assert accumulate(batch).made
    return model, optimizer, accumulate, batch


def copied_state(optimizer: FailingOptimizer) -> list[Any]:
    """Return the state and options of an optimizer, with tensors copied."""
    plain = optimizer.state_dict()
    return [
        [
            {k: v.tolist() if isinstance(v, Tensor) else v for k, v in s.items()}
            for s in plain["state"].values()
        ],
        plain["param_groups"],
    ]


MAKERS = {
    "tensors and numbers": FailingOptimizer,
    "tensors": FailingTensorOptimizer,
    "new tensors at each step": lambda parameters: FailingOptimizer(parameters, in_place=False),
    "only new tensors at each step": lambda parameters: FailingTensorOptimizer(parameters, in_place=False),
}


@pytest.mark.parametrize("updates", [1, 2, 3])
@pytest.mark.parametrize("made", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("first", ROLLED_BACK.values(), ids=ROLLED_BACK)
def test_a_failure_before_the_first_write_is_rolled_back(first: Any, made: Any, updates: int) -> None:
    model, optimizer, accumulate, batch = after_updates(made, updates)
    before, state = start_of(model), copied_state(optimizer)
    optimizer.first = first
    with pytest.raises(OutOfMemoryError, match=AS_BEFORE):
        accumulate(batch)
    assert copied_state(optimizer) == state
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    optimizer.first = None
    assert accumulate(batch).made


@pytest.mark.parametrize("updates", [1, 2, 3])
@pytest.mark.parametrize("made", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("first", REPORTED.values(), ids=REPORTED)
def test_a_failure_after_the_first_write_is_reported(first: Any, made: Any, updates: int) -> None:
    _, optimizer, accumulate, batch = after_updates(made, updates)
    optimizer.first = first
    with pytest.raises(OutOfMemoryError, match=BEGUN):
        accumulate(batch)


@pytest.mark.parametrize("made", MAKERS.values(), ids=MAKERS)
def test_a_failure_after_load_state_dict_is_rolled_back(made: Any) -> None:
    model, optimizer, accumulate, batch = after_updates(made, 3)
    optimizer.load_state_dict(optimizer.state_dict())
    state = copied_state(optimizer)
    optimizer.first = ROLLED_BACK["a new value of a state"]
    with pytest.raises(OutOfMemoryError, match=AS_BEFORE):
        accumulate(batch)
    assert copied_state(optimizer) == state
    assert model is not None


def test_a_state_replaced_between_windows_is_no_change_of_the_step() -> None:
    model, optimizer, accumulate, batch = after_updates(FailingTensorOptimizer, 3)
    replace_momentum(middle_state(optimizer))
    before = start_of(model)
    optimizer.first = ROLLED_BACK["nothing"]
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
def test_a_state_that_cannot_be_compared_counts_as_changed(opaque: Any) -> None:
    _, optimizer, accumulate, batch = after_updates(FailingOptimizer, 2)
    key = optimizer.param_groups[0]["params"][1]
    optimizer.state[key] = opaque(optimizer.state[key])
    optimizer.first = ROLLED_BACK["nothing"]
    with pytest.raises(OutOfMemoryError, match=BEGUN):
        accumulate(batch)
    assert accumulate.updates == 2


def test_a_state_without_a_version_counter_counts_as_changed() -> None:
    _, optimizer, accumulate, batch = after_updates(FailingOptimizer, 1)
    with torch.inference_mode():
        last_state(optimizer)["more"] = torch.ones(2)
    assert accumulate(batch).made and accumulate(batch).made
    optimizer.first = ROLLED_BACK["nothing"]
    with pytest.raises(OutOfMemoryError, match=BEGUN):
        accumulate(batch)


def test_a_failure_of_the_optimizer_after_a_fused_one_is_reported() -> None:
    first, second = mlp(), mlp()
    fused = torch.optim.SGD(first.parameters(), lr=0.1, fused=True)
    breaking = FailingOptimizer(second.parameters())
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
    breaking.first = ROLLED_BACK["nothing"]
    with pytest.raises(OutOfMemoryError, match=BEGUN):
        accumulate(batch)
    assert not all(torch.equal(before[name], value) for name, value in first.named_parameters()), "premise"


def test_a_failure_of_a_hook_after_a_fused_step_is_reported() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    accumulate = Accumulator(model, optimizer, lambda mb: mse(model, mb), check=False, microbatch_size=4)
    before = start_of(model)

    def breaks(*_: Any) -> None:
        raise RuntimeError(TEXT)

    optimizer.register_step_post_hook(breaks)
    with pytest.raises(OutOfMemoryError, match=BEGUN):
        accumulate(rows(8)[0])
    assert not all(torch.equal(before[name], value) for name, value in model.named_parameters()), "premise"


def test_a_failing_step_that_adds_a_group_is_reported() -> None:
    _, optimizer, accumulate, batch = after_updates(FailingOptimizer, 1)

    def grow(o: FailingOptimizer) -> None:
        o.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.1})

    optimizer.first = grow
    with pytest.raises(OutOfMemoryError, match=BEGUN):
        accumulate(batch)


@pytest.mark.parametrize("made", MAKERS.values(), ids=MAKERS)
def test_no_optimizer_state_is_kept_alive_between_windows(made: Any) -> None:
    _, optimizer, accumulate, batch = after_updates(made, 2)
    other = last_state(optimizer)["more"] = NotATensor()
    assert accumulate(batch).made
    held = [weakref.ref(other), *(weakref.ref(s["momentum"]) for s in optimizer.state.values())]
    del other
    optimizer.state.clear()
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)


class NotATensor:
    """Optimizer state that is no tensor."""


def test_replaced_state_is_freed_during_the_step() -> None:
    """Such a step has the peak memory of a hand-written loop."""
    alive: list[int] = []

    class Counting(FailingTensorOptimizer):
        def step(self, closure: Any = None) -> Any:
            old = [weakref.ref(state["momentum"]) for state in self.state.values()]
            super().step(closure)
            alive.append(sum(reference() is not None for reference in old))

    after_updates(lambda parameters: Counting(parameters, in_place=False), 3)
    assert alive == [0, 0, 0]


def test_out_of_memory_in_the_savepoint_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, accumulate, batch = after_updates(FailingOptimizer, 2)
    before, state = start_of(model), copied_state(optimizer)
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
    assert torch.equal(torch.get_rng_state(), random) and copied_state(optimizer) == state
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    assert accumulate(batch).made
