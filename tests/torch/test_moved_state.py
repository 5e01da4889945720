"""State outside of the model's buffers that a forward updates: found, restored, warned of by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.torch import Accumulator, WholeBatch, Window, verify
from superbatch.torch.window.participants import forward_state_keeper
from superbatch.torch.window.participants.kept_tensors import KeptTensor
from superbatch.torch.window.participants.reached import Reached
from tests.torch.moving_programs import F64, FEATURES, PROGRAMS, Program, batches, frozen, linear

MOVES = r"ignore:forward\(\) updates the state"
each_program = pytest.mark.parametrize("name", PROGRAMS)


def accumulator(program: Program, **options: Any) -> Accumulator:
    options = {"microbatch_size": 4, **options}
    optimizer = torch.optim.SGD(program.model.parameters(), lr=0.1)
    return Accumulator(program.model, optimizer, program.loss_fn, **options)


def same(a: list[Any], b: list[Any]) -> bool:
    """Compare two lists of contents bit for bit."""
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


def parameters(program: Program) -> list[Tensor]:
    return [p.detach().clone() for p in program.model.parameters()]


def trained(name: str, **options: Any) -> tuple[list[Any], list[Tensor]]:
    program = PROGRAMS[name]()
    before = program.contents()
    accumulate = accumulator(program, **options)
    for batch in batches():
        accumulate(batch)
    assert not same(before, program.contents()), "premise: the state changes"
    return program.contents(), parameters(program)


@each_program
@pytest.mark.filterwarnings(MOVES)
def test_the_check_does_not_change_a_training(name: str) -> None:
    state, weights = trained(name, check=True)
    wanted_state, wanted = trained(name, check=False)
    assert same(state, wanted_state)
    assert same(weights, wanted)


@each_program
def test_the_warning_names_the_updated_state(name: str) -> None:
    program = PROGRAMS[name]()
    with pytest.warns(UserWarning, match=r"forward\(\) updates the state") as said:
        accumulator(program)(batches()[0])
    assert [Path(one.filename) for one in said] == [Path(__file__)], "it points at the user's line"
    text = str(said[0].message)
    named = [one for one in program.names if repr(one) in text]
    assert len(named) == min(5, len(program.names)), text
    assert ("1 more" in text) == (len(program.names) == 6), text


@each_program
def test_updated_state_changes_the_update(name: str) -> None:
    """Premise of the warning: with micro-batches the update differs from that of the large batch."""
    state, weights = trained(name, check=False)
    large_state, large = trained(name, check=False, microbatch_size=None)
    differences = [*zip(state, large_state, strict=True), *zip(weights, large, strict=True)]
    error = max(float((a - b).norm() / b.norm()) for a, b in differences if isinstance(a, Tensor))
    assert error > 1e-3


class Stop(Exception):
    pass


@each_program
@pytest.mark.filterwarnings(MOVES)
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("windows", [0, 1, 5])
@pytest.mark.sampled(2)
def test_a_discarded_window_restores_the_state(name: str, windows: int, check: bool) -> None:
    program = PROGRAMS[name]()
    accumulate = accumulator(program, check=check)
    for batch in batches(windows):
        accumulate(batch)
    objects, before = program.state(), program.contents()
    addresses = [item.data_ptr() for item in objects if isinstance(item, Tensor)]
    with pytest.raises(Stop), accumulate.window(batches()[0]) as window:  # noqa: PT012
        for index, microbatch in enumerate(window):
            loss = program.loss_fn(microbatch)
            if index == 2:
                still = (
                    name == "average by lerp" and not windows
                )  # at the start the teacher equals the student
                assert same(before, program.contents()) == still, "premise: the state has changed"
                raise Stop
            window.backward(loss)
    assert same(before, program.contents())
    now = program.state()
    assert all(a is b for a, b in zip(objects, now, strict=True) if isinstance(a, Tensor))
    assert addresses == [item.data_ptr() for item in now if isinstance(item, Tensor)]


@each_program
@pytest.mark.filterwarnings(MOVES, "ignore:memory ran out")
@pytest.mark.parametrize("windows", [0, 1])
@pytest.mark.sampled(2)
def test_a_retry_after_out_of_memory_updates_the_state_once(name: str, windows: int) -> None:
    """The failed attempt is rolled back: the result is that of smaller micro-batches from the start."""
    program, fails = PROGRAMS[name](), []

    def failing(microbatch: Tensor) -> Tensor:
        loss = program.loss_fn(microbatch)
        if fails and fails.pop() == "now":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss

    optimizer = torch.optim.SGD(program.model.parameters(), lr=0.1)
    accumulate = Accumulator(program.model, optimizer, failing, microbatch_size=4, check=windows > 0)
    for batch in batches(windows):
        accumulate(batch)
    fails += ["now", "later"]  # fail in the second micro-batch
    batch = batches()[1]
    update = accumulate(batch)
    assert update.failures == 1, "premise: memory ran out"
    assert update.microbatches == 6, "premise: the window restarted in micro-batches of two"

    other = PROGRAMS[name]()
    reference = accumulator(other, check=False)
    for one in batches(windows):
        reference(one)
    reference(Window(list(batch.split(2))))
    assert same(program.contents(), other.contents())
    assert same(parameters(program), parameters(other))


@pytest.mark.filterwarnings(MOVES)
@pytest.mark.parametrize("test", ["check", "discard"])
@each_program
@pytest.mark.sampled(2)
def test_large_state_is_copied_when_it_is_first_written(
    name: str, test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy is made in advance: the check copies state that is about to be written."""
    monkeypatch.setattr(forward_state_keeper, "SMALL_BYTES", 0)
    monkeypatch.setattr(forward_state_keeper, "MOST_BYTES", 0)
    if test == "check":
        test_the_check_does_not_change_a_training(name)
    else:
        for windows in (0, 1, 5):
            test_a_discarded_window_restores_the_state(name, windows, check=True)


def with_backbone() -> tuple[nn.Module, nn.Module, Tensor]:
    """Make a large frozen layer, a small trained layer on top of it, and a large constant."""
    backbone = nn.Linear(FEATURES, 1 << 16, dtype=F64).requires_grad_(requires_grad=False)
    return backbone, nn.Linear(1 << 16, 1, dtype=F64), torch.randn(1 << 18, dtype=F64)


@pytest.mark.parametrize("check", [True, False])
def test_unchanged_state_is_not_copied(check: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_state_keeper, "SMALL_BYTES", 1 << 18)
    monkeypatch.setattr(forward_state_keeper, "MOST_BYTES", 1 << 19)
    copied: list[str] = []
    copy_now = KeptTensor.copy_now
    monkeypatch.setattr(KeptTensor, "copy_now", lambda self: (copied.append(self.name), copy_now(self)))
    backbone, head, constant = with_backbone()
    sizes = [parameter.nbytes for parameter in backbone.parameters()]
    assert min(sizes) >= 1 << 19, "premise: they are large"
    model = nn.Sequential(backbone, head)
    loss_fn = lambda x: (model(x) + constant[0]).square().mean()  # noqa: E731
    optimizer = torch.optim.SGD(head.parameters(), lr=1e-6)
    accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size=4, check=check)
    for batch in batches(5):
        accumulate(batch)
    # A first window without a check copies frozen parameters up to the size of the trained ones.
    assert set(copied) <= (set() if check else {"0.bias"})


def updated_late(start: int) -> tuple[Program, list[int]]:
    student, teacher, forwards = linear(0), frozen(1), [0]

    def loss_fn(x: Tensor) -> Tensor:
        forwards[0] += 1
        if forwards[0] > start:
            with torch.no_grad():
                teacher.weight.mul_(0.9).add_(student.weight, alpha=0.1)
        return (student(x) - teacher(x + 0.1)).square().mean()

    return Program(student, loss_fn, lambda: [teacher.weight], ("teacher.weight",)), forwards


@pytest.mark.parametrize("seen", [True, False])
def test_state_that_is_first_updated_late(seen: bool) -> None:
    """The first window that updates the state warns by name; later windows restore the state."""
    program, forwards = updated_late(6 if seen else 8)  # windows of 3 micro-batches, without a check
    accumulate = accumulator(program, check=False)
    for batch in batches(2):
        accumulate(batch)
    if seen:
        accumulate(batches()[0])
    before = program.contents()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with accumulate.window(batches()[0]) as window:
            for microbatch in window:
                program.loss_fn(microbatch)
                if forwards[0] % 3 == 0:
                    break
                window.backward(program.loss_fn(microbatch))
                forwards[0] -= 1
    assert same(before, program.contents()) == seen
    assert [("teacher.weight" in str(one.message)) for one in said] == ([] if seen else [True])


@each_program
@pytest.mark.filterwarnings("ignore:memory ran out")
def test_mutant_that_restores_only_buffers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def reach_nothing(models: Any, functions: Any) -> Reached:
        return Reached([], [], {module: path for model in models for path, module in model.named_modules()})

    monkeypatch.setattr(forward_state_keeper, "reach", reach_nothing)
    if name != "average by lerp":  # in its check the teacher equals the student
        with pytest.raises((AssertionError, UserWarning)):  # or the check finds a loss that does not repeat
            test_the_check_does_not_change_a_training(name)
    with pytest.raises(AssertionError):
        test_a_discarded_window_restores_the_state(name, 1, check=False)
    with pytest.raises((AssertionError, UserWarning)):  # or the check finds a loss that does not repeat
        test_a_retry_after_out_of_memory_updates_the_state_once(name, 1)


@pytest.mark.filterwarnings(MOVES)
def test_mutant_that_does_not_copy_before_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptTensor, "copy_now", lambda self: None)
    with pytest.raises((AssertionError, UserWarning)):
        test_the_check_does_not_change_a_training("average by foreach")


def train_large_batches(name: str) -> tuple[list[Any], list[Tensor]]:
    """Train with plain torch on large batches."""
    program = PROGRAMS[name]()
    optimizer = torch.optim.SGD(program.model.parameters(), lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        program.loss_fn(batch).backward()
        optimizer.step()
    return program.contents(), parameters(program)


def assert_as_large(program: Program, name: str) -> None:
    state, weights = train_large_batches(name)
    for ours, real in zip([*program.state(), *program.model.parameters()], [*state, *weights], strict=True):
        if isinstance(real, Tensor):
            assert type(ours) in (Tensor, nn.Parameter), "it is still a virtual tensor"
            torch.testing.assert_close(ours.detach(), real.detach(), rtol=1e-12, atol=1e-12)
        else:
            assert ours == real


@each_program
def test_the_coupled_path_updates_the_state_once(name: str) -> None:
    program = PROGRAMS[name]()
    optimizer = torch.optim.SGD(program.model.parameters(), lr=0.1)
    accumulate = WholeBatch(program.model, optimizer, program.loss_fn, microbatch_size=4)
    for batch in batches():
        accumulate(batch)
    assert accumulate.coupling is not None
    assert accumulate.coupling.microbatches == 3
    assert_as_large(program, name)


@each_program
@pytest.mark.parametrize("error", [Stop, torch.OutOfMemoryError])
@pytest.mark.filterwarnings("ignore:memory ran out")
@pytest.mark.sampled(2)
def test_a_failure_in_the_coupled_path_restores_the_state(name: str, error: type[Exception]) -> None:
    program, fails = PROGRAMS[name](), []

    def failing(batch: Tensor) -> Tensor:
        loss = program.loss_fn(batch)
        if fails:
            raise fails.pop()
        return loss

    optimizer = torch.optim.SGD(program.model.parameters(), lr=0.1)
    accumulate = WholeBatch(program.model, optimizer, failing, microbatch_size=4)
    for index, batch in enumerate(batches()):
        before, objects = program.contents(), program.state()
        if index != 1:
            fails.append(error("CUDA out of memory."))
        if error is Stop and fails:
            with pytest.raises(Stop):
                accumulate(batch)
            assert same(before, program.contents())
            assert all(a is b for a, b in zip(objects, program.state(), strict=True) if isinstance(a, Tensor))
        accumulate(batch)
    assert_as_large(program, name)


@each_program
@pytest.mark.parametrize("end", ["break", "update"])
def test_a_saved_window_is_resumed_and_can_be_discarded(name: str, end: str, tmp_path: Path) -> None:
    """A new program with the state of the save can finish the window or roll back to its start."""
    program = PROGRAMS[name]()
    accumulate = accumulator(program, check=False)
    accumulate(batches()[0])
    before = program.contents()
    with accumulate.window(batches()[1]) as window:
        for index, microbatch in enumerate(window):
            window.backward(program.loss_fn(microbatch))
            if index == 1:
                torch.save(accumulate.state_dict(), tmp_path / "state")
    wanted, weights = program.contents(), parameters(program)

    new = PROGRAMS[name]()
    accumulator(new, check=False)(batches()[0])
    for microbatch in batches()[1].split(4)[:2]:
        new.loss_fn(microbatch)
    assert not same(before, new.contents()), "premise: the state is that of the save"
    resumed = accumulator(new, check=False)
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    with resumed.window(batches()[1]) as window:
        for microbatch in window:
            loss = new.loss_fn(microbatch)
            if end == "break":
                break
            window.backward(loss)
    if end == "break":
        assert same(before, new.contents())
    else:
        assert same(wanted, new.contents())
        assert same(weights, parameters(new))


@each_program
def test_verify_does_not_change_the_state(name: str) -> None:
    program = PROGRAMS[name]()
    accumulator(program, check=False)(batches()[0])  # otherwise one of the teachers would not change
    before, objects = program.contents(), program.state()
    verify(program.model, program.loss_fn, batches()[1], microbatch_size=4, dtype="own")
    assert same(before, program.contents())
    assert all(a is b for a, b in zip(objects, program.state(), strict=True) if isinstance(a, Tensor))
