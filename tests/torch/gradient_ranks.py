"""Gradients of a DistributedDataParallel model, for `test_gradient_ranks`: `python -m ... RANK FOLDER`."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from superbatch.errors import NonFiniteError
from superbatch.torch import Gradient, count_tokens
from tests.torch.helpers import mlp, mse, rows, tiny_lm, token_mean, tokens

LENGTHS = ([5, 2, 7], [1, 4, 3])  # tokens of the sequences of each rank: the weights of the ranks differ


def sentences(rank: int) -> dict[str, Tensor]:
    return tokens(LENGTHS[rank], seed=rank)


def numbers(rank: int, samples: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    return rows(samples, 1, seed=10 * seed + rank)[0]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name.removeprefix("module."): each for name, each in found.items()}


def of_tokens(rank: int) -> dict[str, Any]:
    model = DistributedDataParallel(tiny_lm())
    record = Gradient(
        model,
        lambda microbatch: token_mean(model, microbatch),
        microbatch_size=2 if rank else 1,
        weight=count_tokens("labels"),
        check=False,
    )(sentences(rank))
    return {"gradients": gradients(model), "loss": record.loss, "weight": record.weight}


def after_a_ddp_backward(rank: int) -> dict[str, Any]:
    """Add to the gradient of an earlier backward of DDP."""
    model = DistributedDataParallel(mlp())
    mse(model, numbers(rank)).backward()
    Gradient(model, lambda microbatch: mse(model, microbatch), microbatch_size=4)(numbers(rank, seed=1))
    return {"gradients": gradients(model)}


def nan_on_one_rank(rank: int) -> dict[str, Any]:
    """The loss of one rank is NaN: every rank keeps its earlier gradient."""
    model = DistributedDataParallel(mlp())
    mse(model, numbers(rank)).backward()
    before = gradients(model)
    gradient_of = Gradient(
        model,
        lambda microbatch: mse(model, microbatch) * (float("nan") if rank else 1.0),
        microbatch_size=3,
        check=False,
    )
    error = ""
    try:
        gradient_of(numbers(rank, seed=1))
    except NonFiniteError as raised:
        error = str(raised)
    after = gradients(model)
    return {"error": error, "as before": all(torch.equal(before[name], after[name]) for name in before)}


CASES = {"tokens": of_tokens, "earlier": after_a_ddp_backward, "failure": nan_on_one_rank}


def main(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    torch.save({name: case(rank) for name, case in CASES.items()}, folder / f"{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without joining gloo's threads, which may end the process with an error


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
