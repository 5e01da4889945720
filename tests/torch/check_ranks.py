"""Worker for one of the two gloo ranks of `test_check_ranks`: `python -m ... RANK FOLDER`."""

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

from superbatch.errors import LossSpecError
from superbatch.torch import Accumulator, count_tokens
from tests.torch.helpers import sgd, tiny_lm, token_mean, tokens


def sample_mean(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean over samples of each sample's mean over tokens."""
    logits, labels = model(batch["ids"]).transpose(1, 2), batch["labels"]
    each = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    return (each.sum(1) / (labels != -100).sum(1)).mean()


def train(rank: int, **options: Any) -> dict[str, Any]:
    """Run three windows with equal token counts, then windows with unequal counts on rank 1 only."""
    model = DistributedDataParallel(tiny_lm())
    calls: list[int] = []

    def loss_fn(microbatch: Any) -> torch.Tensor:
        calls.append(1)
        return token_mean(model, microbatch)

    accumulate = Accumulator(model, sgd(model.parameters()), loss_fn, microbatch_size=2, **options)
    calls_per_window, error = [], ""
    for window in range(5):
        uneven = rank == 1 and window > 2
        batch = tokens([7, 1, 7, 7] if uneven else [7] * 4, seed=2 * window + rank)
        before, first = [p.detach().clone() for p in model.parameters()], len(calls)
        try:
            accumulate(batch)
        except LossSpecError as raised:
            error = str(raised)
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            break
        calls_per_window.append(len(calls) - first)
    return {
        "updates": accumulate.updates,
        "error": error,
        "calls": calls_per_window,
        "sums": [float(p.detach().double().sum()) for p in model.parameters()],
    }


def train_with_unequal_ranks(rank: int, case: str, **options: Any) -> dict[str, Any]:
    """Run windows with equal counts per sample on each rank; from the third window, rank 1 differs."""
    torch.manual_seed(0)
    model = DistributedDataParallel(tiny_lm())
    calls: list[int] = []

    def loss_fn(microbatch: Any) -> torch.Tensor:
        calls.append(1)
        return (token_mean if "samples" not in case else sample_mean)(model, microbatch)

    accumulate = Accumulator(model, sgd(model.parameters()), loss_fn, microbatch_size=2, **options)
    calls_per_window, error = [], ""
    for window in range(5):
        batch = tokens(
            [3 if rank and window > 1 and "lengths" not in case else 7] * 4, seed=2 * window + rank
        )
        if "lengths" in case and rank and window > 1:
            batch = {name: leaf[:, :4] for name, leaf in batch.items()}
        first = len(calls)
        try:
            accumulate(batch)
        except LossSpecError as raised:
            error = str(raised)
            break
        calls_per_window.append(len(calls) - first)
    sums = [float(p.detach().double().sum()) for p in model.parameters()]
    return {"updates": accumulate.updates, "error": error, "calls": calls_per_window, "sums": sums}


def main(rank: int, folder: Path) -> None:
    """Run all cases."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=30),
    )
    found = {"wrong": train(rank), "right": train(rank, weight=count_tokens("labels"))}
    for case in ("labels", "lengths", "labels of samples", "lengths of samples"):
        found[case] = train_with_unequal_ranks(rank, case)
    for case in ("labels", "lengths"):
        found[f"{case}, declared"] = train_with_unequal_ranks(rank, case, weight=count_tokens("labels"))
        found[f"{case}, unchecked"] = train_with_unequal_ranks(rank, case, check=False)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without joining gloo's threads, which may end the process with an error


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
