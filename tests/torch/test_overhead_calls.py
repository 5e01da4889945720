"""Numbers of Python calls and of entered files per update, as a bound on overhead.

Times are measured by `benchmarks/overhead.py`; calls are the same on every machine.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import superbatch
from superbatch.torch import Accumulator, Window

PACKAGE = str(Path(superbatch.__file__).parent)


def calls_of(run) -> int:
    """Return the number of calls of Python functions of the package."""
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("whole_batch", [False, True])
def test_calls_per_window_and_per_microbatch(whole_batch):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(microbatch):
        x, y = microbatch
        return nn.functional.cross_entropy(model(x), y)

    accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size=2)

    def window_of(count: int):
        x, y = torch.randn(2 * count, 4), torch.randint(3, (2 * count,))
        batch = (x, y) if whole_batch else Window(list(zip(x.split(2), y.split(2), strict=True)))
        return lambda: accumulate(batch)

    few, many = window_of(8), window_of(24)
    few()  # with the first-window check
    calls, more = calls_of(few), calls_of(many)
    for_each = (more - calls) / 16
    assert accumulate.updates == 3
    # 24 in Python 3.11; later versions make fewer calls for a comprehension. A micro-batch that takes long
    # makes one or two more.
    assert 0 < for_each <= 27
    # 197 and 198 in Python 3.11.
    assert 0 < calls - 8 * for_each <= 200


def test_one_ordinary_update_enters_few_files():
    """The second update of a plain network, in 4 micro-batches. A newcomer has to read these files."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss_fn(microbatch):
        x, y = microbatch
        return nn.functional.cross_entropy(model(x), y)

    accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size=4, check=False)
    batch = (torch.randn(16, 8), torch.randint(4, (16,)))
    accumulate(batch)
    files = set()
    sys.setprofile(lambda frame, event, _: files.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        update = accumulate(batch)
    finally:
        sys.setprofile(None)
    assert update.microbatches == 4, "premise"
    entered = sorted(file.removeprefix(PACKAGE) for file in files if file.startswith(PACKAGE))
    # Seven of the files are participants, each of which restores one kind of state.
    assert 12 < len(entered) <= 30, "\n".join(entered)
