"""Participants of the user's own: they are restored, rolled back and saved with a window."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from superbatch.errors import InputError, NonFiniteError, WindowError
from superbatch.torch import Accumulator, WholeBatch
from tests.torch.helpers import mlp, mse, rows, sgd


class Counter:
    """Number of forwards that count, as a logger keeps it."""

    def __init__(self) -> None:
        self.value, self.calls = 0, list[str]()
        self._before = self._savepoint = 0

    def begin(self) -> None:
        self._before = self.value
        self.calls.append("begin")

    def savepoint(self) -> None:
        self._savepoint = self.value
        self.calls.append("savepoint")

    def rollback(self) -> bool:
        self.value = self._savepoint
        self.calls.append("rollback")
        return True

    def restart(self) -> None:
        self.value = self._before
        self.calls.append("restart")

    def restore(self) -> None:
        self.value = self._before
        self.calls.append("restore")

    def commit(self) -> None:
        self.calls.append("commit")

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "before": self._before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self._before = state["value"], state["before"]


def accumulator(counter: Counter, *, bad: int | None = None, **options: Any) -> Accumulator:
    model = mlp()

    def loss_fn(part: Any) -> Tensor:
        counter.value += 1
        return mse(model, part) * (math.nan if counter.value == bad else 1.0)

    return Accumulator(
        model,
        sgd(model.parameters()),
        loss_fn,
        microbatch_size=2,
        participants=[counter],
        check=False,
        **options,
    )


def test_it_takes_part_in_an_update() -> None:
    counter = Counter()
    accumulator(counter)(rows(6)[0])
    assert counter.calls == ["begin", "savepoint", "savepoint", "savepoint", "commit"]
    assert counter.value == 3


def test_it_is_restored_with_the_window() -> None:
    counter = Counter()
    with pytest.raises(NonFiniteError):
        accumulator(counter, bad=2)(rows(6)[0])
    assert counter.value == 0
    assert counter.calls[-1] == "restore"


def test_it_is_restored_in_a_whole_batch() -> None:
    counter, model = Counter(), mlp()

    def loss_fn(part: Any) -> Tensor:
        counter.value += 1
        return mse(model, part) * math.nan

    accumulate = WholeBatch(
        model, sgd(model.parameters()), loss_fn, microbatch_size=2, participants=[counter]
    )
    with pytest.raises(NonFiniteError):
        accumulate(rows(6)[0])
    assert counter.value == 0


def test_it_is_saved_with_a_window_and_resumed() -> None:
    counter, batch = Counter(), rows(6)[0]
    accumulate = accumulator(counter)
    state: dict[str, Any] = {}
    with accumulate.window(batch) as window:
        for part in window:
            window.backward(mse(accumulate.engine.config.models[0], part))
            counter.value += 5
            state = copy.deepcopy(accumulate.state_dict())
            break
    assert counter.value == 0, "premise: the window was discarded"
    again = Counter()
    resumed = accumulator(again)
    resumed.load_state_dict(state)
    resumed(batch)
    assert again.value == 5 + 2


def test_a_saved_window_with_other_participants_is_refused() -> None:
    counter, batch = Counter(), rows(6)[0]
    accumulate = accumulator(counter)
    state: dict[str, Any] = {}
    with accumulate.window(batch) as window:
        for part in window:
            window.backward(mse(accumulate.engine.config.models[0], part))
            state = copy.deepcopy(accumulate.state_dict())
            break
    model = mlp()
    other = Accumulator(model, sgd(model.parameters()), lambda part: mse(model, part), microbatch_size=2)
    other.load_state_dict(state)
    with pytest.raises(WindowError):
        other(batch)


@pytest.mark.parametrize("wrong", [object(), "frozen", Counter])
def test_what_takes_no_part_is_refused(wrong: object) -> None:
    model = mlp()
    with pytest.raises(InputError, match="takes no part in a window"):
        Accumulator(model, sgd(model.parameters()), lambda part: mse(model, part), participants=[wrong])
