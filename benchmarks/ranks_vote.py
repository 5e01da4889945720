"""Time of the flags and the vote of an update on two ranks, against a careful hand-written loop around DDP.

    python benchmarks/ranks_vote.py [--rounds N] [--small] [--json FILE]

Two gloo processes train the small transformer of `workloads.py`. In each round each loop makes two updates,
in a new random order that is the same on both ranks. The hand-written loop reduces the weights, runs all
micro-batches but the last under `no_sync`, reduces the loss, clips, and steps. It cannot detect a failed
rank. It runs twice, as two rows; their ratio shows the noise of the machine.

Then the small collectives run alone: a frame of a window, with flags and padding, and one of the hand-written
loop. Their number per update times their time, divided by the time of an update, is their share without
overlap. The table shows ratios of medians and of the fastest tenths. Exit code 1: the vote takes more than
1 % of an update in both.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import found_by_ranks
from ranks_cost import counted
from rounds import in_rounds
from tables import print_table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workloads import NarrowTransformer, SmallTransformer, text

from superbatch.torch import Accumulator

RANKS, WARM_UP, IN_A_ROW, SIZE, MAX_NORM, BAR = 2, 3, 2, 4, 1.0, 0.01
HAND, AGAIN, OURS = "by hand", "by hand, again", "superbatch"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run two ranks and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60, help="rounds (default: 60)")
    parser.add_argument("--small", action="store_true", help="a tiny model, to test the program")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        _one_rank(options)
    own = ["--rounds", str(options.rounds), *(["--small"] if options.small else [])]
    found = found_by_ranks(__file__, RANKS, own)
    _print(found)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    vote = [shares["vote"] for shares in found["shares"].values()]
    return int(min(vote) > BAR and not options.small)


def _one_rank(options: argparse.Namespace) -> None:
    """Run one rank and end the process."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{options.folder / 'store'}", rank=options.rank, world_size=RANKS
    )
    loops: dict[str, Callable[[], object]] = {}
    models: dict[str, nn.Module] = {}
    numbers: dict[str, int] = {}
    sync: Any = None
    for name in (HAND, AGAIN, OURS):
        torch.manual_seed(0)
        model = models[name] = DistributedDataParallel(
            (NarrowTransformer if options.small else SmallTransformer)()
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        batch = {key: leaf.roll(options.rank, 0) for key, leaf in text(4 * SIZE).items()}
        if name == OURS:
            loops[name], sync = _ours(model, optimizer, batch)
        else:
            loops[name] = _by_hand(model, optimizer, batch)
        for _ in range(WARM_UP):
            loops[name]()
        numbers[name] = sum(each.is_of_numbers for each in counted(loops[name]))
    times: dict[str, list[float]] = {name: [] for name in loops}
    frames: list[float] = []
    bare: list[float] = []
    for name in in_rounds(loops, options.rounds):
        times[name].append(_time(loops[name], IN_A_ROW))
        if name == OURS:  # in the same round, so that other load affects all equally
            frames.append(_time(lambda: sync.vote(raised=False), 10))
            bare.append(_time(lambda: dist.all_reduce(torch.zeros(2, dtype=torch.float64)), 10))
    if options.rank == 0:
        found = _summary(times, frames, bare, numbers, _distance(models))
        (options.folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without joining gloo's threads, which may abort the process


def _ours(model: nn.Module, optimizer: Any, batch: Any) -> tuple[Callable[[], object], Any]:
    accumulate = Accumulator(
        model,
        optimizer,
        lambda part: _loss(model, part),
        microbatch_size=SIZE,
        max_grad_norm=MAX_NORM,
        check=False,
    )
    return lambda: accumulate(batch), accumulate.engine.config.sync


def _by_hand(model: Any, optimizer: Any, batch: Any) -> Callable[[], object]:
    parts = [
        dict(zip(batch, each, strict=True))
        for each in zip(*(leaf.split(SIZE) for leaf in batch.values()), strict=True)
    ]

    def update() -> None:
        weight = torch.tensor(float(sum(len(part["labels"]) for part in parts)), dtype=torch.float64)
        dist.all_reduce(weight)
        total = torch.zeros(())
        for index, part in enumerate(parts):
            with nullcontext() if index == len(parts) - 1 else model.no_sync():
                loss = _loss(model, part) * (len(part["labels"]) * RANKS / weight.item())
                loss.backward()
                total += loss.detach()
        dist.all_reduce(total)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return update


def _loss(model: nn.Module, part: Any) -> Tensor:
    return nn.functional.cross_entropy(model(part["inputs"]).flatten(0, 1), part["labels"].flatten())


def _time(call: Callable[[], object], times: int) -> float:
    """Return the seconds of a call that both ranks begin at the same time."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def _distance(models: dict[str, nn.Module]) -> float:
    """Return the distance of superbatch's parameters from those of the hand-written loop."""
    pairs = zip(models[OURS].parameters(), models[HAND].parameters(), strict=True)
    return max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)


def _summary(
    times: dict[str, list[float]],
    frames: list[float],
    bare: list[float],
    numbers: dict[str, int],
    distance: float,
) -> dict[str, Any]:
    """Return all printed numbers in plain containers."""
    quartiles = {
        name: statistics.quantiles([a / b for a, b in zip(own, times[HAND], strict=True)], n=4)
        for name, own in times.items()
    }
    shares = {
        how: {
            "vote": pick(frames) / pick(times[OURS]),
            "all": (numbers[OURS] * pick(frames) - numbers[HAND] * pick(bare)) / pick(times[OURS]),
        }
        for how, pick in (("medians", statistics.median), ("least disturbed tenths", _least))
    }
    return {
        "torch": torch.__version__,
        "rows": [
            {
                "name": name,
                "numbers": numbers[name],
                "milliseconds": 1e3 * statistics.median(own),
                "ratio": statistics.median(own) / statistics.median(times[HAND]),
                "low": quartiles[name][0],
                "high": quartiles[name][2],
            }
            for name, own in times.items()
        ],
        "milliseconds of a frame": 1e3 * statistics.median(frames),
        "milliseconds of two numbers": 1e3 * statistics.median(bare),
        "shares": shares,
        "distance": distance,
    }


def _least(times: list[float]) -> float:
    """Return the mean of the shortest tenth."""
    return statistics.mean(sorted(times)[: max(1, len(times) // 10)])


def _print(found: dict[str, Any]) -> None:
    print_table(
        f"{RANKS} ranks",
        ["", "collectives of numbers", "ms", "ratio of medians", "quartiles"],
        [
            [
                *(row["name"], str(row["numbers"]), f"{row['milliseconds']:.1f}", f"{row['ratio']:.3f}"),
                f"{row['low']:.3f} {row['high']:.3f}",
            ]
            for row in found["rows"]
        ],
    )
    print(
        f"One frame alone takes {found['milliseconds of a frame']:.3f} ms, two numbers "
        f"{found['milliseconds of two numbers']:.3f} ms."
    )
    for how, shares in found["shares"].items():
        print(
            f"The vote takes {shares['vote']:.2%} of an update, and all collectives of numbers "
            f"{shares['all']:.2%} more than those by hand (ratio of {how})."
        )


if __name__ == "__main__":
    sys.exit(main())
