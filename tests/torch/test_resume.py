"""An open window, saved after each of its micro-batches, is resumed bit for bit in new objects."""

# ruff: noqa: PT012  (the block of a window raises, with a loop in it)

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import InputError, SuperbatchError, WindowError
from superbatch.torch import Accumulator, Update
from superbatch.torch.options import FrozenBatchNorm, GhostBatchNorm, PerSampleRandom
from tests import forked
from tests.torch.helpers import rows
from tests.torch.states import assert_unchanged, draw_everywhere, fingerprint

BATCHES = rows(10, updates=3)
MICROBATCHES = 4  # of each batch: 3, 3, 2, 2


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


class Task:
    """Model, optimizer, scheduler, scaler and accumulator of a training script, chosen by one name.

    The forward draws from torch's generator; with "generators" from Python's and NumPy's too.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        seed(11)
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float64
        norm = nn.BatchNorm1d(6) if name == "batchnorm" else nn.Identity()
        layers = [nn.Linear(4, 6), norm, nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)]
        self.model = nn.Sequential(*layers).to(dtype)
        self.dtype = dtype
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        if name == "momentum":
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)
        options: dict[str, Any] = {"microbatch_size": 3, "scheduler": self.scheduler, "check": False}
        self.scaler = None
        if name == "scaler":
            self.scaler = options["scaler"] = torch.amp.GradScaler(
                "cpu", init_scale=2.0**6, growth_interval=2
            )
        options |= {
            "sample_rng": {"participants": [PerSampleRandom()]},
            "bfloat16": {"gradient_sum": torch.float32},
            "momentum": {"gradient_sum": "momentum"},
            "returned": {"weight": "returned"},
            "skip_microbatch": {"nonfinite": "skip_microbatch"},
            "batchnorm": {"participants": [GhostBatchNorm()]},
            "clip": {"max_grad_norm": 0.01},
        }.get(name, {})
        self.accumulate = Accumulator(self.model, self.optimizer, **options)
        self.keep = [self.model, self.optimizer, self.scheduler, self.accumulate]
        if self.scaler is not None:
            self.keep.append(self.scaler)

    def loss(self, microbatch: Any) -> Tensor:
        x, y = (t.to(self.dtype) for t in microbatch)
        if self.name == "generators":
            draw_everywhere()
        return nn.functional.mse_loss(self.model(x), y)

    def batches(self) -> list[Any]:
        if self.name != "skip_microbatch":
            return BATCHES
        x = BATCHES[1][0].clone()
        x[4] = float("nan")  # micro-batch 1 of the window that is saved
        return [BATCHES[0], (x, BATCHES[1][1]), BATCHES[2]]

    def run(self, batch: Any, *, save_at: int | None = None, file: Path | None = None) -> Update:
        with self.accumulate.window(batch) as window:
            if save_at == 0:
                self.save(file)
            for done, microbatch in enumerate(window, start=1):
                loss = self.loss(microbatch)
                if self.name == "returned":
                    window.backward(loss, len(microbatch[0]) * 0.7)
                else:
                    window.backward(loss)
                if done == save_at:
                    self.save(file)
        assert window.update is not None
        return window.update

    def save(self, file: Path | None) -> None:
        assert file is not None
        torch.save([thing.state_dict() for thing in self.keep], file)

    def load(self, file: Path) -> None:
        # torch.load's default reads only tensors and plain containers
        for thing, state in zip(self.keep, torch.load(file, weights_only=True), strict=True):
            thing.load_state_dict(state)

    def fingerprint(self) -> dict[str, Any]:
        found = fingerprint(*self.keep)
        return {key: value for key, value in found.items() if not key.endswith("identity")}


def another_random_state(name: str) -> None:
    """Set another random state, as in a new process.

    A window restores Python's and NumPy's generators only if it draws from them.
    """
    if name == "generators":
        seed(99)
    else:
        torch.manual_seed(99)


def same_update(one: Update, other: Update) -> bool:
    return dataclasses.replace(one, seconds=0.0) == dataclasses.replace(other, seconds=0.0)


NAMES = [
    "dropout",
    "generators",
    "sample_rng",
    "bfloat16",
    "momentum",
    "returned",
    "skip_microbatch",
    "batchnorm",
    "scaler",
    "clip",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_window_is_resumed_bit_for_bit_from_every_position(name: str, tmp_path: Path):
    uninterrupted = Task(name)
    batches = uninterrupted.batches()
    expected = [uninterrupted.run(batch) for batch in batches]
    assert all(update.made for update in expected)
    if name == "skip_microbatch":
        assert expected[1].dropped == (1,), "premise"
    final = uninterrupted.fingerprint()
    for position in range(MICROBATCHES + 1):
        file = tmp_path / f"{position}.pt"
        first = Task(name)
        first.run(batches[0])
        first.run(batches[1], save_at=position, file=file)
        second = Task(name)
        another_random_state(name)
        second.load(file)
        assert second.accumulate.updates == 1
        updates = [second.run(batch) for batch in batches[1:]]
        for update, expected_update in zip(updates, expected[1:], strict=True):
            assert same_update(update, expected_update), position
        assert_unchanged(final, second.fingerprint())


def test_saving_changes_nothing(tmp_path: Path):
    one, other = Task("dropout"), Task("dropout")
    for batch in BATCHES:
        torch.manual_seed(3)
        expected = one.run(batch)
        torch.manual_seed(3)
        assert same_update(other.run(batch, save_at=2, file=tmp_path / "state.pt"), expected)
    ours, theirs = one.fingerprint(), other.fingerprint()
    assert_unchanged(ours, theirs)


def test_a_window_is_resumed_in_a_new_process(tmp_path: Path):
    uninterrupted = Task("dropout")
    for batch in BATCHES:
        uninterrupted.run(batch)
    first = Task("dropout")
    first.run(BATCHES[0])
    first.run(BATCHES[1], save_at=2, file=tmp_path / "state.pt")
    program = """
import sys, torch
torch.set_num_threads(1)
from pathlib import Path
from tests.torch.test_resume import BATCHES, Task
task = Task("dropout")
task.load(Path(sys.argv[1]))
for batch in BATCHES[1:]:
    task.run(batch)
torch.save(task.model.state_dict(), sys.argv[2])
"""
    result = tmp_path / "result.pt"
    done = forked.run(["-c", program, tmp_path / "state.pt", result])
    assert done.returncode == 0, done.stderr
    for name, value in torch.load(result, weights_only=True).items():
        assert torch.equal(value, uninterrupted.model.state_dict()[name]), name


def test_the_state_does_not_share_memory_with_the_window():
    """A state that is kept in memory does not change with its window."""
    task = Task("dropout")
    states = []
    with task.accumulate.window(BATCHES[0]) as window:
        for microbatch in window:
            window.backward(task.loss(microbatch))
            state = task.accumulate.state_dict()
            states.append((state, torch.cat([g.flatten() for g in tensors(state["window"]["gradients"])])))
    for state, gradients in states:
        assert torch.equal(torch.cat([g.flatten() for g in tensors(state["window"]["gradients"])]), gradients)
    assert not torch.equal(states[0][1], states[1][1]), "premise: the sums grow"


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for element in inner for tensor in tensors(element)]


def saved(name: str, tmp_path: Path, position: int = 2) -> Path:
    task = Task(name)
    task.run(BATCHES[0])
    task.run(BATCHES[1], save_at=position, file=tmp_path / "state.pt")
    return tmp_path / "state.pt"


@pytest.mark.parametrize("name", ["dropout", "batchnorm", "momentum", "bfloat16", "sample_rng"])
def test_another_batch_is_refused_and_the_right_one_still_accepted(name: str, tmp_path: Path):
    uninterrupted = Task(name)
    for batch in BATCHES:
        uninterrupted.run(batch)
    file = saved(name, tmp_path)
    task = Task(name)
    task.load(file)
    before = task.fingerprint()
    short = tuple(t[:7] for t in BATCHES[1])
    with pytest.raises(WindowError, match="micro-batches of the saved window, or call") as caught:
        task.run(short)
    assert "discard()" in str(caught.value)
    assert_unchanged(before, task.fingerprint())
    for batch in BATCHES[1:]:
        task.run(batch)
    final, expected = task.fingerprint(), uninterrupted.fingerprint()
    assert_unchanged(expected, final)


@pytest.mark.parametrize("name", ["dropout", "batchnorm", "momentum", "bfloat16", "sample_rng", "generators"])
def test_a_break_after_a_resume_restores_the_state_before_the_window(name: str, tmp_path: Path):
    original = Task(name)
    original.run(BATCHES[0])
    before = original.fingerprint()
    original.run(BATCHES[1], save_at=2, file=tmp_path / "state.pt")
    task = Task(name)
    another_random_state(name)
    task.load(tmp_path / "state.pt")
    with task.accumulate.window(BATCHES[1]) as window:
        for microbatch in window:
            window.backward(task.loss(microbatch))
            break
    assert window.update is not None and not window.update.made
    assert_unchanged(before, task.fingerprint())


def test_discard_drops_the_saved_window(tmp_path: Path):
    task = Task("dropout")
    task.load(saved("dropout", tmp_path))
    task.accumulate.discard()
    assert task.accumulate.state_dict()["window"] is None
    update = task.run(tuple(t[:7] for t in BATCHES[1]))
    assert update.made and update.microbatches == 3
    assert task.accumulate.updates == 2


def test_a_loaded_state_can_be_saved_again(tmp_path: Path):
    uninterrupted = Task("dropout")
    for batch in BATCHES:
        uninterrupted.run(batch)
    task = Task("dropout")
    task.load(saved("dropout", tmp_path))
    task.save(tmp_path / "again.pt")
    again = Task("dropout")
    again.load(tmp_path / "again.pt")
    for batch in BATCHES[1:]:
        again.run(batch)
    assert_unchanged(uninterrupted.fingerprint(), again.fingerprint())


@pytest.mark.parametrize("size", [3, None, "largest"])
def test_a_window_is_resumed_in_its_saved_micro_batches(size: Any):
    """The saved sums come from these micro-batches, so a new microbatch_size= has no effect on the window."""

    def train(resume_with: Any, *, stop: bool) -> tuple[nn.Module, list[int]]:
        seed(4)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_fn(microbatch: Any) -> Tensor:
            return (model(microbatch[0]) - microbatch[1]).square().mean()

        def run(microbatch_size: Any, state: Any, last: int | None) -> tuple[Any, list[int]]:
            accumulator = Accumulator(model, optimizer, loss_fn, microbatch_size=microbatch_size, check=False)
            if state is not None:
                accumulator.load_state_dict(state)
            saved, sizes = None, []
            with accumulator.window(BATCHES[0]) as window:
                for number, microbatch in enumerate(window):
                    window.backward(loss_fn(microbatch))
                    sizes.append(len(microbatch[0]))
                    if number == last:
                        saved = accumulator.state_dict()
                        break
            return saved, sizes

        state, sizes = run(3, None, 1 if stop else None)
        if stop:
            sizes += run(resume_with, state, None)[1]
        return model, sizes

    uninterrupted, resumed = train(3, stop=False), train(size, stop=True)
    assert uninterrupted[1] == resumed[1] == [3, 3, 2, 2]
    for a, b in zip(uninterrupted[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_batch_that_cannot_be_split_as_the_saved_one_is_refused():
    task = Task("plain")
    state: Any = None
    saving = Accumulator(task.model, task.optimizer, microbatch_size=3)
    with saving.window(BATCHES[0]) as window:
        for microbatch in window:
            window.backward(task.loss(microbatch))
            state = saving.state_dict()
            break
    resuming = Accumulator(task.model, task.optimizer, microbatch_size=5)
    resuming.load_state_dict(state)
    with pytest.raises(
        WindowError, match=r"have \[5, 5\] samples, but .* saved window have \[3, 3, 2, 2\]\. Pass the batch"
    ):
        resuming.window(BATCHES[0])


def test_state_dict_raises_between_forward_and_backward():
    task = Task("dropout")
    with task.accumulate.window(BATCHES[0]) as window:
        for number, microbatch in enumerate(window):
            with pytest.raises(
                WindowError, match=f"between the forward and the backward of micro-batch {number}"
            ):
                task.accumulate.state_dict()
            window.backward(task.loss(microbatch))
            task.accumulate.state_dict()
    assert window.update is not None and window.update.made


def test_load_state_dict_raises_inside_a_window():
    task = Task("dropout")
    state = task.accumulate.state_dict()
    with task.accumulate.window(BATCHES[0]) as window:
        for microbatch in window:
            with pytest.raises(WindowError, match=r"load_state_dict\(\) was called inside a window"):
                task.accumulate.load_state_dict(state)
            window.backward(task.loss(microbatch))
    assert window.update is not None and window.update.made


def test_between_windows_the_state_is_the_number_of_updates():
    task = Task("dropout")
    task.run(BATCHES[0])
    state = task.accumulate.state_dict()
    assert state["updates"] == 1 and state["window"] is None
    fresh = Task("dropout")
    fresh.accumulate.load_state_dict(state)
    assert fresh.accumulate.updates == 1
    fresh.run(BATCHES[0])
    assert fresh.accumulate.updates == 2


@pytest.mark.parametrize(
    ("saved_as", "resumed_as"),
    [("momentum", "dropout"), ("dropout", "momentum"), ("dropout", "batchnorm"), ("batchnorm", "dropout")],
)
def test_another_gradient_sum_or_another_model_is_refused(saved_as: str, resumed_as: str, tmp_path: Path):
    """Saved sums that the new accumulator cannot use are not dropped silently."""
    state = torch.load(saved(saved_as, tmp_path), weights_only=False)[3]
    task = Task(resumed_as)
    task.run(BATCHES[0])
    before = task.fingerprint()
    with pytest.raises(
        SuperbatchError, match=r"other parameters or options than this window.*call discard\(\)"
    ):
        task.accumulate.load_state_dict(state)
        task.run(BATCHES[1])
    task.accumulate.load_state_dict({**state, "window": None})
    assert_unchanged(before, task.fingerprint())
    assert task.run(BATCHES[1]).made


@pytest.mark.parametrize(
    ("saved_with", "resumed_with"),
    [
        ({"reduction": "mean"}, {"reduction": "sum"}),
        ({"participants": [FrozenBatchNorm()]}, {"participants": [GhostBatchNorm()]}),
        ({"participants": [GhostBatchNorm()]}, {"participants": [FrozenBatchNorm()]}),
        ({}, {"nonfinite": "skip_microbatch"}),
        ({}, {"participants": [FrozenBatchNorm(), PerSampleRandom()]}),
    ],
    ids=str,
)
def test_other_options_are_refused(saved_with: dict[str, Any], resumed_with: dict[str, Any]):
    task = Task("batchnorm")
    batchnorm = {"participants": [FrozenBatchNorm()], "microbatch_size": 3}
    state: Any = None
    saving = Accumulator(task.model, task.optimizer, **{**batchnorm, **saved_with})
    with saving.window(BATCHES[0]) as window:
        for microbatch in window:
            window.backward(task.loss(microbatch))
            state = saving.state_dict()
            break
    resuming = Accumulator(task.model, task.optimizer, **{**batchnorm, **resumed_with})
    resuming.load_state_dict(state)
    before = fingerprint(task.model, task.optimizer)
    with (
        pytest.raises(WindowError, match="saved window has other parameters or options"),
        resuming.window(BATCHES[0]),
    ):
        pass
    assert_unchanged(before, fingerprint(task.model, task.optimizer))


@pytest.mark.parametrize(
    "state",
    [
        None,
        5,
        {},
        {"version": 2, "updates": 1, "window": None},
        {"version": 1},
        {"version": 1, "updates": "x", "window": None},
        {"version": 1, "updates": -1, "window": None},
        {"version": 1, "updates": 1, "window": {}},
        {"version": 1, "updates": 1, "window": 5},
    ],
)
def test_an_invalid_state_is_refused(state: Any):
    task = Task("dropout")
    task.run(BATCHES[0])
    before = task.fingerprint()
    with pytest.raises(
        InputError, match=r"The state \(.*\) is not from .*\. Pass what state_dict\(\) returned"
    ):
        task.accumulate.load_state_dict(state)
    assert_unchanged(before, task.fingerprint())
    assert task.run(BATCHES[1]).made
