"""Text of the error for a micro-batch that does not fit and cannot be cut."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from superbatch.errors import OutOfMemoryError
from superbatch.torch import Accumulator, Window
from superbatch.torch.options import GhostBatchNorm
from tests.torch.helpers import mlp, rows, sgd, start_of
from tests.torch.test_out_of_memory import TEXT


def fails(mb: Any) -> NoReturn:
    raise RuntimeError(TEXT)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


ONE, MANY, UNCOUNTED = rows(1)[0], rows(8)[0], Window([torch.ones(()), torch.ones(())])
CASES = {
    "one sample": (mlp, ONE, {}, "0 of 1 sample", "a micro-batch of one sample cannot be cut"),
    "ghost": (
        normed,
        MANY,
        {"participants": [GhostBatchNorm()], "microbatch_size": 4},
        "0 of 4 samples",
        "with GhostBatchNorm the update would change in smaller micro-batches",
    ),
    "uncounted": (
        mlp,
        UNCOUNTED,
        {"weight": lambda mb: 1},
        "0",
        "the micro-batch cannot be cut, because its samples cannot be counted",
    ),
}
DO = {"ghost": "Pass a smaller microbatch_size.", "uncounted": "Pass smaller micro-batches."}


@pytest.mark.parametrize("name", CASES)
def test_the_error_names_the_micro_batch_the_reason_and_the_remedy(name: str) -> None:
    make, batch, options, where, wrong = CASES[name]
    model = make()
    before = start_of(model)
    accumulate = Accumulator(model, sgd(model.parameters()), fails, check=False, **options)
    with pytest.raises(OutOfMemoryError) as raised:
        accumulate(batch)
    text = str(raised.value)
    assert text.startswith(f"Memory ran out in micro-batch {where} ({TEXT}")
    assert f"and {wrong}; no update was made, and everything is as before the window. " in text
    assert text.endswith(DO.get(name, "")) and text.count("MiB of parameters") == 1
    assert all(torch.equal(before[key], value) for key, value in model.named_parameters())
