"""A learning-rate survey restores all training state bit for bit, however it ends."""

from __future__ import annotations

import itertools
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from superbatch.noise.meter import NoiseMeter
from superbatch.torch import Accumulator, Window, windows
from superbatch.torch.masters import MasterWeights, fp32_masters
from superbatch.torch.options import GhostBatchNorm
from superbatch.torch.tuning import lr_survey
from superbatch.torch.tuning import state as survey_state
from superbatch.torch.window.engine import Engine
from tests.torch.helpers import mse, rows
from tests.torch.states import assert_unchanged, draw_everywhere, fingerprint

module = sys.modules["superbatch.torch.tuning.lr_survey"]  # by its name it is the function
POINTS = 14

# ---------------------------------------------------------------------------------------- a complete training


class Net(nn.Module):
    """Model with dropout, BatchNorm, a non-persistent buffer, a counter and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.calls, self.notes = 0, ["a list"]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.notes.append("called")
            self.get_buffer("seen").add_(len(x))
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


@dataclass
class Training:
    """Accumulator with optimizer, scheduler, scaler, observer and participant, after some updates.

    Attributes:
        fail: called before each forward; it may raise.
    """

    dtype: torch.dtype = torch.float32
    masters: bool = False
    started: int = 3
    fail: Callable[[], None] = lambda: None
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(5)
        np.random.seed(5)
        self.model = Net().to(self.dtype)
        masters = fp32_masters(self.model) if self.masters else None
        owned = list(self.model.parameters() if masters is None else masters.values())
        self.targets = owned
        self.optimizer = torch.optim.Adam(
            [{"params": owned[:2], "weight_decay": 0.1}, {"params": owned[2:], "lr": 0.003}], lr=0.01
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        x, y = torch.randn(48, 4), torch.randn(48, 3)
        self.loader = DataLoader(
            TensorDataset(x, y), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(9)
        )
        self.accumulate = Accumulator(
            self.model,
            self.optimizer if masters is None else MasterWeights(self.optimizer, masters),
            self.loss_fn,
            scheduler=self.scheduler,
            scaler=self.scaler,
            observers=[NoiseMeter(every=2)],
            participants=[GhostBatchNorm()],
            max_grad_norm=1.0,
        )
        self.train(self.started)

    def loss_fn(self, microbatch: Any) -> Tensor:
        self.fail()
        draw_everywhere()
        x, y = (tensor.to(self.dtype) for tensor in microbatch)
        return nn.functional.mse_loss(self.model(x), y)

    def train(self, updates: int) -> None:
        def forever() -> Iterator[Window]:
            while True:
                yield from windows(self.loader, 3)

        for window in itertools.islice(forever(), updates):
            self.losses.append(self.accumulate(window).loss)
        for target in self.targets:
            target.grad = torch.full_like(target, 0.5)  # a window would set it to None

    def survey(self, **options: Any) -> Any:
        return lr_survey(self.accumulate, self.loader, accumulation_steps=3, updates=POINTS, **options)

    def full_state(self) -> dict[str, Any]:
        """All visible state, and state that only the next window would reveal."""
        generator = self.loader.generator
        assert isinstance(generator, torch.Generator)
        found = fingerprint(
            self.model, self.optimizer, self.scheduler, self.scaler, self.accumulate, generators=True
        )
        found |= {f"target {i}": target.detach().clone() for i, target in enumerate(self.targets)}
        found |= {f"gradient {i}": id(target.grad) for i, target in enumerate(self.targets)}
        found |= {f"master {name}": value for name, value in _stale_masters(self.accumulate).items()}
        found["states"] = [id(state) for state in self.optimizer.state.values()]
        found["stepped"] = vars(self.optimizer).get("_opt_called")
        found["scale"] = None if self.scaler._scale is None else float(self.scaler._scale)
        found["loader"] = generator.get_state()
        found["notes"] = list(self.model.notes)
        found["seen"] = self.model.get_buffer("seen").clone()
        found["first"] = not self.accumulate.engine.checked
        return found


def _stale_masters(accumulate: Accumulator) -> dict[str, bool]:
    """Per master: True if it differs from its parameter, so that the next window would overwrite it."""
    return {
        entry.name: not torch.equal(entry.target.to(entry.parameter.dtype), entry.parameter)
        for entry in accumulate.engine.config.owned
    }


def do_nothing() -> None:
    pass


def after(calls: int, raised: type[BaseException]) -> Callable[[], None]:
    count = itertools.count(1)

    def fail() -> None:
        if next(count) == calls:
            raise raised

    return fail


class UserError(Exception):
    """Error in a user's loss function."""


def interrupt_at(point: int) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done == point:
            raise KeyboardInterrupt

    return progress


def end_normally(training: Training) -> None:
    report = training.survey(high=0.1)
    assert len(report.values) == POINTS, "premise: it runs to the end"
    assert report.losses[-1] != report.losses[0]


def end_by_divergence(training: Training) -> None:
    report = training.survey(high=1e9)
    assert report.stopped is not None, "premise: it diverges"
    assert 1 < len(report.values) < POINTS


def end_by_an_error(training: Training) -> None:
    # Before training, the first-window check calls the loss first; an error there is only a warning.
    training.fail = after(20 if training.started else 60, UserError)
    with pytest.raises(UserError):
        training.survey()
    training.fail = do_nothing


def end_by_ctrl_c(training: Training) -> None:
    training.fail = after(17, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        training.survey()
    training.fail = do_nothing


def end_by_ctrl_c_between_updates(training: Training) -> None:
    with pytest.raises(KeyboardInterrupt):
        training.survey(progress=interrupt_at(6))


ENDINGS = [end_normally, end_by_divergence, end_by_an_error, end_by_ctrl_c, end_by_ctrl_c_between_updates]
KINDS: dict[str, dict[str, Any]] = {
    "in training": {},
    "before training": {"started": 0},
    "with masters": {"dtype": torch.bfloat16, "masters": True},
    "with masters, before training": {"dtype": torch.bfloat16, "masters": True, "started": 0},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
@pytest.mark.sampled(2)
def test_all_state_is_restored(kind: str, ending: Callable[[Training], None]) -> None:
    training = Training(**KINDS[kind])
    before = training.full_state()
    ending(training)
    assert_unchanged(before, training.full_state())


@pytest.mark.parametrize("kind", KINDS)
def test_training_continues_as_without_a_survey(kind: str) -> None:
    surveyed, plain = Training(**KINDS[kind]), Training(**KINDS[kind])
    before = torch.get_rng_state()
    surveyed.survey()
    assert torch.equal(before, torch.get_rng_state())
    state = (torch.get_rng_state(), np.random.get_state())
    surveyed.train(4)
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    plain.train(4)
    assert surveyed.losses == plain.losses
    for a, b in zip(surveyed.targets, plain.targets, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(surveyed.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert surveyed.accumulate.updates == plain.accumulate.updates == surveyed.started + 4
    assert surveyed.scheduler.state_dict() == plain.scheduler.state_dict()


def keep_nothing(*_: Any) -> None:
    pass


def no_copy(engine: Engine) -> Engine:
    return engine


def copy_with_the_noise_meter(engine: Engine) -> Engine:
    copy = _copy_for_survey(engine)
    copy.config = replace(copy.config, noise=engine.config.noise)
    return copy


_copy_for_survey = Engine.copy_for_survey


def clear_state_without_undo(optimizer: torch.optim.Optimizer, undo: Any) -> None:
    optimizer.state.clear()


def clear_gradients_without_undo(tensors: Any, undo: Any) -> None:
    for tensor in tensors:
        tensor.grad = None


def copy_state_only(optimizer: torch.optim.Optimizer, undo: Any) -> None:
    """Restore the optimizer's state, but not its groups and attributes."""
    state = dict(optimizer.state)
    undo.callback(survey_state._set_content, optimizer.state, state)
    optimizer.state.clear()


MUTANTS: dict[str, tuple[Any, str, Any, str, str]] = {
    # name: (module, attribute, replacement, kind of training, substring of the item that must differ)
    "parameters": (survey_state, "_keep_contents", keep_nothing, "in training", "first.weight"),
    "gradients": (survey_state, "_remove_gradients", clear_gradients_without_undo, "in training", "gradient"),
    "buffers": (survey_state, "state_restorer", lambda model: do_nothing, "in training", "running_mean"),
    "a buffer that is not saved": (
        survey_state,
        "state_restorer",
        lambda model: do_nothing,
        "in training",
        "'seen'",
    ),
    "attributes": (survey_state, "state_restorer", lambda model: do_nothing, "in training", "'notes'"),
    "random state": (survey_state, "restore_random_state", keep_nothing, "in training", "numpy generator"),
    "optimizer state": (survey_state, "_clear_state", clear_state_without_undo, "in training", "state.0"),
    "optimizer groups": (survey_state, "_clear_state", copy_state_only, "in training", "param_groups.0.lr"),
    "optimizer attributes": (survey_state, "_keep_attributes", keep_nothing, "before training", "stepped"),
    "scaler": (survey_state, "_keep_attributes", keep_nothing, "in training", "scale"),
    "loader": (module, "keep_position", keep_nothing, "in training", "'loader'"),
    "counters and scheduler": (Engine, "copy_for_survey", no_copy, "in training", "StepLR"),
    "counter": (Engine, "copy_for_survey", no_copy, "in training", "updates"),
    "noise meter": (Engine, "copy_for_survey", copy_with_the_noise_meter, "in training", "noise"),
    "first check": (Engine, "copy_for_survey", no_copy, "before training", "first"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_an_item_that_is_not_restored_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, replacement, kind, reported = MUTANTS[name]
    training = Training(**KINDS[kind])
    before = training.full_state()
    monkeypatch.setattr(where, attribute, replacement)
    training.survey(high=0.1)
    found = training.full_state()
    monkeypatch.undo()
    changed = {key for key in before if not _unchanged(before, found, key)} | (before.keys() ^ found.keys())
    assert any(reported.strip("'") in key for key in changed), sorted(changed)
    with pytest.raises(AssertionError):
        assert_unchanged(before, found)


def _unchanged(before: dict[str, Any], found: dict[str, Any], key: str) -> bool:
    try:
        assert_unchanged({key: before[key]}, {key: found[key]} if key in found else {})
    except AssertionError:
        return False
    return True


def test_training_modes_set_by_the_loss_are_restored() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    model[1].eval()

    def loss_fn(batch: Any) -> Tensor:
        model.train()
        return mse(model, batch)

    accumulate = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, check=False)
    lr_survey(accumulate, rows(6, 2, torch.float32), updates=POINTS)
    assert [m.training for m in model.modules()] == [True, True, False]


def test_an_error_in_one_restore_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    before = training.full_state()

    def broken(*_: Any) -> None:
        raise UserError

    monkeypatch.setattr(training.loader, "state_dict", dict, raising=False)
    monkeypatch.setattr(training.loader, "load_state_dict", broken, raising=False)
    with pytest.raises(UserError):
        training.survey(high=0.1)
    assert_unchanged(before, training.full_state())


class StatefulModel(nn.Module):
    """Model with its own generators, and with state in tensors and containers that are not buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.python = [random.Random(1)]
        self.mean = torch.zeros(3)
        self.deep: dict[str, Any] = {"seen": [], "sum": torch.zeros(())}

    def forward(self, x: Tensor) -> Tensor:
        self.mean.add_(1)
        self.deep["sum"].add_(1)
        self.deep["seen"].append(len(x))
        drawn = torch.rand(3, generator=self.torch) + self.numpy.random() + self.python[0].random()
        return (
            self.linear(x) * drawn
            + 0.01 * self.mean
            + 0.01 * self.deep["sum"]
            + 0.01 * len(self.deep["seen"])
        )


def test_model_state_outside_of_buffers_is_restored() -> None:
    def train(*, survey: bool) -> list[float]:
        torch.manual_seed(0)
        model = StatefulModel().double()
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        accumulate = Accumulator(model, sgd, lambda b: mse(model, b), check=False)
        batches = rows(6, 2)
        found = [accumulate(batches[0]).loss]
        if survey:
            assert len(lr_survey(accumulate, batches, updates=POINTS, high=0.1).losses) == POINTS
        return found + [accumulate(batch).loss for batch in batches]

    assert train(survey=True) == train(survey=False)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restore Python's handler of SIGINT: a background process may ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_during_the_restore_waits_until_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    before = training.full_state()
    put, pressed = survey_state._set_content, itertools.count()

    def interrupted(table: Any, content: Any) -> None:
        if next(pressed) == 2:
            signal.raise_signal(signal.SIGINT)
        put(table, content)

    monkeypatch.setattr(survey_state, "_set_content", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        training.survey(high=0.1)
    assert next(pressed) > 3, "premise: more items were left to restore"
    assert signal.getsignal(signal.SIGINT) is handler
    assert_unchanged(before, training.full_state())


def test_a_survey_in_another_thread() -> None:
    """Only the main thread receives Ctrl-C and may set signal handlers."""
    training, found = Training(), []
    before = training.full_state()
    thread = threading.Thread(target=lambda: found.append(training.survey(high=0.1)))
    thread.start()
    thread.join()
    assert len(found[0].losses) == POINTS
    assert_unchanged(before, training.full_state())
