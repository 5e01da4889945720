"""State that loss_fn changes and that cannot be restored when memory runs out raises or warns."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import OutOfMemoryError
from superbatch.torch import Accumulator, WholeBatch
from superbatch.torch.window.participants import forward_state_keeper, kept_tensors
from superbatch.torch.window.participants.forward_state_keeper import ForwardStateKeeper
from superbatch.torch.window.participants.kept_tensors import KeptTensor

F64 = torch.float64
SAMPLES, ROWS = 8, 200_000  # the bank is larger than tensors that are copied
FIRST = 100_000  # after the values that are compared


def _in_place(bank: Tensor, rows: Tensor, values: Tensor) -> None:
    bank[rows] = values


def _data(bank: Tensor, rows: Tensor, values: Tensor) -> None:
    bank.data[rows] = values


def _numpy(bank: Tensor, rows: Tensor, values: Tensor) -> None:
    bank.numpy()[rows.numpy()] = values.numpy()


Write = Callable[[Tensor, Tensor, Tensor], object]
WRITES: dict[str, Write] = {
    "in place": _in_place,
    "through .data": _data,
    "through NumPy": _numpy,
}


@dataclass
class Program:
    """A model trained towards its last outputs, in a bank in which each sample has its own row.

    Any split therefore makes the update of the real batch, unless a micro-batch runs twice.
    """

    write: Write
    fails: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.bank = torch.zeros(ROWS, 1, dtype=F64)

    def loss_fn(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, rows = batch
        out = self.model(x)
        loss = (out - self.bank[rows]).square().mean()
        self.write(self.bank, rows, out.detach() + 1)
        if self.fails and self.fails.pop() == "now":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss

    def accumulator(self, **options: Any) -> Accumulator:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        return Accumulator(self.model, optimizer, self.loss_fn, check=False, **options)

    def whole_batch(self, **options: Any) -> WholeBatch:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        return WholeBatch(self.model, optimizer, self.loss_fn, **options)

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(FIRST, FIRST + SAMPLES)


def large(write: Write) -> Program:
    """Return the program after one update with the real large batch."""
    program = Program(write)
    optimizer = torch.optim.SGD(program.model.parameters(), lr=0.1, momentum=0.9)
    program.loss_fn(batch()).backward()
    optimizer.step()
    return program


def error_of(mine: Program, real: Program) -> float:
    """Return the largest error of a parameter, relative to the update of the real batch."""
    start = Program(_in_place).parameters()
    wanted, found = real.parameters(), mine.parameters()
    assert all((wanted[name] - start[name]).norm() > 1e-3 for name in start), "premise: all parameters change"
    return max(
        float((found[name] - wanted[name]).norm() / (wanted[name] - start[name]).norm()) for name in start
    )


NOT_RESTORED = "ignore:A window was discarded, but the state 'Program.bank'"


@pytest.mark.filterwarnings(NOT_RESTORED)
@pytest.mark.parametrize("name", WRITES)
def test_a_window_is_not_repeated_if_state_cannot_be_restored(name: str) -> None:
    program = Program(WRITES[name], ["now", "later"])  # the second micro-batch
    accumulate = program.accumulator(microbatch_size=4)
    before, bank, random = program.parameters(), program.bank.clone(), torch.get_rng_state()
    with pytest.raises(
        OutOfMemoryError, match=r"changed the state 'Program\.bank' .* everything else is as before"
    ):
        accumulate(batch())
    assert not torch.equal(bank, program.bank), "premise: the bank has changed"
    after = program.parameters()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in program.model.parameters())
    assert torch.equal(random, torch.get_rng_state())

    # The advice of the error: the bank is copied from now on, so the next window can be repeated.
    program.bank.copy_(bank)
    program.fails += ["now", "later"]
    with pytest.warns(UserWarning, match=r"begins again .* The update is the same"):
        update = accumulate(batch())
    assert update.failures == 1
    real = large(WRITES[name])
    assert error_of(program, real) < 1e-12
    assert torch.equal(program.bank, real.bank) or (program.bank - real.bank).abs().max() < 1e-12


def _late(bytes_: int) -> tuple[Program, Accumulator]:
    """Return a program that starts to write its state in the second window, without a copy of it."""
    program = Program(lambda *_: None)
    program.bank = program.bank[: bytes_ // 8]
    accumulate = program.accumulator(microbatch_size=4)
    x, _ = batch()
    accumulate((x, torch.arange(SAMPLES)))
    program.write = _in_place
    program.fails += ["now", "later"]
    return program, accumulate


@pytest.mark.parametrize("bytes_", [800, 8 * ROWS])
@pytest.mark.filterwarnings(NOT_RESTORED)
def test_state_that_first_changes_in_a_later_window_raises(bytes_: int) -> None:
    program, accumulate = _late(bytes_)
    before = program.parameters()
    x, _ = batch()
    with pytest.raises(OutOfMemoryError, match=r"changed the state 'Program\.bank' for the first time"):
        accumulate((x, torch.arange(SAMPLES)))
    after = program.parameters()
    assert all(torch.equal(before[name], after[name]) for name in before)
    program.bank.zero_()
    program.fails += ["now", "later"]
    with pytest.warns(UserWarning, match="The update is the same"):
        update = accumulate((x, torch.arange(SAMPLES)))
    assert update.failures == 1
    whole = Program(lambda *_: None)
    optimizer = torch.optim.SGD(whole.model.parameters(), lr=0.1, momentum=0.9)
    for write in (whole.write, _in_place):
        whole.write = write
        optimizer.zero_grad()
        whole.loss_fn((x, torch.arange(SAMPLES))).backward()
        optimizer.step()
    assert error_of(program, whole) < 1e-12


@pytest.mark.filterwarnings(NOT_RESTORED)
def test_a_whole_batch_is_not_repeated_if_state_cannot_be_restored() -> None:
    # Rows and values are virtual there, so the program writes a real value.
    program = Program(lambda bank, *_: bank[FIRST:].fill_(1.0), ["now"])
    accumulate = program.whole_batch(microbatch_size=4)
    before, bank = program.parameters(), program.bank.clone()
    with pytest.raises(OutOfMemoryError, match="changed the state"):
        accumulate(batch())
    assert not torch.equal(bank, program.bank), "premise: the bank has changed"
    after = program.parameters()
    assert all(torch.equal(before[name], after[name]) for name in before)


class Counting(nn.Module):
    """A layer whose forward writes its buffer if `counts` is true."""

    seen: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(size, dtype=F64))
        self.layer = nn.Linear(2, 1, dtype=F64)
        self.counts = False

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.seen.add_(1)
        return self.layer(x)


def _in_third_window(size: int, *functions: Any) -> tuple[Any, ForwardStateKeeper]:
    """Return a layer and a keeper inside its third window; nothing changed in the first two."""
    model = Counting(size)
    keeper = ForwardStateKeeper([model], functions)
    for _ in range(2):
        keeper.begin()
        model(torch.ones(1, 2, dtype=F64))
        keeper.commit()
    keeper.begin()
    return model, keeper


def test_a_view_of_a_buffer_is_restored_with_it() -> None:
    model = Counting(3)
    seen = model.seen.detach()
    keeper = ForwardStateKeeper([model], [lambda x: model(x) * seen.sum()])
    for window in range(2):
        keeper.begin()
        if window:
            model.counts = True
            model(torch.ones(1, 2, dtype=F64))
            assert seen.any(), "premise: it has changed"
            assert keeper.unrestorable() == []
            keeper.restore()  # without a warning
            assert not seen.any()
        else:
            keeper.commit()


def test_changes_that_a_check_restores_do_not_count_for_the_window() -> None:
    bank = torch.zeros(3, dtype=F64)
    model, keeper = _in_third_window(1 << 18, lambda: bank)
    check = keeper.new_keeper()
    check.begin(check=True)
    before = bank._version, model.seen._version
    with check.watching():
        bank.add_(1)
        model.seen.add_(1)
    check.end_check()
    assert not bank.any()
    assert not model.seen.any()
    assert (bank._version, model.seen._version) > before, "premise: only the values are restored"
    assert keeper.unrestorable() == []
    assert not keeper.changed()
    keeper.restore()  # without a warning
    bank.add_(1)
    assert keeper.unrestorable() == ["bank"]


@pytest.mark.parametrize("size", [3, 1 << 18], ids=["small", "large"])
def test_a_buffer_that_first_changes_in_a_later_window_is_restored_or_named(size: int) -> None:
    model, keeper = _in_third_window(size)
    model.counts = True
    model(torch.ones(1, 2, dtype=F64))
    if size == 3:
        assert keeper.unrestorable() == []
        keeper.restore()
        assert not model.seen.any()
        return
    assert keeper.unrestorable() == ["seen"]
    with pytest.warns(UserWarning, match="the state 'seen' was not restored"):
        keeper.restore()
    keeper.begin()  # from now on it is copied
    model(torch.ones(1, 2, dtype=F64))
    keeper.restore()
    assert bool((model.seen == 1).all())


def test_state_too_large_to_compare_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_state_keeper, "MOST_SUMMED", 0)
    program = Program(_data, ["now", "later"])
    with pytest.warns(UserWarning, match=r"same, .*unless loss_fn writes to '.*bank' through"):
        program.accumulator(microbatch_size=4)(batch())
    assert error_of(program, large(_data)) > 1e-2, "premise: it writes to the bank, and the update is wrong"


def test_a_constant_tensor_does_not_stop_a_repeated_window() -> None:
    program = Program(lambda *_: None, ["now", "later"])
    with pytest.warns(UserWarning, match="The update is the same") as caught:
        update = program.accumulator(microbatch_size=4)(batch())
    assert update.failures == 1
    assert not re.search("unless", str(caught[0].message))
    assert error_of(program, large(lambda *_: None)) < 1e-12


@pytest.mark.parametrize(
    ("place", "method", "mutant", "write"),
    [
        (ForwardStateKeeper, "unrestorable", lambda self: [], "in place"),
        (KeptTensor, "record_sums", lambda self: None, "through .data"),
    ],
    ids=["lost state is not reported", "only versions and the first values are compared"],
)
@pytest.mark.filterwarnings("ignore:memory ran out", NOT_RESTORED)
def test_mutants_make_a_wrong_update(
    place: Any, method: str, mutant: Any, write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, method, mutant)
    program = Program(WRITES[write], ["now", "later"])
    assert program.accumulator(microbatch_size=4)(batch()).failures == 1
    assert error_of(program, large(WRITES[write])) > 1e-2


@pytest.mark.parametrize("bytes_", [1 << 20, (1 << 20) + 1, (1 << 21) + 4093])
def test_sums_show_a_write_anywhere(bytes_: int) -> None:
    tensor = torch.zeros(bytes_ + 3, dtype=torch.uint8)[3:]  # not aligned
    for one in (tensor, torch.zeros(bytes_, dtype=torch.uint8), torch.zeros(bytes_ // 8, dtype=F64)):
        before = kept_tensors.sums_of(one)
        for place in (0, len(one) // 2, len(one) - 1):
            one.data[place] = 1
            after = kept_tensors.sums_of(one)
            assert before is not None and after is not None
            assert not torch.equal(before, after)
            before = after
