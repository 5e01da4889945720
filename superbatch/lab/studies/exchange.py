"""Time of the exchange of gradients between ranks, measured if a command runs on several ranks.

``torchrun --nproc-per-node 2 -m superbatch advise digits`` starts two processes. All ranks exchange gradients
as a window of the `Accumulator` does; then the first rank continues alone, and the others exit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from superbatch.errors import InputError
from superbatch.torch.window.sync.manual import Manual
from superbatch.torch.window.sync.sync import Sync
from superbatch.tuning.search import time_per_sample

from ..recipes import Recipe
from .advise_options import window_to_judge
from .options import AdviseOptions as Options
from .shared_options import resolve_recipe

ROUNDS = 20  # exchanges that are timed


def rank_and_count() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as torchrun sets them; by default ``(0, 1)``."""
    # A batch system may set RANK and WORLD_SIZE for a single process, too, but not MASTER_ADDR.
    if "MASTER_ADDR" not in os.environ:
        return 0, 1
    rank, count = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdigit() and count.isdigit() and int(rank) < int(count)):
        raise InputError(
            f"RANK={rank!r} and WORLD_SIZE={count!r} with MASTER_ADDR are not a rank and a number of ranks. "
            "Start the command with torchrun, or unset MASTER_ADDR to run one process."
        )
    return int(rank), int(count)


def check_ranks(stated: int, count: int) -> int:
    """Return the number of ranks to judge: the option `stated`, or `count`, the ranks that are running."""
    if 1 not in (stated, count) and stated != count:
        raise InputError(
            f"ranks={stated}, but this command runs on {count} ranks and measures the exchange of gradients "
            "between these only. Leave --ranks out, or start one process and give --all-reduce-seconds."
        )
    return stated if count == 1 else count


def with_exchange_time(recipe: Recipe, options: Options) -> tuple[Options, tuple[str, ...]]:
    """Return the options with the time of the exchange, measured if it is not given, and notes on it."""
    count = rank_and_count()[1]
    if options.all_reduce_seconds is not None or options.ranks == 1:
        return options, ()
    if count == 1:
        start = f"torchrun --nproc-per-node {options.ranks} -m superbatch advise"
        note = (
            f"The exchange of gradients over {options.ranks} ranks was not measured and counts as 0 s: start "
            f"the command on all ranks ({start}), or give --all-reduce-seconds."
        )
        return options, (note,)
    # Of several GPUs each rank uses its own, whose number torchrun sets.
    own = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if options.device == "cuda" else options.device
    device = torch.device(own)
    with torch.random.fork_rng(), all_ranks(device) as sync:
        seconds = exchange_seconds(recipe.model(0).to(device), sync)
    note = f"The exchange of gradients at the end of a window was timed over {count} ranks, {ROUNDS} times."
    return replace(options, all_reduce_seconds=seconds), (note,)


def measure_as_other_rank(recipe: str, options: Options) -> None:
    """Run the part of a rank other than the first: exchange gradients as often as the first rank does."""
    task = resolve_recipe(recipe, options)
    options = replace(options, ranks=check_ranks(options.ranks, rank_and_count()[1]))
    window_to_judge(task, options)  # raises if it raises on the first rank, so that no rank waits for another
    with_exchange_time(task, options)


def exchange_seconds(model: nn.Module, sync: Sync) -> float:
    """Return the seconds that an exchange of dense gradients takes on the slowest rank.

    All ranks must call this together.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
    seconds: list[float] = []
    for _ in range(ROUNDS):
        sync.sum_numbers([0.0])  # a barrier, so that all ranks begin together
        start = time.perf_counter()
        sync.reduce([*gradients], parameters, lambda index: gradients[index])
        if gradients[0].is_cuda:
            torch.cuda.synchronize(gradients[0].device)
        seconds.append(time.perf_counter() - start)
    return max(sync.gather(time_per_sample(seconds)))  # the lower quartile of each rank


@contextmanager
def all_ranks(device: torch.device) -> Iterator[Manual]:
    """Return a context with a process group of all ranks, over gloo on the CPU and NCCL on GPUs."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Manual(dist.group.WORLD, device)
    finally:
        dist.destroy_process_group()
