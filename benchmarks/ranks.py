"""Collectives, time and peak memory of an update on several ranks, against the best hand-written loops.

    python benchmarks/ranks.py [--ranks 2,3,4] [--rounds N] [--peers all|none] [--small] [--json FILE]

For each number of ranks, gloo processes train the same model on the same, unequal data. In each round every
loop makes two updates, in a random order that is the same on all ranks, with a barrier before each turn.
Columns: collectives of parameters and gradients, and of a few numbers; the MiB that a rank sends in a ring;
peak bytes of an update, on the rank with the most; the ratio of the median wall times of rank 0 to those of
the hand-written loop, with quartiles of the ratios within a round.

Then the collectives of each loop run alone. Their time is compared with a model of a ring, whose latency and
bandwidth were measured on the first number of ranks for each kind of collective. Finally their time is
predicted for 8 and 64 ranks of networks with given latency and bandwidth, for a model of 7 billion parameters
in the same number of groups.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import found_by_ranks
from ranks_cost import KINDS, NETWORKS, Exchange, Kind, Network, counted, scaled_up, seconds
from ranks_work import PEERS, SMALL, Contestant, Setting, Shape, contestants, missing_peers
from rounds import in_rounds
from tables import print_table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from superbatch.torch.memory.meter import peak_bytes

WARM_UP, IN_A_ROW, PEAKS = 3, 2, 9
PARAMETERS = 7e9


@dataclass(frozen=True)
class Row:
    """Row of the table: one loop on a number of ranks."""

    ranks: int
    name: str
    against: str
    collectives: int
    numbers: int
    sent: float
    peak: int
    distance: float
    milliseconds: float
    ratio: float
    low: float
    high: float
    alone: float
    parameters: int  # bytes of all parameters
    exchanges: list[Exchange]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,3,4", help="numbers of processes (default: 2,3,4)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default: 9)")
    parser.add_argument(
        "--peers", choices=["all", "none"], default="all", help="other libraries (default: all)"
    )
    parser.add_argument("--small", action="store_true", help="a tiny model, to test the program")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    counts = [int(each) for each in options.ranks.split(",")]
    if options.rank is not None:
        _one_rank(options, counts[0])
    if options.peers == "all":
        for name in missing_peers():
            print(f"{name} is not installed, so its row is missing.")
    rows: list[Row] = []
    network: dict[Kind, Network] | None = None
    for count in counts:
        found, measured = _on_ranks(count, options)
        rows += found
        network = network or measured
        _print_rows(count, found)
    assert network is not None
    _print_check(rows, network, counts[0])
    _print_larger(rows, counts[0])
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    wrong = [row for row in rows if row.distance > 1e-4 and row.name.startswith("superbatch")]
    for row in wrong:
        print(f"{row.name}, {row.ranks} ranks: the update differs by {row.distance:.1e} from that by hand")
    return bool(wrong)


def _on_ranks(count: int, options: argparse.Namespace) -> tuple[list[Row], dict[Kind, Network]]:
    """Start the ranks; return the results of the first."""
    own = ["--ranks", str(count), "--rounds", str(options.rounds), "--peers", options.peers]
    found = found_by_ranks(__file__, count, [*own, *(["--small"] if options.small else [])])
    rows = [Row(**{**row, "exchanges": [Exchange(**e) for e in row["exchanges"]]}) for row in found["rows"]]
    return rows, {kind: Network(**each) for kind, each in found["network"].items()}


def _one_rank(options: argparse.Namespace, count: int) -> None:
    """Run one rank and end the process."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(options.rank), "WORLD_SIZE": str(count)}
    # Other libraries read these variables, and use the existing process group.
    os.environ |= {"LOCAL_RANK": str(options.rank), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    dist.init_process_group(
        "gloo", init_method=f"file://{options.folder / 'store'}", rank=options.rank, world_size=count
    )
    setting = Setting(SMALL if options.small else Shape(), options.rank, count)
    rows = _measured(setting, contestants(options.peers == "all"), options.rounds)
    network = _network()
    if options.rank == 0:
        found = {
            "rows": [asdict(row) for row in rows],
            "network": {kind: asdict(each) for kind, each in network.items()},
        }
        (options.folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without joining gloo's threads, which may abort the process


def _measured(setting: Setting, entries: list[Contestant], rounds: int) -> list[Row]:
    updates: dict[str, Any] = {}
    parameters: dict[str, list[Tensor]] = {}
    exchanges: dict[str, list[Exchange]] = {}
    peaks: dict[str, int] = {}
    for entry in entries:
        update, model = entry.make(setting)
        for _ in range(WARM_UP):
            update()
        exchanges[entry.name] = counted(update)
        # The minimum of several runs, because gloo's threads free a buffer at varying times. Each rank takes
        # its own: on a busy machine a late thread of one rank or another spoils nearly every run.
        peaks[entry.name] = _largest(min(peak_bytes(update) for _ in range(PEAKS)))
        updates[entry.name], parameters[entry.name] = update, _parameters(model)
    times: dict[str, list[float]] = {entry.name: [] for entry in entries}
    for name in in_rounds([entry.name for entry in entries], rounds):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            updates[name]()
        times[name].append((time.perf_counter() - start) / IN_A_ROW)
    rows: list[Row] = []
    for entry in entries:
        own, base, all_ = times[entry.name], times[entry.against], exchanges[entry.name]
        quartiles = statistics.quantiles([a / b for a, b in zip(own, base, strict=True)], n=4)
        rows.append(
            Row(
                ranks=setting.ranks,
                name=entry.name,
                against=entry.against,
                collectives=sum(not each.is_of_numbers for each in all_),
                numbers=sum(each.is_of_numbers for each in all_),
                sent=sum(each.sent(setting.ranks) for each in all_),
                peak=peaks[entry.name],
                distance=_distance(parameters[entry.name], parameters[entry.against]),
                milliseconds=1e3 * statistics.median(own),
                ratio=statistics.median(own) / statistics.median(base),
                low=quartiles[0],
                high=quartiles[2],
                alone=1e3 * _alone(all_),
                parameters=sum(each.nbytes for each in parameters[entry.name]),
                exchanges=all_,
            )
        )
    return rows


def _parameters(model: nn.Module) -> list[Tensor]:
    each = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [tensor.detach().clone() for tensor in each]


def _distance(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True) if b.norm())


def _largest(number: int) -> int:
    found = torch.tensor(number)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)


def _alone(exchanges: list[Exchange]) -> float:
    """Return the time of collectives without other work: the median of seven."""
    return statistics.median(_time_of(exchanges) for _ in range(7))


def _time_of(exchanges: list[Exchange]) -> float:
    ranks = dist.get_world_size()
    tensors = [torch.zeros(-(-each.bytes // 4 // ranks) * ranks) for each in exchanges]
    parts = [torch.zeros(len(tensor) // ranks) for tensor in tensors]
    dist.barrier()
    start = time.perf_counter()
    for each, whole, part in zip(exchanges, tensors, parts, strict=True):
        if each.kind == "all_reduce":
            dist.all_reduce(whole)
        elif each.kind == "all_gather":
            dist.all_gather_into_tensor(whole, part)
        else:
            dist.reduce_scatter_tensor(part, whole)
    return time.perf_counter() - start


def _network() -> dict[Kind, Network]:
    """Return the latency and bandwidth of each kind of collective among the ranks."""
    return {kind: _network_of(kind) for kind in KINDS}


def _network_of(kind: Kind) -> Network:
    few, many = Exchange(kind, 64), Exchange(kind, 1 << 24)
    ranks = dist.get_world_size()
    short = statistics.median(_time_of([few] * 20) / 20 for _ in range(5))
    long = statistics.median(_time_of([many]) for _ in range(7))
    return Network(short / few.turns(ranks), many.sent(ranks) / max(long - short, 1e-9))


def _print_rows(count: int, rows: list[Row]) -> None:
    header = ["", "collectives", "of numbers", "MiB sent", "peak MiB", "ms", "ratio to by hand", "quartiles"]
    cells = [
        [
            *(row.name, str(row.collectives), str(row.numbers), f"{row.sent / 2**20:.2f}"),
            *(f"{row.peak / 2**20:.2f}", f"{row.milliseconds:.1f}", f"{row.ratio:.3f}"),
            f"{row.low:.3f} {row.high:.3f}",
        ]
        for row in rows
    ]
    print_table(f"{count} ranks", header, cells)
    print()


def _print_check(rows: list[Row], network: dict[Kind, Network], first: int) -> None:
    base = {row.name: row for row in rows if row.ranks == first}
    cells = []
    for row in rows:
        predicted = 1e3 * seconds(base[row.name].exchanges, row.ranks, network)
        bytes_ = sum(each.sent(row.ranks) for each in base[row.name].exchanges)
        cells.append(
            [
                *(f"{row.name}, {row.ranks} ranks", f"{row.collectives + row.numbers}"),
                str(len(base[row.name].exchanges)),
                f"{row.sent / 2**20:.2f}",
                f"{bytes_ / 2**20:.2f}",
                f"{row.alone:.1f}",
                f"{predicted:.1f}",
            ]
        )
    title = f"Prediction from {first} ranks: " + ", ".join(
        f"{kind} {1e6 * each.latency:.0f} us per step of a ring, {each.bandwidth / 1e9:.2f} GB/s"
        for kind, each in network.items()
    )
    print_table(
        title,
        ["", "collectives", "predicted", "MiB sent", "predicted", "ms alone", "predicted"],
        cells,
    )
    print()


def _print_larger(rows: list[Row], first: int) -> None:
    for title, (ranks, network) in NETWORKS.items():
        cells = []
        for row in rows:
            if row.ranks != first or row.name in PEERS:
                continue
            larger = scaled_up(row.exchanges, 4 * PARAMETERS / row.parameters)
            sent = sum(each.sent(ranks) for each in larger)
            numbers = [each for each in larger if each.is_of_numbers]
            cells.append(
                [
                    *(row.name, f"{sent / 1e9:.1f}", f"{network.seconds(larger, ranks):.2f}"),
                    f"{1e3 * network.seconds(numbers, ranks):.2f}",
                ]
            )
        print_table(
            f"{title}, 7 billion parameters in float32, {ranks} ranks",
            ["", "GB sent", "s of collectives", "ms of numbers"],
            cells,
        )
        print()


if __name__ == "__main__":
    sys.exit(main())
