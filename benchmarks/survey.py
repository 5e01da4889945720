"""Time of a learning-rate survey, against the same number of plain updates of the same accumulator.

    python benchmarks/survey.py [--work mlp,convnet,transformer] [--updates N] [--rounds N] [--json FILE]

In each round the accumulator makes N updates in a loop, and a survey of N points, in random order, on one
thread, without garbage collection. The learning rates of the survey are so small that training does not
diverge. Columns: the ratio of the median CPU times, with quartiles of the ratios within a round; "again", the
ratio of a second loop in the same round, which shows the noise. The check of the loss on the first window is
not timed.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

import torch
from peers.work import Work, loss_of
from rounds import in_rounds
from tables import print_table
from workloads import works_named

from superbatch.torch import Accumulator
from superbatch.torch.tuning import lr_survey

BOUND = 1.03
UPDATES = {"mlp": 100, "convnet": 40, "narrow-transformer": 100, "small-transformer": 40, "transformer": 12}
ROUNDS = {"mlp": 60, "convnet": 30, "narrow-transformer": 30, "small-transformer": 30, "transformer": 15}


@dataclass(frozen=True)
class Result:
    """Row of the table: CPU time of a survey relative to the loop, and of the loop relative to itself."""

    work: str
    updates: int
    rounds: int
    milliseconds: float
    ratio: float
    low: float
    high: float
    again: float


def measure(work: Work, updates: int, rounds: int) -> Result:
    """Let the loop, the loop again and the survey take turns."""
    model, optimizer = work.build()
    for group in optimizer.param_groups:
        group["lr"] = 1e-9
    accumulate = Accumulator(
        model,
        optimizer,
        lambda microbatch: loss_of(model(microbatch["inputs"]), microbatch),
        microbatch_size=work.microbatch_size,
    )
    batches = [work.batch]

    def loop() -> None:
        for batch in islice(cycle(batches), updates):
            accumulate(batch)

    def survey() -> None:
        report = lr_survey(accumulate, batches, updates=updates, low=1e-10, high=1e-9)
        assert len(report.losses) == updates, report.stopped

    contestants: dict[str, Callable[[], None]] = {"loop": loop, "again": loop, "survey": survey}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for run in (loop, survey):
        run()
    for name in in_rounds(contestants, rounds):
        start = time.process_time()
        contestants[name]()
        times[name].append(time.process_time() - start)
    low, _, high = statistics.quantiles(
        [a / b for a, b in zip(times["survey"], times["loop"], strict=True)], n=4
    )
    medians = {name: statistics.median(values) for name, values in times.items()}
    return Result(
        work=work.name,
        updates=updates,
        rounds=rounds,
        milliseconds=medians["loop"] * 1e3,
        ratio=medians["survey"] / medians["loop"],
        low=low,
        high=high,
        again=medians["again"] / medians["loop"],
    )


def main() -> int:
    """Measure, print, and write JSON on request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", default="mlp,convnet,transformer")
    parser.add_argument("--updates", type=int, help="updates (default: the number of each training)")
    parser.add_argument("--rounds", type=int, help="rounds (default: the number of each training)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        works = works_named(options.work)
    except ValueError as error:
        parser.error(str(error))
    results = [
        measure(work, options.updates or UPDATES[work.name], options.rounds or ROUNDS[work.name])
        for work in works
    ]
    rows = [
        [
            f"{row.work}, {row.updates} updates",
            f"{row.milliseconds:.1f}",
            f"{row.ratio:.3f} [{row.low:.3f} {row.high:.3f}]",
            f"{row.again:.3f}",
        ]
        for row in results
    ]
    print_table(
        f"CPU time of a survey, ratio to as many updates in a loop [quartiles]; bound {BOUND}",
        ["work", "loop, ms", "survey", "loop again"],
        rows,
    )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in results], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
