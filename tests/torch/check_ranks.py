"""What each of two gloo ranks does for `test_check_ranks`: `python -m ... RANK FOLDER`."""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from superbatch.errors import StatementError
from superbatch.torch import Accumulator, count_tokens
from tests.torch.helpers import sgd, tiny_lm, token_mean, tokens


def train(rank: int, **options: Any) -> dict[str, Any]:
    """Three windows that count alike, then one that does not, on rank 1 alone."""
    model = DistributedDataParallel(tiny_lm())
    calls: list[int] = []

    def loss_fn(microbatch: Any) -> torch.Tensor:
        calls.append(1)
        return token_mean(model, microbatch)

    accumulate = Accumulator(model, sgd(model.parameters()), loss_fn, microbatch_size=2, **options)
    of_windows, error = [], ""
    for window in range(5):
        uneven = rank == 1 and window > 2
        batch = tokens([7, 1, 7, 7] if uneven else [7] * 4, seed=2 * window + rank)
        before, first = [p.detach().clone() for p in model.parameters()], len(calls)
        try:
            accumulate(batch)
        except StatementError as raised:
            error = str(raised)
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            break
        of_windows.append(len(calls) - first)
    return {
        "updates": accumulate.updates,
        "error": error,
        "calls": of_windows,
        "sums": [float(p.detach().double().sum()) for p in model.parameters()],
    }


def main(rank: int, folder: Path) -> None:
    """Run all cases."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    found = {"wrong": train(rank), "right": train(rank, weight=count_tokens("labels"))}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without joining gloo's threads, which may end the process with an error


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
