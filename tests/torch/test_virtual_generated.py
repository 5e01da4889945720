"""Generated functions of sweeps give bitwise the interpreter's results, and free tensors as early."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.torch import virtual_batch
from superbatch.torch.virtual.ir.calls import Direct
from superbatch.torch.virtual.ir.shard import BatchSlice, Shard
from superbatch.torch.virtual.ir.values import Value
from superbatch.torch.virtual.run import generated, sweep
from superbatch.torch.virtual.run.instructions import Instruction, Load, SideEffects
from superbatch.torch.virtual.run.interpreter import interpreted

SAMPLES = 21
X = torch.randn(SAMPLES, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randint(0, 5, (SAMPLES,), generator=torch.Generator().manual_seed(2))


class Towers(nn.Module):
    """Two encoders with a loss over all pairs, so the forward runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.GELU(), nn.Linear(8, 6))
        self.right = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.Dropout(0.4))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.left(x)) @ F.normalize(self.right(x)).T


class Recurrent(nn.Module):
    """LSTM, whose operators take lists of tensors and return several."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(24, 6, batch_first=True), nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.out(self.cells(x.flatten(2).reshape(len(x), -1, 24))[0][:, -1]))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(4, 5),
    )


def trained(model: nn.Module, size: int, **options: Any) -> list[Tensor]:
    """Return losses, gradients and buffers of three updates; the third has a known structure."""
    found: list[Tensor] = []
    for _ in range(3):
        model.zero_grad()
        with virtual_batch(model, size, **options) as batch:
            outputs = model(batch(X))
            loss = F.cross_entropy(outputs, batch(Y) if outputs.shape[1] == 5 else torch.arange(SAMPLES))
            loss.backward()
            found.append(torch.tensor(loss.item(), dtype=torch.float64))
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found += [b.clone() for b in model.buffers()]
    return found


@pytest.mark.parametrize("make", [convolutional, Towers, Recurrent])
@pytest.mark.parametrize(
    ("size", "options"),
    [(2, {}), (2, {"device_budget": 0}), (1, {}), (21, {}), (8, {}), (2, {"rng": "batch"})],
    ids=["11 micro-batches", "offloaded", "single samples", "one micro-batch", "3 micro-batches", "rng"],
)
def test_results_equal_the_interpreter_bitwise(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], size: int, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(sweep, "GENERATE_FROM", 1)
    written: list[str] = []

    def record(*args: Any) -> Any:
        function = generated.generated(*args)
        assert isinstance(function, FunctionType)
        written.append(function.__code__.co_filename)
        return function

    runs: list[list[Tensor]] = []
    for how in (interpreted, record):
        monkeypatch.setattr(sweep, "generated", how)
        torch.manual_seed(0)
        runs.append(trained(make().double(), size, **options))
    assert written.count("<sweep of superbatch>") >= len(written) // 3 > 0, "no function was generated"
    assert any(bool(one.count_nonzero()) for one in runs[0])
    assert all(map(torch.equal, *runs))


# -- hand-written programs ----------------------------------------------------------------------------------

LAYOUT = Shard(0)


class Recorder:
    """Stand-in for a store and for a reduction."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def put(self, microbatch: BatchSlice, rows: Tensor) -> None:
        self.found.append(rows.clone())

    def add(self, microbatch: BatchSlice, outputs: list[Any]) -> None:
        self.found.append([None if one is None else one.clone() for one in outputs])


def program(log: list[Any]) -> tuple[list[Instruction], list[Any], Recorder, Recorder, Value]:
    """Return a program with all features of instructions; it logs which tensors are alive."""
    alive: dict[str, weakref.ref[Tensor]] = {}

    def note(name: str, tensor: Tensor) -> Tensor:
        alive[name] = weakref.ref(tensor)
        log.append((name, sorted(key for key, one in alive.items() if one() is not None)))
        return tensor

    def several(microbatch: BatchSlice, tensors: list[Tensor]) -> tuple[Tensor, None, Tensor]:
        return note("first", tensors[0] * 2), None, note("second", tensors[0] + microbatch.start)

    def taking(microbatch: BatchSlice, tensors: list[Any]) -> tuple[Tensor, Tensor]:
        taken, other = tensors.pop(0) * 3, tensors.pop(0)
        note("taken", taken)
        return taken, note("sum", taken + other)

    kept: Any
    reduction: Any
    kept, reduction, carried = Recorder(), Recorder(), Value(torch.empty(3), torch.device("cpu"))
    steps = [
        Instruction(
            lambda microbatch, tensors: note("sine", tensors[0].sin()),
            [1],
            0,
            SideEffects([Load(1, carried, LAYOUT, 0)], [(None, 2)], [], None, [], [], []),
            [1],
        ),
        Instruction(Direct(torch.add, (0.5,)), [2], 3, None, []),
        Instruction(
            several,
            [3],
            0,
            SideEffects([], [(0, 4), (2, 5)], [2, 1], reduction, [(4, kept)], [(5, carried)], []),
            [2, 3],
        ),
        Instruction(
            taking, [4, 5], 0, SideEffects([], [(0, 6), (1, 7)], [], None, [(7, kept)], [], [4, 5]), [6]
        ),
        Instruction(
            Direct(lambda *tensors: note("end", torch.stack(tensors).sum(0)), ()), [7, 0, 7], 8, None, [7]
        ),
        Instruction(
            Direct(torch.sum, ()),
            [8],
            0,
            SideEffects([], [], [None], reduction, [], [], []),
            [8],
        ),
    ]
    return steps, [torch.full((3,), 7.0), *[None] * 8], kept, reduction, carried


def run_program(
    how: Callable[..., Any], *, carries: bool
) -> tuple[list[Any], list[Any], dict[Value, Tensor]]:
    """Return the log of live tensors, the stored, reduced and carried values, and the carried rows."""
    log: list[Any] = []
    steps, registers, kept, reduction, carried = program(log)
    rows: dict[Value, Tensor] = {}
    function = how(steps, registers, rows)

    def load(load: Load, microbatch: BatchSlice, ahead: Any, following: Any) -> Tensor:
        return torch.arange(3.0) + microbatch.start + ahead + following

    for number in range(2):
        function(BatchSlice(number, 3 * number, 3 * number + 3), load, 0.25, 0.5, carries)
    assert (carried in rows) is carries
    return log, [kept.found, reduction.found, *rows.values()], rows


def flat(found: Any) -> list[Any]:
    return [leaf for one in found for leaf in flat(one)] if isinstance(found, list) else [found]


def generate(steps: Any, registers: Any, rows: Any) -> Any:
    """Return a generated function; the first call makes the structure known."""
    generated.generated(steps, registers, rows)
    function = generated.generated(steps, registers, rows)
    assert function.__code__.co_filename == "<sweep of superbatch>"
    return function


def agree(first: Any, second: Any) -> bool:
    pairs = list(zip(flat(first[1]), flat(second[1]), strict=True))
    numbers = all(torch.equal(a, b) if isinstance(a, Tensor) else a is b for a, b in pairs)
    return numbers and first[0] == second[0]


@pytest.mark.parametrize("carries", [False, True])
def test_all_features_of_instructions(carries: bool) -> None:
    plain = run_program(interpreted, carries=carries)
    assert len(flat(plain[1])) > 8
    assert ("taken", ["second", "taken"]) in plain[0], "premise: tensors freed early are gone"
    assert agree(plain, run_program(generate, carries=carries))


@pytest.mark.parametrize("method", ["_free", "_finish"])
def test_mutant_that_omits_code(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def nothing(*args: Any) -> None:
        pass

    plain = run_program(interpreted, carries=False)
    generated._cached.cache_clear()
    monkeypatch.setattr(generated._Writer, method, nothing)
    try:
        assert not agree(plain, run_program(generate, carries=False))
    except (NameError, ValueError):
        pass  # the omitted code is needed
    finally:
        generated._cached.cache_clear()


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("change", ["inputs", "output", "frees", "run", "effects"])
def test_programs_that_differ_have_different_structures(place: int, change: str) -> None:
    steps, registers, *_, carried = program([])
    other = list(steps)
    one = steps[place]
    if one.effects is None and change == "effects":
        pytest.skip("the instruction has no side effects")
    changes: dict[str, Any] = {
        "inputs": [*one.inputs, 0],
        "output": one.output + 1,
        "frees": [*one.frees, 5],
        "run": Direct(torch.add, (1, 2)),
        "effects": one.effects and one.effects._replace(carries=[*one.effects.carries, (3, carried)]),
    }
    other[place] = one._replace(**{change: changes[change]})
    assert generated.structure(steps, registers) == generated.structure(program([])[0], registers)
    assert generated.structure(steps, registers) != generated.structure(other, registers)
    assert generated.structure(steps, registers) != generated.structure(steps, [None, *registers[1:]])


def test_a_program_is_freed_after_its_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle would hold full tensors until a garbage collection, which is rare in a block."""
    made: list[weakref.ref[Any]] = []
    init = sweep._Program.__init__

    def record(self: Any, *args: Any) -> None:
        made.append(weakref.ref(self))
        init(self, *args)

    monkeypatch.setattr(sweep._Program, "__init__", record)
    monkeypatch.setattr(sweep, "GENERATE_FROM", 1)
    torch.manual_seed(0)
    trained(Towers().double(), 2)
    assert len(made) >= 6
    assert all(one() is None for one in made)
