"""A failed allocation, once or permanently, never gives a wrong update that is reported as right."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from superbatch.torch.window.participants.buffer_gradients import BufferGradientSum
from superbatch.torch.window.participants.momentum_gradients import MomentumGradientSum
from superbatch.torch.window.participants.parameter_gradients import GradientVersions, _versions
from superbatch.torch.window.transaction import Transaction, run_all
from tests.torch.failing_allocations import TEXT, sweep
from tests.torch.fault_cells import MODES, cell, cells

_MODELS = ("mlp", "losses", "convolutions", "transformer")
FEW = {
    mode: next(m for m in [*_MODELS[n % 4 :], *_MODELS] if m not in MODES[mode].not_for)
    for n, mode in enumerate(MODES)
}


@pytest.mark.parametrize("mode", FEW)
@pytest.mark.parametrize("on", [False, True], ids=["once", "permanently"])
@pytest.mark.sampled(2)
def test_some_allocations_fail(mode: str, on: bool) -> None:
    """Fail every 11th or 17th allocation. The slow `test_any_allocation_fails` fails each of them."""
    found = sweep(cell(FEW[mode], mode), on=on, stride=17 if on or mode == "auto" else 11)
    assert not found.wrong
    assert found.as_before + found.torn if on else found.same or mode == "owned"


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mode"), cells())
def test_any_allocation_fails(model: str, mode: str) -> None:
    once, on = (sweep(cell(model, mode), on=on) for on in (False, True))
    assert not once.wrong and not on.wrong
    assert once.allocations > 30, "premise: there are allocations to fail"
    print(f"{model}, {mode}: once {once}; permanently {on}")  # shown by -s


# -- failures between the arrival of a gradient and its record -----------------------------------------------


@pytest.mark.parametrize("mode", [".grad", "adam", "noise", "returned", "whole batch"])
@pytest.mark.sampled(2)
def test_the_copy_of_a_gradient_that_two_parameters_share_fails(mode: str) -> None:
    found = sweep(cell("mlp", mode), on=False)
    assert found.same > 40 and not found.wrong


def test_failures_with_sparse_gradients_are_rolled_back() -> None:
    found = sweep(cell("tied", ".grad"), on=True, stride=9)
    assert found.as_before and not found.wrong


def _last_record(versions: GradientVersions) -> bool:
    """Roll back to the gradients recorded last, not to the savepoint."""
    if _versions(versions._gradients) != versions._versions:
        return False
    for parameter, gradient in zip(versions.parameters, versions._gradients, strict=True):
        parameter.grad = gradient
    return True


MUTANTS: dict[str, tuple[object, str, Callable[..., Any], str]] = {
    "the last record is taken for the savepoint": (GradientVersions, "rollback", _last_record, ".grad"),
    "no gradient is assumed to be in the buffers": (
        BufferGradientSum,
        "rollback",
        lambda self: True,
        "buffers",
    ),
    "no gradient is assumed to be in the momentum": (
        MomentumGradientSum,
        "rollback",
        lambda self: True,
        "momentum",
    ),
    "a failure after the virtual batch": (Transaction, "restart", lambda self: None, "whole batch"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, method, mutant, mode = MUTANTS[name]
    monkeypatch.setattr(place, method, mutant)
    found = sweep(cell("mlp", mode), on=False, until="called right")
    assert any("called right" in each for each in found.wrong)


def test_every_restoring_step_runs_although_one_fails() -> None:
    done: list[str] = []

    def scarce() -> None:
        done.append("scarce")
        if done.count("scarce") == 1:
            raise RuntimeError(TEXT)

    def broken() -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        run_all(lambda: done.append("first"), broken, scarce, lambda: done.append("last"))
    assert done == ["first", "first", "scarce", "scarce", "last"]


# -- a real allocator --------------------------------------------------------------------------------------

_CHILD = """
import gc, resource, warnings, torch
from torch import nn
from superbatch.errors import OutOfMemoryError
from superbatch.torch import Accumulator
from superbatch.torch.memory.out_of_memory import out_of_memory

torch.set_num_threads(1)
SIDE = 700  # 4 MB for each parameter

class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Parameter(torch.randn(SIDE * SIDE).double() / SIDE) for _ in range(2))
    def forward(self, x):
        return x @ (self.a.view(SIDE, SIDE) + self.b.view(SIDE, SIDE))

class Garbage:
    def __init__(self):
        self.itself, self.held = self, torch.zeros(2 << 20, dtype=torch.float64)

def used():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

def train(room):
    model = Sum()
    accumulate = Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda x: model(x).square().mean(),
        microbatch_size=2, check=False,
    )
    start = [p.detach().clone() for p in model.parameters()]
    batch = torch.randn(6, SIDE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    Garbage()  # until the window collects garbage, as it does when memory has run out
    limit = resource.getrlimit(resource.RLIMIT_AS)
    if room is not None:
        resource.setrlimit(resource.RLIMIT_AS, (used() + room, limit[1]))
    try:
        failures = accumulate(batch).failures
    except Exception as error:
        assert isinstance(error, OutOfMemoryError) or out_of_memory(error), error
        failures = None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    return failures, start, [p.detach() for p in model.parameters()]

warnings.simplefilter("ignore")
gc.disable()
gc.freeze()  # each failure collects, and each time would look through all of torch
_, start, expected = train(None)
went_on = refused = 0
for step in ROOMS:
    failures, _, got = train(step << 20)
    gc.collect()
    if failures is None:
        refused += 1
        assert all(map(torch.equal, start, got)), "an error, and parameters have moved"
        continue
    went_on += failures > 0
    for before, right, mine in zip(start, expected, got):
        error = float((mine - right).norm() / (right - before).norm())
        assert error < 1e-12, f"{step} MB of room, {failures} failures: the update is {error:.1%} off"
print(refused, went_on)
"""


# glibc's heap keeps freed memory, and how much differs between runs, so the failing allocation is random.
# Blocks with a mapping of their own are returned to the system when freed. With 4 to 11 MB free, the copies
# of the shared gradient fail after the gradient has arrived.
_HEAP = ({}, range(0, 40, 2))
_MAPPED = ({"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}, range(16))
_on_linux = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")


@_on_linux
@pytest.mark.parametrize("allocator", [_HEAP, _MAPPED], ids=["heap", "mapped"])
def test_a_real_allocator_fails(allocator: tuple[dict[str, str], range]) -> None:
    done = _run_child("", *allocator)
    assert done.returncode == 0, done.stderr[-2000:]
    _, continued = map(int, done.stdout.split())
    assert continued, "premise: memory ran out, and windows continued"


@_on_linux
def test_a_real_allocator_finds_the_mutant() -> None:
    mutant = inspect.getsource(_last_record)
    before = f"""
from __future__ import annotations
from superbatch.torch.window.participants.parameter_gradients import GradientVersions, _versions
{mutant}
GradientVersions.rollback = _last_record
"""
    done = _run_child(before, *_MAPPED)
    assert done.returncode and "the update is" in done.stderr and "off" in done.stderr


def _run_child(before: str, settings: dict[str, str], rooms: range) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"{before}ROOMS = {rooms}  # MB\n{_CHILD}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **settings},
    )
