"""Time of a window and peak memory, against the best hand-written loop.

    python benchmarks/overhead.py [--peers all|none|NAMES] [--rounds N]
                                  [--work mlp,convnet,narrow-transformer,small-transformer,transformer]
                                  [--processes N] [--apart] [--lean] [--cold] [--rss]
                                  [--json FILE]

--work narrow-transformer:16 runs that training in 16 micro-batches instead of its own number.

Time: in each round every contestant runs eight consecutive windows, in random order, on one thread, without
garbage collection; the last five are timed. The first windows have cold caches, which a training does not
have; --cold times these instead. Columns: the ratio of the median CPU times, with quartiles of the ratios
within a round; "quiet", the ratio of the 10th percentiles, which other programs on the machine disturb least;
the ratio of the median wall times. The row "by hand, again" shows the noise. A Trainer has its own loop, so
it runs in a thread that stops at every window (peers/work.py); its set-up, validation, logging and
checkpoints are not timed.

--processes repeats this in several new processes, one after the other, because the placement of data in
memory changes a row by some per cent between processes. Ratios are then medians and quartiles over processes
of the ratio within one process. A second table compares every tool with superbatch's loop in the same way.

--apart runs each contestant in its own process, as in a training; they still take turns. In a common process
they share the heap of the C library.

Memory: the peak of live tensor bytes of a window on top of parameters, optimizer state and data; with --rss
also the peak resident set of a process for one contestant, minus that of the hand-written loop (median of
three).
"""

import argparse
import ctypes
import gc
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from apart import Apart, Here, serve
from peers import Peer, by_hand, choose
from peers.libraries import load, version_of
from peers.work import Timing, TrainerWindow, Window, Work
from tables import print_table
from workloads import works_named

from superbatch.torch.memory.meter import peak_bytes

Contestant = Window | TrainerWindow
WARM_UP = 5
UNTIMED, TIMED = 3, 5  # windows of one contestant in a row, as in a training


@dataclass(frozen=True)
class Entry:
    """Row of the table: its name, the function that makes it, and the row to compare with."""

    name: str
    make: Callable[[Work, str | None], Contestant]
    variant: str | None = None
    against: str = "by hand"


@dataclass(frozen=True)
class Ratio:
    """Ratio of times to the baseline: of medians, quartiles within a round, and of 10th percentiles."""

    ratio: float
    low: float
    high: float
    quiet: float


@dataclass(frozen=True)
class Result:
    """Row of a table."""

    work: str
    name: str
    against: str
    milliseconds: float
    cpu: Ratio
    wall: Ratio


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one window."""

    work: str
    name: str
    bytes: int
    ratio: float
    resident: int | None = None  # minus the peak of the hand-written loop


def entries(peers: list[Peer]) -> list[Entry]:
    """Return the rows, the best hand-written loop first."""
    rows = [
        Entry("by hand", by_hand.best),
        Entry("by hand, again", by_hand.best),
        Entry("by hand, reads the loss", by_hand.best, "reads"),
        Entry("by hand, zeroes last", by_hand.best, "zeroes last"),
        Entry("by hand, usual", by_hand.usual),
        Entry("by hand, cuts the batch", by_hand.best, "slices"),
    ]
    for peer in peers:
        if peer.name == "tutorial" or peer.name.endswith("-items") or peer.name == "fabric":
            continue  # the usual loop has a row; second methods cost the same; Fabric's docstring does less
        if version_of(peer.package) is None:
            print(f"{peer.title}: not installed (pip install 'superbatch[peers]')")
            continue
        rows.append(Entry(peer.title, load(peer.module).window))
        if peer.name == "ours":
            rows.append(
                Entry(
                    "superbatch, whole batch", load(peer.module).window, "slices", "by hand, cuts the batch"
                )
            )
    return rows


VARIATIONS = ("by hand, reads the loss", "by hand, zeroes last", "by hand, usual")


def measure(work: Work, rows: list[Entry], options: argparse.Namespace) -> list[Result]:
    """Measure contestants in turns, each over several windows."""
    untimed, timed = (0, 1) if options.cold else (UNTIMED, TIMED)
    contestants = _contestants(work, rows, options)
    timings: dict[str, list[Timing]] = {name: [] for name in contestants}
    order, generator = list(contestants), random.Random(options.seed)

    def collect() -> None:
        gc.collect()
        for contestant in contestants.values():
            contestant.collect()

    for _ in range(WARM_UP):
        for name in order:
            contestants[name].in_a_row(1)
    collect()
    gc.disable()
    try:
        for index in range(math.ceil((options.rounds or work.rounds) / timed)):
            generator.shuffle(order)
            for name in order:
                timings[name] += contestants[name].in_a_row(untimed + timed)[untimed:]
            if index % 10 == 9:
                collect()
    finally:
        gc.enable()
        for contestant in contestants.values():
            contestant.close()
    return [_result(work, row, timings[row.name], timings[row.against]) for row in rows]


def _contestants(work: Work, rows: list[Entry], options: argparse.Namespace) -> dict[str, Here | Apart]:
    if not options.apart:
        return {row.name: Here(row.make(work, row.variant)) for row in rows}
    peers = {
        row.name: "none" if row.name.startswith(("by hand", "superbatch")) else options.peers for row in rows
    }
    return {
        row.name: Apart(["--work", work.name, "--peers", peers[row.name], "--contestant", row.name])
        for row in rows
    }


def _result(work: Work, row: Entry, own: list[Timing], base: list[Timing]) -> Result:
    median = statistics.median(timing.cpu for timing in own) * 1e3
    cpu = _ratio([t.cpu for t in own], [t.cpu for t in base])
    wall = _ratio([t.wall for t in own], [t.wall for t in base])
    return Result(work.name, row.name, row.against, median, cpu, wall)


def _ratio(own: list[float], base: list[float]) -> Ratio:
    low, _, high = statistics.quantiles([a / b for a, b in zip(own, base, strict=True)], n=4)
    quiet = statistics.quantiles(own, n=10)[0] / statistics.quantiles(base, n=10)[0]
    return Ratio(statistics.median(own) / statistics.median(base), low, high, quiet)


def measure_memory(work: Work, rows: list[Entry], *, rss: bool) -> list[Memory]:
    """Return the peaks of one window, after a first window that makes the optimizer's state."""
    peaks = {}
    for row in rows:
        contestant = row.make(work, row.variant)
        if isinstance(contestant, TrainerWindow):  # the ledger counts in one thread only
            contestant.close()
            continue
        contestant.run()
        peaks[row.name] = peak_bytes(contestant.run)
    base = peaks["by hand"]
    alone = [entry.name for entry in entries(choose("none"))] if rss else []
    residents = {name: _resident(work, name) for name in alone}
    residents = {name: resident - residents["by hand"] for name, resident in residents.items()}
    return [Memory(work.name, name, peak, peak / base, residents.get(name)) for name, peak in peaks.items()]


def _resident(work: Work, name: str) -> int:
    """Return the peak resident set of a new process during a window, in bytes."""
    command = [
        sys.executable,
        __file__,
        "--peers",
        "none",
        "--work",
        work.name,
        "--resident",
        "--contestant",
        name,
    ]
    runs = [subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    return int(statistics.median(int(run.stdout.split()[-1]) for run in runs))


def print_resident(work: Work, row: Entry) -> None:
    """Print the peak resident set of a window, after a window that loads all kernels."""
    contestant = row.make(work, row.variant)
    assert isinstance(contestant, Window)
    contestant.run()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # return the free heap of the first window to the system
    Path("/proc/self/clear_refs").write_text("5")  # the peak resident set counts from here
    contestant.run()
    status = Path("/proc/self/status").read_text()
    print(int(status.partition("VmHWM:")[2].split()[0]) * 1024)


def measure_again(options: argparse.Namespace) -> list[list[Result]]:
    """Return the rows of each of several new processes."""
    flags = [f"--{flag}" for flag in ("apart", "lean", "cold") if vars(options)[flag]]
    if options.rounds:
        flags += ["--rounds", str(options.rounds)]
    found: list[list[Result]] = []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, __file__, "--peers", options.peers, "--work", options.work, *flags]
        for seed in range(options.processes):
            more = ["--seed", str(seed), "--times-only", "--json", str(report)]
            subprocess.run([*command, *more], check=True, stdout=subprocess.DEVNULL)
            rows = json.loads(report.read_text())["times"]
            found.append([Result(**row | {k: Ratio(**row[k]) for k in ("cpu", "wall")}) for row in rows])
    return found


def over_processes(found: list[list[Result]]) -> list[Result]:
    """Join the rows of all processes: medians, and quartiles over processes."""

    def merged(ratios: list[Ratio]) -> Ratio:
        low, middle, high = statistics.quantiles([r.ratio for r in ratios], n=4, method="inclusive")
        return Ratio(middle, low, high, statistics.median(r.quiet for r in ratios))

    return [
        replace(
            rows[0],
            milliseconds=statistics.median(row.milliseconds for row in rows),
            cpu=merged([row.cpu for row in rows]),
            wall=merged([row.wall for row in rows]),
        )
        for rows in zip(*found, strict=True)
    ]


def print_against_ours(work: str, found: list[list[Result]]) -> None:
    """Print each tool against superbatch's loop in the same process."""
    lines = []
    times = [{row.name: row.milliseconds for row in rows if row.work == work} for rows in found]
    for name in (name for name in times[0] if name != "superbatch" and not name.startswith("by hand")):
        ratios = [row[name] / row["superbatch"] for row in times]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        slower = sum(ratio > 1 for ratio in ratios)
        lines.append([name, f"{middle:.3f} [{low:.3f} {high:.3f}]", f"{slower} of {len(ratios)}"])
    print_table(f"{work}: CPU time against superbatch's", ["contestant", "ratio", "slower in"], lines)


def main() -> int:
    """Measure, print, and write JSON on request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default="all", help='"all", "none" or names separated by commas')
    parser.add_argument("--work", default="mlp,convnet,narrow-transformer,small-transformer,transformer")
    parser.add_argument("--rounds", type=int, help="rounds (default: the number of each training)")
    parser.add_argument("--processes", type=int, default=1, help="number of new processes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order (default: 0)")
    parser.add_argument("--apart", action="store_true", help="a process for each contestant")
    parser.add_argument("--lean", action="store_true", help="without variants of the loop by hand")
    parser.add_argument("--cold", action="store_true", help="one window of each in turn, with cold caches")
    parser.add_argument("--rss", action="store_true", help="also measure resident sets (Linux with glibc)")
    parser.add_argument("--times-only", action="store_true", help="do not measure memory")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    for hidden in ("--resident", "--serve"):  # internal: run in the process of one contestant
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        rows, works = entries(choose(options.peers)), works_named(options.work)
    except ValueError as error:
        parser.error(str(error))
    if options.lean:
        rows = [row for row in rows if row.name not in VARIATIONS]
    if options.contestant:
        _alone(works[0], next(row for row in rows if row.name == options.contestant), options)
        return 0
    apart = measure_again(options) if options.processes > 1 else []
    times = (
        over_processes(apart) if apart else [row for work in works for row in measure(work, rows, options)]
    )
    peaks: list[Memory] = []
    if not options.times_only:
        peaks = [memory for work in works for memory in measure_memory(work, rows, rss=options.rss)]
    for work in works:
        _print(work, [r for r in times if r.work == work.name], [m for m in peaks if m.work == work.name])
        if apart:
            print_against_ours(work.name, apart)
    if options.json:
        numbers = {"times": [asdict(r) for r in times], "memory": [asdict(m) for m in peaks]}
        options.json.write_text(json.dumps(numbers, indent=1))
    return 0


def _alone(work: Work, row: Entry, options: argparse.Namespace) -> None:
    """Run one contestant in its own process."""
    if options.resident:
        print_resident(work, row)
    else:
        serve(row.make(work, row.variant))


def _print(work: Work, times: list[Result], peaks: list[Memory]) -> None:
    memory = {peak.name: peak for peak in peaks}
    lines = []
    for row in times:
        peak = memory.get(row.name)
        shown = (
            (_mebibytes(peak.bytes), f"{peak.ratio:.3f}", _mebibytes(peak.resident)) if peak else ("-",) * 3
        )
        quiet = f"{row.cpu.quiet:.3f}"
        lines.append([row.name, f"{row.milliseconds:.3f}", _show(row.cpu), quiet, _show(row.wall), *shown])
    header = [
        "contestant",
        "CPU ms",
        "CPU time",
        "CPU quiet",
        "wall time",
        "peak MiB",
        "peak ratio",
        "RSS +MiB",
    ]
    windows = f"{work.name}: {len(work.microbatches())} micro-batches of {work.microbatch_size}"
    print_table(f"\n{windows}; ratios to the best loop by hand [quartiles]", header, lines)


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.2f}"


def _show(ratio: Ratio) -> str:
    return f"{ratio.ratio:.3f} [{ratio.low:.3f} {ratio.high:.3f}]"


if __name__ == "__main__":
    sys.exit(main())
