"""Two gloo ranks whose optimizers have step pre-hooks: `python -m ... RANK FOLDER`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from superbatch.errors import SuperbatchError
from superbatch.torch import Accumulator
from tests.torch.fault_ranks import BATCHES, FAILS_AT, FaultError, error_of, net, rows
from tests.torch.sharded_training import join, leave, run, whole

CASES = ("fails, scaler", "removes itself", "removes itself, scaler")


def trained(rank: int, case: str) -> dict[str, Any]:
    """Train on four batches; return each outcome, and the parameters after each."""
    model: Any = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch, calls = 0, 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if case == "fails, scaler":
            if rank == 1 and batch == FAILS_AT and calls == FAILS_AT + 1:
                raise FaultError("no hook")
        elif batch == FAILS_AT:
            handle.remove()

    handle = optimizer.register_step_pre_hook(hook)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if "scaler" in case else None
    accumulate = Accumulator(model, optimizer, partial(error_of, model), microbatch_size=2, scaler=scaler)
    outcomes: list[str] = []
    states: list[Any] = []
    for batch in range(BATCHES):
        try:
            accumulate(rows(rank, batch))
            outcomes.append("made")
        except (FaultError, SuperbatchError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
        states.append(whole(model))
    return {"outcomes": outcomes, "states": states, "calls": calls}


if __name__ == "__main__":
    torch.set_num_threads(1)
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    join(number, folder, 2)
    leave(run({case: partial(trained, number, case) for case in CASES}, []), number, folder)
