"""What a window costs beside its arithmetic creeps in by one small call after the other: so they are counted.

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
    """How many Python functions of the package are called."""
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
def test_the_calls_of_a_window_and_of_each_of_its_microbatches(whole_batch):
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
    few()  # the first window checks the statement
    calls, more = calls_of(few), calls_of(many)
    for_each = (more - calls) / 16
    assert accumulate.updates == 3
    # 29 and 169 when written (Python 3.11; later ones call fewer for a comprehension). A micro-batch that the
    # machine was kept from for long makes one or two more. One is the fast path of autograd (0036).
    # 24 since what a window need not ask is not asked.
    assert 0 < for_each <= 27
    # 211 and 213 with what a window sees since: whether a parameter was replaced, an optimizer wrapped, state
    # moved, labels unequal for the first time, and interrupts deferred; 197 and 198 since, as above.
    assert 0 < calls - 8 * for_each <= 200


def test_one_ordinary_update_walks_through_few_files():
    """The second update of a plain network, in 4 micro-batches. A newcomer reads what is entered here."""
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
    # 12 were hoped for. A participant is a file, and a window that restores everything has seven of them.
    assert 12 < len(entered) <= 30, "\n".join(entered)
