"""Names that are bound anew for the first time in a window that is discarded: restored, or named."""

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
BIG = 1 << 18  # more than is copied


class Stats:
    """A plain object of the user's."""

    def __init__(self) -> None:
        self.mean: Any = torch.zeros(3, dtype=F64)
        self.steps = 0
        self.held: Any = None


class Slots:
    """One without a `__dict__`."""

    __slots__ = ("mean",)

    def __init__(self) -> None:
        self.mean = torch.zeros(3, dtype=F64)


class Model(nn.Module):
    """A model beside whose parameters much can be bound."""

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
        self.move: Callable[[Any, Any], None] = nothing

    def forward(self, x: Tensor) -> Tensor:
        self.move(self, x)
        return self.linear(x)


def nothing(*_: Any) -> None:
    pass


def moving(where: Callable[[Any], Any], name: str) -> Callable[[Any, Any], None]:
    def move(model: Any, x: Tensor) -> None:
        holder = where(model)
        setattr(holder, name, getattr(holder, name, 0) * 0.5 + x.detach().mean(0))

    return move


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


MOVES: dict[str, Callable[[Any, Any], None]] = {
    "attribute": moving(lambda model: model, "mean"),
    "new attribute": moving(lambda model: model, "fresh"),
    "number": temper,
    "object": moving(lambda model: model.stats, "mean"),
    "new name of an object": moving(lambda model: model.stats, "fresh"),
    "count of an object": count,
    "slot": moving(lambda model: model.slots, "mean"),
    "object in a dictionary": moving(lambda model: model.nested["inner"], "mean"),
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
        return {name: content(one) for name, one in vars(value).items() if name != "move"}
    if isinstance(value, dict):
        return {name: content(one) for name, one in value.items()}
    return [content(one) for one in value] if isinstance(value, list) else str(value)


class Stop(Exception):
    pass


class Run:
    """A training whose windows fail, and whose state moves, when they are told to."""

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

    def discard(self, move: Callable[[Any, Any], None], *, after: int = 2) -> None:
        """Discard a window in its third micro-batch."""
        with pytest.raises(Stop), self.accumulate.window(BATCH) as window:  # noqa: PT012
            self.model.move = move
            for index, microbatch in enumerate(window):
                window.backward(self.loss(microbatch))
                if index == after:
                    self.model.move = nothing
                    raise Stop


@pytest.mark.parametrize("updates", [0, 1, 2, 4])
@pytest.mark.parametrize("name", MOVES)
@pytest.mark.sampled(3)
def test_what_is_bound_anew_for_the_first_time_is_restored(name: str, updates: int) -> None:
    run = Run()
    for _ in range(updates):
        run.accumulate(BATCH)
    before = content(run.model)
    moved: list[bool] = []

    def move(model: Any, x: Tensor) -> None:
        MOVES[name](model, x)
        moved.append(content(model) != before)

    run.discard(move)
    assert moved[-1], "premise: the state has moved"
    assert content(run.model) == before
    run.discard(move)
    assert content(run.model) == before
    assert run.accumulate(BATCH).made


def test_without_the_look_at_the_beginning_it_would_stay_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BindingsAtBegin, "begin", lambda _: [])
    run = Run()
    run.accumulate(BATCH)
    before = content(run.model)
    with pytest.warns(UserWarning, match="'mean' was not restored: .* for the first time"):
        run.discard(MOVES["attribute"])
    assert content(run.model) != before


@pytest.mark.parametrize("updates", [1, 2])
def test_what_loss_fn_reaches_is_restored(updates: int) -> None:
    run = Run()
    for _ in range(updates):
        run.accumulate(BATCH)
    before = content(run.outside)

    def move(_: Any, x: Tensor) -> None:
        run.outside.mean = run.outside.mean + x.detach().mean(0)
        run.outside.steps += 1

    run.discard(move)
    assert content(run.outside) == before


def grow(model: Any, _: Tensor) -> None:
    model.bank = model.bank + 1


def replace_object(model: Any, _: Tensor) -> None:
    model.stats = Stats()


@pytest.mark.parametrize(("move", "name"), [(grow, "bank"), (replace_object, "stats")])
def test_what_cannot_be_restored_is_named_once(move: Any, name: str) -> None:
    run = Run()
    run.accumulate(BATCH)
    with pytest.warns(UserWarning, match=f"'{name}'.* was not restored: .* for the first time") as said:
        run.discard(move)
    assert [one.filename for one in said] == [__file__]
    before = getattr(run.model, name)
    run.discard(move)  # from now on it is restored, and nothing is said
    assert getattr(run.model, name) is before


def test_what_the_loop_changes_stays_and_is_not_named() -> None:
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
        run.discard(MOVES["attribute"])
    assert content(run.model) == before


def test_what_is_held_at_the_beginning_keeps_nothing_alive() -> None:
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
    """An object that answers to any name, as loggers and proxies do."""

    def __getattr__(self, name: str) -> Any:
        return AnyName()


def test_an_object_that_answers_to_any_name_is_no_function() -> None:
    run = Run()
    run.outside.held = AnyName()
    assert run.accumulate(BATCH).made
