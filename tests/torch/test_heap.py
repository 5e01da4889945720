"""What a micro-batch frees stays in the process for the next one, on the CPU."""

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

# 48 blocks of 1 MiB are taken, written and freed again, as activations are: before there is an accumulator or
# a virtual batch, and when there is, or was, one.
PROGRAM = """
import resource, sys, torch
from torch import nn
from superbatch.torch import Accumulator, virtual_batch

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def activations():
    blocks = [torch.empty(2**20, dtype=torch.uint8).fill_(1) for _ in range(48)]
    del blocks

def usual():
    activations()
    found = []
    for _ in range(5):
        before = faults()
        activations()
        found.append(faults() - before)
    return sorted(found)[2]

model = nn.Linear(4, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
before = usual()
exec(sys.argv[1])
print(before, usual())
"""
ACCUMULATOR = "kept = Accumulator(model, sgd, lambda x: model(x).square().mean(), microbatch_size={size})"
VIRTUAL = """
with virtual_batch(model, {size}) as batch:
    model(batch(torch.randn(16, 4))).square().mean().backward()
"""


def faults_of(training: str, size: str) -> tuple[int, int]:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, training.format(size=size)],
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = map(int, run.stdout.split())
    return before, after


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other rules")
@pytest.mark.parametrize(
    ("training", "to_the_limit"),
    [(ACCUMULATOR, "'largest'"), (VIRTUAL, "'auto'")],
    ids=["accumulator", "virtual batch"],
)
def test_memory_that_was_freed_is_not_fetched_again(training: str, to_the_limit: str):
    pages = 48 * 2**20 // resource.getpagesize()
    found = [faults_of(training, "8") for _ in range(2)]
    assert all(after < pages / 50 for _, after in found)
    # Some processes are lucky: something that stays lies behind what is freed.
    lucky = [faults_of(training, to_the_limit)]
    while min(lucky[-1]) < pages / 2 and len(lucky) < 8:
        lucky.append(faults_of(training, to_the_limit))
    before, after = lucky[-1]
    assert before > pages / 2, "the premise: by itself glibc gives it back"
    assert after > pages / 2, "the largest needs all there is"


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_those_who_count_tensors_see_nothing_of_it(monkeypatch: pytest.MonkeyPatch):
    taken, storage = [], torch.UntypedStorage
    monkeypatch.setattr(
        torch, "UntypedStorage", lambda *args, **more: taken.append(args) or storage(*args, **more)
    )
    fastpaths._take_and_free.cache_clear()
    with Seen() as seen:
        for _ in range(3):
            keep_freed_memory([torch.device("cpu")])
        assert seen.names == [] and len(taken) == 1
        torch.empty(1)
        assert seen.names, "the premise: it sees what a tensor is made by"


def test_where_there_are_no_addresses_left_nothing_is_kept(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def fail(*args: object, **options: object) -> None:
        asked.append(args)
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "UntypedStorage", fail)
    fastpaths._take_and_free.cache_clear()
    keep_freed_memory([torch.device("cpu")])
    assert len(asked) == 1
    keep_freed_memory([torch.device("meta")])
    assert len(asked) == 1, "nothing is asked for where the CPU does not work"
