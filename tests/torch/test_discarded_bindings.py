"""Attributes first reassigned in a discarded window are restored, or a warning names them."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.torch import Accumulator
from superbatch.torch.window.participants.bindings_at_begin import BindingsAtBegin

F64 = torch.float64
BATCH = torch.randn(6, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
BIG = 1 << 18  # more elements than are copied


class Stats:
    """A plain object of the user."""

    def __init__(self) -> None:
        self.mean: Any = torch.zeros(3, dtype=F64)
        self.steps = 0
        self.held: Any = None


class Slots:
    """An object without a `__dict__`."""

    __slots__ = ("mean",)

    def __init__(self) -> None:
        self.mean = torch.zeros(3, dtype=F64)


class Model(nn.Module):
    """A model with many kinds of attributes beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1, dtype=F64)
        self.mean: Any = torch.zeros(3, dtype=F64)
        self.temperature = 1.0
        self.stats, self.slots = Stats(), Slots()
        self.nested = {"inner": Stats()}
        self.means = {"a": torch.zeros(3, dtype=F64)}
        self.queue = [torch.zeros(3, dtype=F64)]
        self.bank = torch.zeros(BIG)
        self.change: Callable[[Any, Any], None] = nothing

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        return self.linear(x)


def nothing(*_: Any) -> None:
    pass


def averaging(where: Callable[[Any], Any], name: str) -> Callable[[Any, Any], None]:
    def change(model: Any, x: Tensor) -> None:
        holder = where(model)
        setattr(holder, name, getattr(holder, name, 0) * 0.5 + x.detach().mean(0))

    return change


def count(model: Any, x: Tensor) -> None:
    model.stats.mean = model.stats.mean + x.detach().mean(0)
    model.stats.steps += 1


def temper(model: Any, _: Tensor) -> None:
    model.temperature *= 0.5


def register(model: Any, x: Tensor) -> None:
    if not hasattr(model, "late"):
        model.register_buffer("late", x.detach().mean(0))


def add_module(model: Any, _: Tensor) -> None:
    if not hasattr(model, "teacher"):
        model.teacher = nn.Linear(1, 1).requires_grad_(requires_grad=False)


CHANGES: dict[str, Callable[[Any, Any], None]] = {
    "attribute": averaging(lambda model: model, "mean"),
    "new attribute": averaging(lambda model: model, "fresh"),
    "number": temper,
    "object": averaging(lambda model: model.stats, "mean"),
    "new name of an object": averaging(lambda model: model.stats, "fresh"),
    "count of an object": count,
    "slot": averaging(lambda model: model.slots, "mean"),
    "object in a dictionary": averaging(lambda model: model.nested["inner"], "mean"),
    "dictionary": lambda model, x: model.means.update(a=x.detach().mean(0)),
    "new key": lambda model, x: model.means.update(b=x.detach().mean(0)),
    "list": lambda model, x: model.queue.append(x.detach().mean(0)),
    "buffer": register,
    "module": add_module,
}


def content(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Slots):
        return content(value.mean)
    if isinstance(value, nn.Module | Stats):
        return {name: content(one) for name, one in vars(value).items() if name != "change"}
    if isinstance(value, dict):
        return {name: content(one) for name, one in value.items()}
    return [content(one) for one in value] if isinstance(value, list) else str(value)


class Stop(Exception):
    pass


class Run:
    """A training whose windows fail and whose state changes on request."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self.outside, self.fails = Model(), Stats(), False
        optimizer = torch.optim.SGD(self.model.linear.parameters(), lr=0.1)
        self.accumulate = Accumulator(self.model, optimizer, self.loss, microbatch_size=2, **options)

    def loss(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean() + 0 * self.outside.steps
        if self.fails:
            raise Stop
        return loss

    def discard(self, change: Callable[[Any, Any], None], *, after: int = 2) -> None:
        """Discard a window in its third micro-batch."""
        with pytest.raises(Stop), self.accumulate.window(BATCH) as window:  # noqa: PT012
            self.model.change = change
            for index, microbatch in enumerate(window):
                window.backward(self.loss(microbatch))
                if index == after:
                    self.model.change = nothing
                    raise Stop


@pytest.mark.parametrize("updates", [0, 1, 2, 4])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.sampled(3)
def test_a_first_reassignment_is_restored(name: str, updates: int) -> None:
    run = Run()
    for _ in range(updates):
        run.accumulate(BATCH)
    before = content(run.model)
    changed: list[bool] = []

    def change(model: Any, x: Tensor) -> None:
        CHANGES[name](model, x)
        changed.append(content(model) != before)

    run.discard(change)
    assert changed[-1], "premise: the state has changed"
    assert content(run.model) == before
    run.discard(change)
    assert content(run.model) == before
    assert run.accumulate(BATCH).made


def test_mutant_without_bindings_at_begin_only_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BindingsAtBegin, "begin", lambda _: [])
    run = Run()
    run.accumulate(BATCH)
    before = content(run.model)
    with pytest.warns(UserWarning, match="'mean' was not restored: .* for the first time"):
        run.discard(CHANGES["attribute"])
    assert content(run.model) != before


@pytest.mark.parametrize("updates", [1, 2])
def test_objects_that_loss_fn_reaches_are_restored(updates: int) -> None:
    run = Run()
    for _ in range(updates):
        run.accumulate(BATCH)
    before = content(run.outside)

    def change(_: Any, x: Tensor) -> None:
        run.outside.mean = run.outside.mean + x.detach().mean(0)
        run.outside.steps += 1

    run.discard(change)
    assert content(run.outside) == before


def grow(model: Any, _: Tensor) -> None:
    model.bank = model.bank + 1


def replace_object(model: Any, _: Tensor) -> None:
    model.stats = Stats()


@pytest.mark.parametrize(("change", "name"), [(grow, "bank"), (replace_object, "stats")])
def test_values_that_cannot_be_restored_are_named_once(change: Any, name: str) -> None:
    run = Run()
    run.accumulate(BATCH)
    with pytest.warns(UserWarning, match=f"'{name}'.* was not restored: .* for the first time") as caught:
        run.discard(change)
    assert [one.filename for one in caught] == [__file__]
    before = getattr(run.model, name)
    run.discard(change)  # from now on it is restored, without a warning
    assert getattr(run.model, name) is before


def test_changes_by_the_training_loop_stay_without_a_warning() -> None:
    run = Run()
    for number in range(3):
        run.accumulate(BATCH)
        run.model.temperature = 0.1 * number
        run.model.mean = torch.full((3,), float(number), dtype=F64)
        run.model.stats.steps = number
        run.model.__dict__[f"note{number}"] = number
        run.model.queue.append(torch.ones(3, dtype=F64))
    before = content(run.model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.discard(CHANGES["attribute"])
    assert content(run.model) == before


def test_bindings_at_begin_keep_nothing_alive() -> None:
    run, held = Run(), Stats()
    run.outside.held = held
    held.mean = torch.zeros(BIG)
    for _ in range(2):
        run.accumulate(BATCH)
    gone = weakref.ref(held.mean)
    del run.outside.held, held
    gc.collect()
    assert gone() is None


class AnyName:
    """An object with every attribute, like some loggers and proxies."""

    def __getattr__(self, name: str) -> Any:
        return AnyName()


def test_an_object_with_every_attribute_is_not_taken_for_a_function() -> None:
    run = Run()
    run.outside.held = AnyName()
    assert run.accumulate(BATCH).made
