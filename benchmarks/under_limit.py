"""Process under a memory limit that tries one size or runs one finder. `memory.py` starts it.

    python benchmarks/under_limit.py WORK LIMIT accumulate SIZE    try the hand-written loop with this size
    python benchmarks/under_limit.py WORK LIMIT plain SIZE         try it without accumulation
    python benchmarks/under_limit.py WORK LIMIT find FINDER        run a finder; print its size and its cost

The limit (``RLIMIT_AS``, in bytes) is set after libraries and data are loaded and before the model is made.
Larger allocations then fail, as on a full machine. Modules that torch loads at its first update (some 70 MB)
are loaded before. The last line of the output is JSON.
"""

import gc
import json
import resource
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from memory_work import LIMITED, samples_of
from peers.finders import FINDERS, UPDATES, Watch, endless
from peers.libraries import load
from peers.work import Work, loss_of
from torch import nn
from torch.utils.data import DataLoader
from workloads import convnet

MICROBATCHES = 2
"""The gradients exist from the second micro-batch on: its peak is that of all others."""


def address_space() -> int:
    """Return the bytes of address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@contextmanager
def limited_to(more: int) -> Iterator[None]:
    """Limit this process to a number of additional bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    gc.collect()
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def load_once() -> None:
    """Make one update of a tiny model, which loads modules that torch imports lazily."""
    model = nn.ModuleDict({"convnet": convnet(), "layer": nn.TransformerEncoderLayer(8, 2, 8)})
    for make in (torch.optim.SGD, torch.optim.AdamW):
        optimizer = make(model.parameters(), lr=0.0)
        loss = model["convnet"](torch.zeros(1, 3, 32, 32)).sum() + model["layer"](torch.zeros(1, 1, 8)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def train_accumulating(work: Work, size: int) -> None:
    """Make some updates of two micro-batches each, without keeping outputs or losses."""
    model, optimizer = work.build()
    model.train()
    for update in range(UPDATES):
        optimizer.zero_grad(set_to_none=True)
        for index in range(MICROBATCHES):
            first = (update * MICROBATCHES + index) * size % (work.samples - size + 1)
            part = {name: leaf[first : first + size] for name, leaf in work.batch.items()}
            (loss_of(model(part["inputs"]), part) / MICROBATCHES).backward()
        optimizer.step()


def train_plainly(work: Work, size: int) -> None:
    """Make some updates without accumulation; a loader copies the batch, and gradients are freed."""
    model, optimizer = work.build()
    model.train()
    loader = DataLoader(samples_of(work), batch_size=size, drop_last=True)
    for batch in islice(endless(loader), UPDATES):
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(batch["inputs"]), batch).backward()
        optimizer.step()


LOOPS = {"accumulate": train_accumulating, "plain": train_plainly}


def try_size(work: Work, limit: int, loop: str, size: int) -> dict[str, object]:
    """Return True if training by hand succeeds."""
    try:
        with limited_to(limit):
            LOOPS[loop](work, size)
    except (RuntimeError, MemoryError) as error:  # any other error is a bug in the benchmark
        return {"fits": False, "error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return {"fits": True}


def find(work: Work, limit: int, name: str) -> dict[str, object]:
    """Run a finder and count its forwards with hooks."""
    module = load(FINDERS[name].module)  # before the limit, so that its libraries do not count
    watch = Watch()
    with limited_to(limit):
        found = module.find(work, watch, FINDERS[name].variant)
    return asdict(found) | watch.counts()


def main() -> int:
    """Run one of the two and print the result."""
    name, limit, what, argument = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    work = LIMITED[name]().work
    load_once()
    if what == "find":
        result = find(work, int(limit), argument)
    else:
        result = try_size(work, int(limit), "accumulate" if what == "try" else what, int(argument))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
