"""User-defined participants are restored, rolled back and saved with a window."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from superbatch.errors import InputError, NonFiniteError, WindowError
from superbatch.torch import Accumulator, WholeBatch
from tests.torch.counter import Counter
from tests.torch.helpers import mlp, mse, rows, sgd


def accumulator(counter: Counter, *, bad: int | None = None, **options: Any) -> Accumulator:
    model = mlp()

    def loss_fn(mb: Any) -> Tensor:
        counter.value += 1
        return mse(model, mb) * (math.nan if counter.value == bad else 1.0)

    return Accumulator(
        model,
        sgd(model.parameters()),
        loss_fn,
        microbatch_size=2,
        participants=[counter],
        check=False,
        **options,
    )


def test_a_participant_is_called_in_an_update() -> None:
    counter = Counter()
    accumulator(counter)(rows(6)[0])
    assert counter.calls == ["begin", "savepoint", "savepoint", "savepoint", "commit"]
    assert counter.value == 3


def test_a_participant_is_restored_with_the_window() -> None:
    counter = Counter()
    with pytest.raises(NonFiniteError):
        accumulator(counter, bad=2)(rows(6)[0])
    assert counter.value == 0
    assert counter.calls[-1] == "restore"


def test_a_participant_is_restored_in_a_whole_batch() -> None:
    counter, model = Counter(), mlp()

    def loss_fn(mb: Any) -> Tensor:
        counter.value += 1
        return mse(model, mb) * math.nan

    accumulate = WholeBatch(
        model, sgd(model.parameters()), loss_fn, microbatch_size=2, participants=[counter]
    )
    with pytest.raises(NonFiniteError):
        accumulate(rows(6)[0])
    assert counter.value == 0


def test_a_participant_is_saved_with_a_window_and_resumed() -> None:
    counter, batch = Counter(), rows(6)[0]
    accumulate = accumulator(counter)
    state: dict[str, Any] = {}
    with accumulate.window(batch) as window:
        for mb in window:
            window.backward(mse(accumulate.engine.config.models[0], mb))
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
        for mb in window:
            window.backward(mse(accumulate.engine.config.models[0], mb))
            state = copy.deepcopy(accumulate.state_dict())
            break
    model = mlp()
    other = Accumulator(model, sgd(model.parameters()), lambda mb: mse(model, mb), microbatch_size=2)
    other.load_state_dict(state)
    with pytest.raises(WindowError):
        other(batch)


@pytest.mark.parametrize("can", [True, False])
def test_a_skipped_micro_batch_is_rolled_back(can: bool) -> None:
    class RollbackCounter(Counter):
        def rollback(self) -> bool:
            return super().rollback() and can

    counter, model, calls = RollbackCounter(), mlp(), [0]

    def loss_fn(mb: Any) -> Tensor:
        counter.value += 1
        calls[0] += 1
        return mse(model, mb) * (math.nan if calls[0] == 2 else 1.0)

    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        loss_fn,
        microbatch_size=2,
        participants=[counter],
        check=False,
        nonfinite="skip_microbatch",
    )
    if can:
        assert accumulate(rows(6)[0]).dropped == (1,)
        assert counter.value == 2
    else:
        with pytest.raises(WindowError, match=r"rollback\(\) of an object in participants= returned False"):
            accumulate(rows(6)[0])
        assert counter.value == 0


class Failing(Counter):
    """Participant that records the order of calls among several, and fails at one call."""

    def __init__(self, name: str, order: list[str], fails: str = "") -> None:
        super().__init__()
        self.name, self.order, self.fails = name, order, fails

    def _record(self, call: str) -> None:
        self.order.append(f"{call} {self.name}")
        if call == self.fails:
            raise ValueError(f"{call} of {self.name}")

    def begin(self) -> None:
        self._record("begin")

    def rollback(self) -> bool:
        self.order.append(f"rollback {self.name}")
        return self.fails != "rollback"

    def restart(self) -> None:
        self._record("restart")

    def restore(self) -> None:
        self._record("restore")

    def commit(self) -> None:
        self._record("commit")


def several(order: list[str], **fails: str) -> tuple[Accumulator, list[Any]]:
    """Return an accumulator with participants a, b and c, and the list of errors its loss raises in turn."""
    model, script = mlp(), list[Any]()

    def loss_fn(mb: Any) -> Tensor:
        if script and (error := script.pop(0)) is not None:
            raise error
        return mse(model, mb)

    participants = [Failing(name, order, fails.get(name, "")) for name in "abc"]
    accumulate = Accumulator(
        model, sgd(model.parameters()), loss_fn, microbatch_size=2, participants=participants, check=False
    )
    return accumulate, script


def test_a_participant_that_fails_to_begin_is_restored_with_those_before_it() -> None:
    order: list[str] = []
    accumulate, _ = several(order, b="begin")
    with pytest.raises(ValueError, match="begin of b"):
        accumulate(rows(6)[0])
    assert order == ["begin a", "begin b", "restore b", "restore a"]


def test_a_failing_restore_skips_no_other_participant() -> None:
    order: list[str] = []
    accumulate, script = several(order, b="restore")
    script += [None, KeyError("the loss")]
    with pytest.raises(ValueError, match="restore of b"):
        accumulate(rows(6)[0])
    restored = [each for each in order if each.startswith("restore")]
    assert restored[:3] == ["restore c", "restore b", "restore a"]  # they may be restored twice


def test_a_failing_commit_skips_no_other_participant() -> None:
    order: list[str] = []
    accumulate, _ = several(order, a="commit")
    with pytest.raises(ValueError, match="commit of a"):
        accumulate(rows(6)[0])
    assert {"commit a", "commit b", "commit c"} <= set(order)
    assert accumulate.updates == 1


def test_a_participant_that_cannot_roll_back_restarts_the_window() -> None:
    order: list[str] = []
    accumulate, script = several(order, b="rollback")
    script += [None, torch.OutOfMemoryError("CUDA out of memory")]
    with pytest.warns(UserWarning, match="memory"):
        assert accumulate(rows(6)[0]).made
    assert order[3:8] == ["rollback c", "rollback b", "restart a", "restart b", "restart c"]


@pytest.mark.parametrize("wrong", [object(), "frozen", Counter])
def test_objects_that_are_not_participants_are_refused(wrong: object) -> None:
    model = mlp()
    with pytest.raises(InputError, match="which is not a participant"):
        Accumulator(model, sgd(model.parameters()), lambda mb: mse(model, mb), participants=[wrong])


@pytest.mark.parametrize("can", [True, False])
def test_checks_of_the_loss_do_not_change_a_participant(can: bool) -> None:
    """The first window is checked before it begins, a later one while it is open."""

    class RollbackCounter(Counter):
        def rollback(self) -> bool:
            return super().rollback() if can else False

    counter, calls, model = RollbackCounter(), [0], mlp()

    def loss_fn(mb: Any) -> Tensor:
        counter.value += 1
        calls[0] += 1
        return mse(model, mb)

    accumulate = Accumulator(
        model, sgd(model.parameters()), loss_fn, microbatch_size=2, participants=[counter]
    )
    batch = rows(32)[0]
    accumulate(batch)
    first = calls[0]
    assert first > 16, "premise: the first window was checked"
    for _ in range(119):
        accumulate(batch)
    assert calls[0] - first > 119 * 16, "premise: so was a later one"
    assert counter.value == 120 * 16


def test_weights_evaluated_before_the_window_do_not_change_a_participant() -> None:
    counter, model = Counter(), mlp()

    def loss_fn(mb: Any) -> Any:
        counter.value += 1
        loss = mse(model, mb)
        return {"a": loss, "b": loss * 0.5}, {"a": 2.0, "b": 1.0}

    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        loss_fn,
        microbatch_size=2,
        participants=[counter],
        weight={"a": "returned", "b": "returned"},
        check=False,
    )
    accumulate(rows(6)[0])
    assert counter.value == 3


def test_trials_of_sizes_do_not_change_a_participant() -> None:
    """An automatic size first runs the loss on fake tensors."""
    counter, calls, model = Counter(), [0], mlp()

    def loss_fn(mb: Any) -> Tensor:
        counter.value += 1
        calls[0] += 1
        return mse(model, mb)

    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        loss_fn,
        microbatch_size="largest",
        participants=[counter],
        check=False,
    )
    update = accumulate(rows(6)[0])
    assert calls[0] > update.microbatches == counter.value


def test_a_participant_that_ignores_checks_is_not_called_in_them() -> None:
    """It counts only after a savepoint, so a `begin` for a check would count the check."""

    class Ignoring(Counter):
        ignores_checks = True

    counter, model = Ignoring(), mlp()
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        lambda mb: mse(model, mb),
        microbatch_size=2,
        participants=[counter],
    )
    accumulate(rows(6)[0])
    assert counter.calls == ["begin", "savepoint", "savepoint", "savepoint", "commit"]
