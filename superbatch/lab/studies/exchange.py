"""Time of the exchange of gradients: measured where a command was started on several ranks.

``torchrun --nproc-per-node 2 -m superbatch advise digits`` starts it twice. All ranks make the exchange that
a window of the `Accumulator` makes; then the first one continues alone, so that the others do not disturb it.
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

from ..recipes import Recipe, load_recipe
from .advise_question import question
from .options import AdviseOptions as Options

ROUNDS = 20  # exchanges that are timed


def started_on() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as torchrun states them; ``(0, 1)`` alone."""
    if "MASTER_ADDR" not in os.environ:  # a batch system may set the other two for a single process, too
        return 0, 1
    rank, count = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdigit() and count.isdigit() and int(rank) < int(count)):
        raise InputError(
            f"RANK={rank!r} and WORLD_SIZE={count!r} beside MASTER_ADDR: they do not say which of how many "
            "processes this one is. Start the command with torchrun, or unset MASTER_ADDR to run it alone."
        )
    return int(rank), int(count)


def check_ranks(stated: int, count: int) -> int:
    """Return the number of ranks of an advice."""
    if 1 not in (stated, count) and stated != count:
        raise InputError(
            f"ranks={stated} in a command that was started on {count}: "
            "the exchange of gradients over that number differs from that over the others. "
            "Leave --ranks out, or start the command once and give --all-reduce-seconds."
        )
    return stated if count == 1 else count


def this_rank(device: str) -> torch.device:
    """Return the device of this rank: of several GPUs the one that torchrun has given it."""
    if device != "cuda":
        return torch.device(device)
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def exchanged(recipe: Recipe, options: Options) -> tuple[Options, tuple[str, ...]]:
    """Measure the exchange, unless its time was given or there is only one rank."""
    count = started_on()[1]
    if options.all_reduce_seconds is not None or options.ranks == 1:
        return options, ()
    if count == 1:
        start = f"torchrun --nproc-per-node {options.ranks} -m superbatch advise"
        note = (
            f"The exchange of gradients over {options.ranks} ranks was not measured and counts as nothing: "
            f"start the command on them ({start}), or give --all-reduce-seconds."
        )
        return options, (note,)
    device = this_rank(options.device)
    with torch.random.fork_rng(), all_ranks(device) as sync:
        seconds = exchange_seconds(recipe.model(0).to(device), sync)
    note = f"The exchange of gradients was timed over {count} ranks, as a window makes it, {ROUNDS} times."
    return replace(options, all_reduce_seconds=seconds), (note,)


def take_part(recipe: str, options: Options) -> None:
    """Take a further rank's part in an advice: exchange gradients as often as the first rank does."""
    loaded = load_recipe(recipe, data=options.data)
    options = replace(options, ranks=check_ranks(options.ranks, started_on()[1]))
    question(loaded, options)
    exchanged(loaded, options)


def exchange_seconds(model: nn.Module, sync: Sync) -> float:
    """Time the exchange of dense gradients: seconds on the slowest rank. Every rank must call this."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
    seconds: list[float] = []
    for _ in range(ROUNDS):
        sync.sum_numbers([0.0])  # all begin together
        start = time.perf_counter()
        sync.reduce([*gradients], parameters, lambda index: gradients[index])
        if gradients[0].is_cuda:
            torch.cuda.synchronize(gradients[0].device)
        seconds.append(time.perf_counter() - start)
    return max(sync.gather(time_per_sample(seconds)))  # of each rank the lower quartile


@contextmanager
def all_ranks(device: torch.device) -> Iterator[Manual]:
    """Return a context in which all processes of the command are one group: gloo on the CPU, NCCL on GPUs."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Manual(dist.group.WORLD, device)
    finally:
        dist.destroy_process_group()
