"""Cost of measuring the gradient's noise during training.

    python benchmarks/noise.py [--work mlp,convnet,transformer] [--every 1,20] [--also proxy,preconditioned]
        [--rounds N] [--json FILE]

In each round every contestant runs one window, in random order, on one thread, without garbage collection:
`Accumulator` without and with ``noise``, measuring each window or one in n. Ratios are as in
`benchmarks/overhead.py`: of median CPU times, with the quartiles within a round, and of the 10th percentiles.
A contestant that measures one window in n is timed over n windows, as is the one it is compared with. The row
"plain, again" shows the noise of the clock. Bound: 1.03. `--also` measures options of `NoiseMeter`, without a
bound: "proxy" (models with LayerNorm or RMSNorm), "preconditioned" (Adam).
"""

import argparse
import gc
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from overhead import Result, _ratio
from peers.work import Timing, Window, Work, loss_of
from tables import print_table
from torch import Tensor
from workloads import works_named

from superbatch.noise.meter import NoiseMeter
from superbatch.torch import Accumulator
from superbatch.torch import Window as MicroBatches

BOUND = 1.03
WARM_UP = 5


def window(work: Work, *, every: int, times: int, also: str = "") -> Window:
    """Return a contestant of `times` windows per turn; `every=0`: no meter; `also`: option of the meter."""
    model, optimizer = work.build()
    model.train()

    def loss_fn(microbatch: dict[str, Tensor]) -> Tensor:
        return loss_of(model(microbatch["inputs"]), microbatch)

    options: dict[str, bool] = {also: True} if also else {}
    observers = [NoiseMeter(every=every, **options)] if every else []
    accumulate = Accumulator(model, optimizer, loss_fn, observers=observers)
    batch = MicroBatches(work.microbatches())

    def run() -> None:
        for _ in range(times):
            accumulate(batch)

    return Window(run)


def measure(work: Work, every: int, rounds: int, also: Sequence[str] = ()) -> list[Result]:
    """Run plain windows, plain windows again and measuring windows in turns."""
    name = "each window" if every == 1 else f"one window in {every}"
    contestants = {
        label: window(work, every=each, times=every)
        for label, each in (("plain", 0), ("plain, again", 0), (name, every))
    }
    for option in also:
        contestants[f"{name}, {option}"] = window(work, every=every, times=every, also=option)
    timings: dict[str, list[Timing]] = {label: [] for label in contestants}
    order, generator = list(contestants), random.Random(0)
    for _ in range(min(WARM_UP, rounds)):
        for label in order:
            contestants[label].timed()
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            generator.shuffle(order)
            for label in order:
                timings[label].append(contestants[label].timed())
            if index % 50 == 49:
                gc.collect()
    finally:
        gc.enable()
    return [_result(work, label, own, timings["plain"]) for label, own in timings.items()]


def _result(work: Work, name: str, own: list[Timing], base: list[Timing]) -> Result:
    cpu = _ratio([t.cpu for t in own], [t.cpu for t in base])
    wall = _ratio([t.wall for t in own], [t.wall for t in base])
    milliseconds = sorted(t.cpu for t in own)[len(own) // 2] * 1e3
    return Result(work.name, name, "plain", milliseconds, cpu, wall)


def main() -> int:
    """Measure, print, and write JSON on request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", default="mlp,convnet,transformer")
    parser.add_argument("--every", default="1,20", help="measure one window in n; several values: 1,20")
    parser.add_argument(
        "--also", default="", help="options of NoiseMeter to measure too: proxy,preconditioned"
    )
    parser.add_argument("--rounds", type=int, help="rounds (default: the number of each training)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        works = works_named(options.work)
    except ValueError as error:
        parser.error(str(error))
    every = [int(each) for each in options.every.split(",")]
    also = [each for each in options.also.split(",") if each]
    found = [
        row for work in works for n in every for row in measure(work, n, options.rounds or work.rounds, also)
    ]
    for work in works:
        rows = [
            [
                row.name,
                f"{row.milliseconds:.3f}",
                f"{row.cpu.ratio:.3f} [{row.cpu.low:.3f}, {row.cpu.high:.3f}]",
                f"{row.cpu.quiet:.3f}",
                f"{row.wall.ratio:.3f}",
            ]
            for row in found
            if row.work == work.name
        ]
        title = f"\n{work.name}: {len(work.microbatches())} micro-batches of {work.microbatch_size}"
        print_table(
            f"{title}; ratios to plain [quartiles]", ["measured", "CPU ms", "CPU", "quiet", "wall"], rows
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
