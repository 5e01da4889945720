"""Two gloo ranks for `test_refusing_ranks`; one cannot run a window: `python -m ... RANK FOLDER`."""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from superbatch.errors import SuperbatchError
from superbatch.torch import Accumulator
from tests.torch.helpers import mlp, mse, rows, sgd


def outcome(accumulate: Accumulator, batch: Any) -> str:
    try:
        accumulate(batch)
    except SuperbatchError as error:
        return f"{type(error).__name__}: {error}"
    return "made"


def weighted(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return mse(model, batch), len(batch[0])


def unequal_lengths_on_one_rank(rank: int, *, returned: bool, check: bool) -> list[str]:
    """Run a batch of tensors with unequal lengths on one rank, then good batches; first on rank 1."""
    model = DistributedDataParallel(mlp())
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        lambda microbatch: weighted(model, microbatch) if returned else mse(model, microbatch),
        microbatch_size=2,
        weight="returned" if returned else None,
        check=check,
    )
    good = rows(4, 1, seed=rank)[0]
    bad = (good[0], good[1][:3])
    found = [outcome(accumulate, bad if rank else good), outcome(accumulate, good)]
    return [*found, outcome(accumulate, good if rank else bad), outcome(accumulate, good)]


def partial_step_on_one_rank(rank: int) -> list[str]:
    """An optimizer fails in the middle of its step, on one rank."""
    model = DistributedDataParallel(mlp())
    optimizer = sgd(model.parameters())
    accumulate = Accumulator(
        model, optimizer, lambda microbatch: mse(model, microbatch), microbatch_size=2, check=False
    )
    batch = rows(4, 1, seed=rank)[0]
    found = [outcome(accumulate, batch)]
    saved = (model.state_dict(), optimizer.state_dict(), accumulate.state_dict())
    saved = ({name: each.clone() for name, each in saved[0].items()}, *saved[1:])

    def tear(*_: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        raise ZeroDivisionError

    if rank:
        hook = optimizer.register_step_pre_hook(tear)
        found.append(outcome(accumulate, batch))
        hook.remove()
    else:
        found.append(outcome(accumulate, batch))
    found.append(outcome(accumulate, batch))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    accumulate.load_state_dict(saved[2])
    return [*found, outcome(accumulate, batch)]


def main(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=30),
    )
    found = {
        "counted": unequal_lengths_on_one_rank(rank, returned=False, check=False),
        "returned": unequal_lengths_on_one_rank(rank, returned=True, check=False),
        "checked": unequal_lengths_on_one_rank(rank, returned=False, check=True),
        "torn": partial_step_on_one_rank(rank),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without joining gloo's threads, which may end the process with an error


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
