"""On the CPU, memory that a micro-batch frees stays in the process for the next one."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from superbatch.torch import fastpaths
from superbatch.torch.fastpaths import keep_freed_memory

# Count page faults while blocks of 1 MiB are allocated, written and freed, as activations are: first without
# an accumulator or virtual batch, then with one of the largest size, and then with one of a given size.
BLOCKS = 24
PROGRAM = """
import resource, sys, torch
from torch import nn
from superbatch.torch import Accumulator, virtual_batch

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def activations():
    blocks = [torch.empty(2**20, dtype=torch.uint8).fill_(1) for _ in range(int(sys.argv[1]))]
    del blocks

def usual():
    activations()
    found = []
    for _ in range(3):
        before = faults()
        activations()
        found.append(faults() - before)
    return sorted(found)[1]

model = nn.Linear(4, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
found = [usual()]
for training in sys.argv[2:]:
    exec(training)
    found.append(usual())
print(*found)
"""
ACCUMULATOR = "kept = Accumulator(model, sgd, lambda x: model(x).square().mean(), microbatch_size={size})"
VIRTUAL = """
with virtual_batch(model, {size}) as batch:
    model(batch(torch.randn(16, 4))).square().mean().backward()
"""


def faults_of(training: str, *sizes: str) -> list[int]:
    """Return the page faults of a new process alone, and after a training of each size."""
    trainings = [training.format(size=size) for size in sizes]
    command = [sys.executable, "-c", PROGRAM, str(BLOCKS), *trainings]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(word) for word in run.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other rules")
@pytest.mark.parametrize(
    ("training", "largest_size"),
    [(ACCUMULATOR, "'largest'"), (VIRTUAL, "'auto'")],
    ids=["accumulator", "virtual batch"],
)
def test_freed_memory_stays_in_the_process(training: str, largest_size: str):
    pages = BLOCKS * 2**20 // resource.getpagesize()
    # In some processes, a live block above the freed ones keeps glibc from returning them.
    before = largest = 0
    for _ in range(8):
        before, largest, after = faults_of(training, largest_size, "8")
        assert after < pages / 10, "a block or two may be returned"
        if min(before, largest) > pages / 2:
            break
    assert before > pages / 2, "premise: glibc alone returns freed memory"
    assert largest > pages / 2, "the largest size needs all memory, so freed memory is returned"


class OperatorRecord(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_keeping_memory_calls_no_operator(monkeypatch: pytest.MonkeyPatch):
    taken, storage = [], torch.UntypedStorage
    monkeypatch.setattr(
        torch, "UntypedStorage", lambda *args, **more: taken.append(args) or storage(*args, **more)
    )
    fastpaths._allocate_and_free.cache_clear()
    with OperatorRecord() as seen:
        for _ in range(3):
            keep_freed_memory([torch.device("cpu")])
        assert seen.names == [] and len(taken) == 1
        torch.empty(1)
        assert seen.names, "premise: the creation of a tensor is recorded"


def test_keeping_memory_ignores_a_failed_allocation(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def fail(*args: object, **options: object) -> None:
        asked.append(args)
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "UntypedStorage", fail)
    fastpaths._allocate_and_free.cache_clear()
    keep_freed_memory([torch.device("cpu")])
    assert len(asked) == 1
    keep_freed_memory([torch.device("meta")])
    assert len(asked) == 1, "no allocation for other devices"
