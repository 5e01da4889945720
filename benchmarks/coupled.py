"""Cost of the exact gradient of a batch with coupled samples, against other methods.

    python benchmarks/coupled.py [--work resnet20,convnet,views,towers] [--samples 256] [--large]
                                 [--sizes 1,4,16,64] [--rounds 5] [--growth 64,128,256,512,1024]
                                 [--quick] [--json FILE] [--plot FILE]

Each method computes the gradient of the same batch of N samples, at once or in micro-batches of m. Columns:

CPU ms      median over rounds; in each round every method runs once, in random order, on one thread.
/ accum     ratio of medians to plain accumulation with the same m; / full: to the full batch.
device      peak of live tensor bytes on top of parameters and data: the memory that a GPU would need.
host        peak of values stored in host memory (see coupled_memory.py). On a CPU the sizes are right, but
            times of virtual_batch do not include copies, which a GPU overlaps or waits for.
error       relative difference of the gradient from that of the full batch in float64: computed in float64,
            and in float32, where the row of the full batch shows the effect of rounding.
overhead    share of an update that is neither an operator on a micro-batch nor a sum of such results:
            recording, planning, dispatch (wall time, median of rounds, with a clock around each operation).

--growth    also measures each N at m=16 (half the rounds, no errors) for --plot; "" for none.
--large     also makes the table for N=1024.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from coupled_memory import measure as peaks_of
from coupled_overhead import Shares, shares
from coupled_ways import WAYS, Way, error, gradient
from coupled_work import Work, works
from tables import print_table

GROWTH_SIZE = 16


@dataclass(frozen=True)
class Row:
    """Cost of one method.

    Attributes:
        size: samples of a micro-batch; None for the full batch.
        seconds: median CPU time of an update.
        accumulation: ratio to plain accumulation; None for the full batch, or if that is impossible.
        full: ratio to the full batch.
        device, host: peak bytes.
        float64, float32: errors of the gradient; None if not measured.
        overhead: share of recording, planning and dispatch, for virtual_batch.
        report: fields of the `CouplingReport` of virtual_batch.
    """

    work: str
    way: str
    samples: int
    size: int | None
    seconds: float
    accumulation: float | None
    full: float
    device: int
    host: int
    float64: float | None = None
    float32: float | None = None
    overhead: Shares | None = None
    report: dict[str, Any] | None = None


@dataclass(frozen=True)
class Contestant:
    """A method with its micro-batch size and its own model."""

    way: Way
    size: int | None
    model: torch.nn.Module


def measure(
    work: Work, samples: int, sizes: Sequence[int], rounds: int, *, errors: bool, overheads: bool
) -> list[Row]:
    """Measure all methods for one batch."""
    contestants = [
        Contestant(way, size, work.build())
        for way in WAYS
        if way.applies(work)
        for size in (sizes if way.split else [None])
        if size is None or size >= work.least or way.name.startswith("virtual")
    ]
    seconds = _time(work, samples, contestants, rounds)
    medians = {key: statistics.median(times) for key, times in seconds.items()}
    real = gradient(WAYS[0], work, samples, samples, torch.float64)[0] if errors else None
    rows = []
    for contestant in contestants:
        way, size = contestant.way, contestant.size
        mine, plain = medians[way.name, size], medians.get(("accumulation", size))
        row = Row(
            work.name,
            way.name,
            samples,
            size,
            mine,
            mine / plain if plain else None,
            mine / medians["full", None],
            *_peaks(work, contestant, samples),
        )
        if real is not None:
            row = _with_errors(row, work, contestant, real)
        if way.name.startswith("virtual"):
            row = _with_report(row, work, contestant, min(rounds, 3) if overheads else 0)
        rows.append(row)
    return rows


def _update(work: Work, contestant: Contestant, batch: dict[str, torch.Tensor]) -> Any:
    contestant.model.zero_grad()
    return contestant.way.run(work, contestant.model, batch, contestant.size or 0)


def _time(
    work: Work, samples: int, contestants: list[Contestant], rounds: int
) -> dict[tuple[str, int | None], list[float]]:
    batch = work.batch(samples)
    seconds: dict[tuple[str, int | None], list[float]] = {(c.way.name, c.size): [] for c in contestants}
    order, generator = list(contestants), random.Random(0)
    for index in range(rounds + 1):
        generator.shuffle(order)
        gc.collect()
        for contestant in order:
            start = time.process_time()
            _update(work, contestant, batch)
            spent = time.process_time() - start
            if index:  # the first round loads kernels
                seconds[contestant.way.name, contestant.size].append(spent)
    return seconds


def _peaks(work: Work, contestant: Contestant, samples: int) -> tuple[int, int]:
    batch = work.batch(samples)
    contestant.model.zero_grad()
    return peaks_of(lambda: _update(work, contestant, batch))


def _with_errors(row: Row, work: Work, contestant: Contestant, real: dict[str, torch.Tensor]) -> Row:
    """Add the errors; `.grad` holds the float32 gradient of the last update."""
    single = {name: p.grad for name, p in contestant.model.named_parameters() if p.grad is not None}
    double, _ = gradient(contestant.way, work, row.samples, row.size or 0, torch.float64)
    return replace(row, float64=error(double, real), float32=error(single, real))


def _with_report(row: Row, work: Work, contestant: Contestant, rounds: int) -> Row:
    batch = work.batch(row.samples)
    report = asdict(_update(work, contestant, batch))
    report["points"] = len(report["points"])
    if not rounds:
        return replace(row, report=report)
    found = [shares(lambda: _update(work, contestant, batch)) for _ in range(rounds)]
    rest = sorted(found, key=lambda one: one.rest)[len(found) // 2]
    return replace(row, report=report, overhead=rest)


def show(work: Work, rows: list[Row]) -> None:
    """Print the table of one batch."""
    titles = {way.name: way.title for way in WAYS}
    header = [
        "",
        "m",
        "CPU ms",
        "/ accum",
        "/ full",
        "device MiB",
        "host MiB",
        "float64",
        "float32",
        "overhead",
    ]
    lines = [
        [
            titles[row.way],
            str(row.size or "-"),
            f"{row.seconds * 1e3:.0f}",
            "-" if row.accumulation is None else f"{row.accumulation:.2f}",
            f"{row.full:.2f}",
            f"{row.device / 2**20:.1f}",
            f"{row.host / 2**20:.1f}",
            "-" if row.float64 is None else f"{row.float64:.0e}",
            "-" if row.float32 is None else f"{row.float32:.0e}",
            "-" if row.overhead is None else f"{row.overhead.rest:.1%}",
        ]
        for row in sorted(rows, key=lambda row: row.size or 0)
    ]
    print_table(f"\n{work.title}; N={rows[0].samples}", header, lines)
    sys.stdout.flush()


def inexact(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of exact methods whose gradient is not that of the batch."""
    return [
        row
        for row in rows
        if row.way in ("cached", "virtual", "virtual-auto", "virtual-host")
        and row.float64 is not None
        and row.float64 > 1e-12
    ]


def main() -> int:
    """Measure, print, and write files on request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", default=",".join(works()))
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--sizes", default="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--growth", default="64,128,256,512,1024")
    parser.add_argument("--quick", action="store_true", help="tiny batches, to test the program")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--plot", type=Path, help="also draw memory and time against N (needs matplotlib)")
    options = parser.parse_args()
    known = works()
    if not set(options.work.split(",")) <= set(known):
        parser.error(f"--work {options.work!r} has an unknown name. Pass some of {', '.join(known)}.")
    chosen = [known[name] for name in options.work.split(",")]
    sizes, rounds = [int(size) for size in options.sizes.split(",")], options.rounds
    tables = [options.samples, 1024] if options.large else [options.samples]
    growth = [int(samples) for samples in options.growth.split(",") if samples]
    if options.quick:
        tables, sizes, rounds, growth = [12], [5], 1, [8] if options.plot else []
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: list[Row] = []
    grown: list[Row] = []
    for work in chosen:
        for samples in tables:
            rows = measure(work, samples, sizes, rounds, errors=True, overheads=True)
            show(work, rows)
            found += rows
        for samples in growth:
            if samples in tables and GROWTH_SIZE in sizes:
                continue  # already measured above
            rows = measure(work, samples, [GROWTH_SIZE], -(-rounds // 2), errors=False, overheads=False)
            show(work, rows)
            grown += rows
    if options.json:
        numbers = {"tables": [asdict(row) for row in found], "growth": [asdict(row) for row in grown]}
        options.json.write_text(json.dumps(numbers, indent=1))
    if options.plot:
        # Imported here: the rest needs no matplotlib.
        from coupled_plot import picture

        options.plot.write_bytes(picture(chosen, [r for r in found + grown if r.size in (None, GROWTH_SIZE)]))
    return 1 if inexact(found) else 0


if __name__ == "__main__":
    sys.exit(main())
