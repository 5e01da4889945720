"""Time of an update in another library's training loop, against that loop's own accumulation.

    python benchmarks/integrations.py [--hosts hf,lightning] [--trainings causal] [--rounds N] [--json FILE]

In each round the host's own accumulation, the same again, and the integration run a few consecutive windows,
in random order, on one thread, without garbage collection; the first window of a turn is not timed. The row
"its own, again" shows the noise. Columns: the ratio of the median CPU times, with quartiles of the ratios
within a round, and the ratio of the 10th percentiles, which other programs on the machine disturb least.
Set-up, the check of the loss on the first window, validation, logs and checkpoints are not timed.
"""

import argparse
import importlib
import importlib.util
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import hosts
import torch
from peers.work import TrainerWindow, Window
from rounds import in_rounds
from tables import print_table

WARM_UP = 5
UNTIMED, TIMED = 1, 4  # windows of one contestant in a row
BASE = "its own"


@dataclass(frozen=True)
class Result:
    """Row of the table: time of the integration in one training, against the host's own accumulation."""

    host: str
    training: str
    name: str
    milliseconds: float
    ratio: float
    low: float
    high: float
    quiet: float


def measure(host: str, training: str, rounds: int, seed: int = 0) -> list[Result]:
    """Let the contestants take turns, and return the rows."""
    make = importlib.import_module(f"hosts.{host}").window
    contestants = {
        BASE: make(training, exact=False),
        "its own, again": make(training, exact=False),
        "superbatch": make(training, exact=True),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for contestant in contestants.values():
        _turn(contestant, WARM_UP)
    try:
        for name in in_rounds(contestants, rounds, seed=seed):
            times[name] += _turn(contestants[name], UNTIMED + TIMED)[UNTIMED:]
    finally:
        for contestant in contestants.values():
            contestant.close()
    return [_result(host, training, name, times[name], times[BASE]) for name in contestants]


def _turn(contestant: Window | TrainerWindow, windows: int) -> list[float]:
    return [contestant.timed().cpu for _ in range(windows)]


def _result(host: str, training: str, name: str, own: Sequence[float], base: Sequence[float]) -> Result:
    low, _, high = statistics.quantiles([a / b for a, b in zip(own, base, strict=True)], n=4)
    median, quiet = statistics.median(own), statistics.quantiles(own, n=10)[0]
    return Result(
        host=host,
        training=training,
        name=name,
        milliseconds=1e3 * median,
        ratio=median / statistics.median(base),
        low=low,
        high=high,
        quiet=quiet / statistics.quantiles(base, n=10)[0],
    )


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", default=",".join(hosts.PACKAGES))
    parser.add_argument("--trainings", default=",".join(hosts.TRAININGS))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: list[Result] = []
    for host in options.hosts.split(","):
        if not _installed(host):
            print(f"{host}: not installed (pip install 'superbatch[{host}]')")
            continue
        for training in options.trainings.split(","):
            results += measure(host, training, options.rounds)
    print_table(
        "CPU time of an update",
        ["host", "training", "accumulation", "ms", "ratio", "quartiles", "quiet"],
        [
            [
                *(one.host, one.training, one.name, f"{one.milliseconds:.1f}", f"{one.ratio:.3f}"),
                *(f"{one.low:.3f}-{one.high:.3f}", f"{one.quiet:.3f}"),
            ]
            for one in results
        ],
    )
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1))


def _installed(host: str) -> bool:
    return importlib.util.find_spec(hosts.PACKAGES[host]) is not None


if __name__ == "__main__":
    main()
