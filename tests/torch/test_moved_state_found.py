"""State in unusual places of user programs, and the cost of the search for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.torch import Accumulator, Gradient
from superbatch.torch.window.participants.forward_state_keeper import ForwardStateKeeper
from superbatch.torch.window.participants.kept_tensors import KeptTensor

F64 = torch.float64
Loss = Callable[[Tensor], Tensor]
Made = tuple[nn.Module, Loss, Callable[[], Any]]  # model, loss_fn, and a function that reads the state
MOVES = r"ignore:forward\(\) updates the state:UserWarning"


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 2, dtype=F64)


def running_float() -> Made:
    model, scale = linear(), 1.0

    def loss_fn(x: Tensor) -> Tensor:
        nonlocal scale
        loss = model(x).square().mean()
        result, scale = loss / scale, 0.9 * scale + 0.1 * loss.item()
        return result

    return model, loss_fn, lambda: scale


def attribute_of_a_function() -> Made:
    model = linear()

    def loss_fn(x: Tensor) -> Tensor:
        out, center = model(x), loss_fn.center  # type: ignore[attr-defined]
        loss_fn.center = 0.9 * center + 0.1 * out.detach().mean(0)  # type: ignore[attr-defined]
        return (out - center).square().mean()

    loss_fn.center = torch.zeros(2, dtype=F64)  # type: ignore[attr-defined]
    return model, loss_fn, lambda: loss_fn.center.clone()  # type: ignore[attr-defined]


def attribute_of_a_class() -> Made:
    class Centered(nn.Module):
        center = torch.zeros(2, dtype=F64)

        def forward(self, out: Tensor) -> Tensor:
            center = Centered.center
            Centered.center = 0.9 * center + 0.1 * out.detach().mean(0)
            return (out - center).square().mean()

    model, criterion = linear(), Centered()
    return model, lambda x: criterion(model(x)), lambda: Centered.center.clone()


def replaced_teacher() -> Made:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student: Any = linear(0)
            self.teacher: Any = linear(1).requires_grad_(requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            loss = (self.student(x) - self.teacher(x)).square().mean()
            teacher = deepcopy(self.teacher)
            with torch.no_grad():
                teacher.weight.lerp_(self.student.weight, 0.1)
            self.teacher = teacher
            return loss

    model: Any = Distilled()
    return model, model, lambda: model.teacher.weight.clone()


def generator_in_a_closure() -> Made:
    model, generator = linear(), torch.Generator().manual_seed(0)

    def loss_fn(x: Tensor) -> Tensor:
        noise = torch.rand(len(x), 2, dtype=F64, generator=generator)
        return (model(x) * noise).square().mean()

    return model, loss_fn, generator.get_state


def large_bank() -> Made:
    model, bank, place = linear(), torch.zeros(100_000, 2, dtype=F64), [50_000]

    def loss_fn(x: Tensor) -> Tensor:
        out = model(x)
        loss = (out - bank.sum(0)).square().mean()
        bank[place[0]] = out.detach().mean(0)
        place[0] += 1
        return loss

    return model, loss_fn, bank.clone


PROGRAMS = {
    make.__name__: make
    for make in (
        running_float,
        attribute_of_a_function,
        attribute_of_a_class,
        replaced_teacher,
        generator_in_a_closure,
        large_bank,
    )
}


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def trained(made: Made, *, check: bool, fails: list[str] | None = None) -> Accumulator:
    model, loss_fn, _ = made
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def failing(module: Any, inputs: Any, output: Any) -> None:
        if fails and fails.pop() == "now":
            raise torch.OutOfMemoryError("CUDA out of memory.")

    layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
    layer.register_forward_hook(failing)
    return Accumulator(model, optimizer, loss_fn, microbatch_size=4, check=check)


@pytest.mark.filterwarnings(MOVES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_check_does_not_change_the_state(name: str) -> None:
    states = []
    for check in (True, False):
        made = PROGRAMS[name]()
        before = made[2]()
        trained(made, check=check)(torch.randn(8, 3, dtype=F64, generator=torch.Generator().manual_seed(1)))
        states.append(made[2]())
        assert not same(before, states[-1]), "premise: the state changes"
    assert same(*states)


@pytest.mark.filterwarnings(MOVES, "ignore:A window was discarded, but the state 'bank'")
@pytest.mark.parametrize("windows", [0, 1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_discarded_window_restores_the_state(name: str, windows: int) -> None:
    made = PROGRAMS[name]()
    accumulate = trained(made, check=windows > 0)
    batch = torch.randn(8, 3, dtype=F64)
    for _ in range(windows):
        accumulate(batch)
    before = made[2]()
    with accumulate.window(batch) as window:
        for _ in window:
            made[1](batch)
            break
    assert not window.update.made  # type: ignore[union-attr]
    if name == "large_bank" and not windows:  # it was not copied, as a warning says
        assert not same(before, made[2]())
    else:
        assert same(before, made[2]())


def test_a_retry_after_out_of_memory_repeats_the_random_numbers() -> None:
    made, other = generator_in_a_closure(), generator_in_a_closure()
    with pytest.warns(UserWarning, match="memory ran out"):
        # The second of two micro-batches fails; the retry uses micro-batches of two samples.
        update = trained(made, check=False, fails=["now", "later"])(torch.ones(8, 3, dtype=F64))
    assert update.failures == 1, "premise"
    for _ in range(4):
        torch.rand(2, 2, dtype=F64, generator=other[2].__self__)  # type: ignore[attr-defined]
    assert update.microbatches == 4
    assert torch.equal(made[2](), other[2]())


def test_a_frozen_backbone_is_not_copied_by_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parameters are not copied either: there may be hundreds, which would take milliseconds."""
    backbone = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20))).requires_grad_(requires_grad=False)
    model = nn.Sequential(backbone, nn.Linear(64, 1))
    copied: list[str] = []
    copy_now = KeptTensor.copy_now
    monkeypatch.setattr(KeptTensor, "copy_now", lambda self: (copied.append(self.name), copy_now(self)))
    keeper = ForwardStateKeeper([model], [lambda x: model(x).mean()])
    keeper.begin(check=True)
    keeper.learn()
    keeper.end_check()
    for _ in range(16):
        keeper.begin()
        keeper.commit()
    assert copied == []


class CountingMetric(nn.Module):
    """Metric whose state is updated once per micro-batch and not used by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def forward(self, x: Tensor) -> None:
        self.total = self.total + len(x)


@pytest.mark.parametrize("package", ["torchmetrics.metric", "of_a_user"])
def test_the_state_of_a_metric_is_restored_after_the_check_without_a_warning(
    package: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(CountingMetric, "__module__", package)
    model: Any = linear()
    model.seen = CountingMetric()

    def loss_fn(x: Tensor) -> Tensor:
        model.seen(x)
        return model(x).square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        Gradient(model, loss_fn, microbatch_size=4)(torch.ones(12, 3, dtype=F64))
    assert model.seen.total == 12
    warned = [str(warning.message) for warning in recwarn]
    assert any("'seen.total'" in text for text in warned) == (package == "of_a_user")


class Trainer:
    """Stand-in for a training loop that a module refers to."""

    def __init__(self, logged: list[float]) -> None:
        self.logged, self.loss = logged, 0.0


@pytest.mark.parametrize("package", ["lightning.pytorch.trainer", "of_a_user"])
def test_the_trainer_of_a_module_is_not_searched(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "__module__", package)
    model: Any = CountingMetric()
    model.trainer = Trainer([])
    keeper = ForwardStateKeeper([model])
    keeper.begin(check=True)
    model.trainer.loss = 1.0
    model.trainer.logged.append(1.0)
    keeper.restore()
    keeper.end_check()
    kept = package != "of_a_user"
    assert (model.trainer.loss, model.trainer.logged) == ((1.0, [1.0]) if kept else (0.0, []))
