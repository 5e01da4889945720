"""State of each kind that changes in the first or a later window, in which memory runs out."""

from __future__ import annotations

import copy
import re
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from superbatch.torch import Accumulator
from superbatch.torch.window.participants import kept_tensors, reached
from superbatch.torch.window.participants.last_inspection import LastInspection

F64 = torch.float64
SAMPLES = 8


class Slots:
    """An object without a `__dict__`."""

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value


class Holder(nn.Module):
    """A module with one number."""

    value: Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("value", torch.tensor(value, dtype=F64))


def _set_slot(program: Program, value: float) -> None:
    program.state.value = value


def _set_data(program: Program, value: float) -> None:
    program.state.data = torch.full((1,), value, dtype=F64)


def _set_element(program: Program, value: float) -> None:
    program.state[0] = value


def _bind(make: Callable[[float], Any]) -> Callable[[Program, float], None]:
    def bind(program: Program, value: float) -> None:
        program.state = make(value)

    return bind


@dataclass
class Kind:
    """Functions that make, read and change a kind of state."""

    make: Callable[[float], Any]
    read: Callable[[Any], float]
    change: Callable[[Program, float], None]


def _tensor(value: float) -> Tensor:
    return torch.full((1,), value, dtype=F64)


def _array(value: float) -> Any:
    return np.full(2, value)


KINDS = {
    "float": Kind(float, float, _bind(float)),
    "list": Kind(lambda v: [v], lambda s: s[0], _bind(lambda v: [v])),
    "list, in place": Kind(lambda v: [v], lambda s: s[0], _set_element),
    "deque": Kind(lambda v: deque([v], maxlen=2), lambda s: s[0], _bind(lambda v: deque([v], maxlen=2))),
    "module": Kind(Holder, lambda s: float(s.value), _bind(Holder)),
    "tensor": Kind(_tensor, float, _bind(_tensor)),
    "tensor, .data": Kind(_tensor, float, _set_data),
    "array": Kind(_array, lambda s: float(s[0]), _bind(_array)),
    "array, in place": Kind(_array, lambda s: float(s[0]), _set_element),
    "unsigned array, in place": Kind(
        lambda v: np.full(2, round(v * 2**24), dtype=np.uint32), lambda s: float(s[0]) / 2**24, _set_element
    ),
    "slots": Kind(Slots, lambda s: s.value, _set_slot),
}


@dataclass
class Program:
    """A model with state that only the first sample reads and then writes.

    Any split therefore makes the update of the real batch, unless the first sample runs twice.
    """

    kind: Kind
    changes: bool = True
    fails: list[str] = field(default_factory=list)  # a log, which is never restored
    state: Any = None
    model: Any = field(init=False)
    optimizer: Any = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = self.kind.make(0.25)

    def loss_fn(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, rows = batch
        out = self.model(x).squeeze(1)
        loss = (out - self.kind.read(self.state) * (rows == 0)).square().mean()
        if self.changes and bool((rows == 0).any()):
            value = 2 + round(float(out[rows == 0].detach()), 3)
            self.kind.change(self, round(value * 2**24) if self.state_is_unsigned() else value)
        if self.fails and self.fails.pop():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss

    def state_is_unsigned(self) -> bool:
        return getattr(getattr(self.state, "dtype", None), "kind", "") == "u"

    def accumulator(self) -> Accumulator:
        return Accumulator(self.model, self.optimizer, self.loss_fn, microbatch_size=8, check=False)

    def large(self) -> None:
        """Make an update with the real large batch."""
        self.optimizer.zero_grad()
        self.loss_fn(batch()).backward()
        self.optimizer.step()

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(SAMPLES)


def error_of(mine: Program, real: Program, start: dict[str, Tensor]) -> float:
    wanted, found = real.parameters(), mine.parameters()
    assert all((wanted[name] - start[name]).norm() > 1e-4 for name in start), "premise: all parameters change"
    return max(
        float((found[name] - wanted[name]).norm() / (wanted[name] - start[name]).norm()) for name in start
    )


def twin_of(program: Program) -> Program:
    """Return a separate program in the same state."""
    other = Program(program.kind, changes=program.changes)
    other.model.load_state_dict(program.model.state_dict())
    other.state = copy.deepcopy(program.state)
    return other


def update(program: Program, accumulate: Accumulator) -> tuple[str, float]:
    """Make an update in which memory runs out; return the warnings and the error of the update."""
    real, start = twin_of(program), program.parameters()
    program.fails.append("now")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert accumulate(batch()).failures == 1
    real.large()
    return " ".join(str(each.message) for each in warned), error_of(program, real, start)


@pytest.mark.parametrize("name", KINDS)
def test_state_that_changes_in_the_first_window_is_restored(name: str) -> None:
    program = Program(KINDS[name])
    accumulate = program.accumulator()
    for _ in range(2):
        warned, error = update(program, accumulate)
        assert error < 1e-12
        assert "The update is the same" in warned
        assert "unless" not in warned


WRITTEN = {"module", "tensor, .data", "array, in place", "unsigned array, in place"}
"""Kinds of state that are not copied at the beginning of a window."""


@pytest.mark.parametrize("name", KINDS)
def test_state_that_first_changes_in_a_later_window_is_restored_or_named(name: str) -> None:
    program = Program(KINDS[name], changes=False)
    accumulate = program.accumulator()
    accumulate(batch())
    program.changes = True
    warned, error = update(program, accumulate)
    if name in WRITTEN:
        assert error > 1e-2, "premise: it was not copied, and the update is wrong"
        assert re.search(r"same, .*unless loss_fn itself has changed 'Program\.state", warned)
    else:
        assert error < 1e-12
        assert "unless" not in warned
    warned, error = update(program, accumulate)
    assert error < 1e-12
    assert "unless" not in warned


@pytest.mark.parametrize("name", KINDS)
def test_constant_state_is_not_named(name: str) -> None:
    program = Program(KINDS[name], changes=False)
    accumulate = program.accumulator()
    accumulate(batch())
    warned, error = update(program, accumulate)
    assert error < 1e-12
    assert "The update is the same" in warned
    assert "unless" not in warned


@pytest.mark.parametrize(
    ("place", "method", "mutant", "kind", "late"),
    [
        (LastInspection, "changed", lambda *_: iter(()), "module", True),
        (kept_tensors, "is_array", lambda value: False, "array, in place", False),
        (
            reached,
            "_slots_of",
            lambda value: frozenset() if hasattr(value, "fails") else None,
            "slots",
            False,
        ),
    ],
    ids=["no comparison with the last inspection", "arrays are not copied", "slots are not inspected"],
)
def test_mutants_call_a_wrong_update_the_same(
    place: Any, method: str, mutant: Any, kind: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (place, kept_tensors, reached) if place is not kept_tensors else _importers():
        if hasattr(module, method):
            monkeypatch.setattr(module, method, mutant)
    program = Program(KINDS[kind], changes=not late)
    accumulate = program.accumulator()
    if late:
        accumulate(batch())
        program.changes = True
    warned, error = update(program, accumulate)
    assert error > 1e-2
    assert "unless" not in warned


def _importers() -> tuple[Any, ...]:
    from superbatch.torch.window.participants import bindings

    return kept_tensors, bindings
