"""Gain of each fast path (`superbatch/torch/fastpaths.py`) in a window, against its plain version.

    python benchmarks/fastpaths.py [--work mlp,small-transformer] [--rounds N] [--device cpu|cuda]
                                   [--only backward,norms] [--dry] [--json FILE]

In each round every path runs one window with the path and one with its plain version, in random order, on one
thread, without garbage collection. "gain" is the median ratio of the pairs, minus one, with the 95 % interval
of the median; "us" is the median difference. The row "nothing" shows the noise. "calls" is the number of
calls in one window; a path without calls cannot gain. Gradients are clipped and ``loss_fn`` returns the
weight, so that `multiply` and `divide` are called.

The heap's path acts once per process. For its plain version, mallopt sets the state that glibc reaches
without the path, for the largest block of the training (--largest bytes); its "calls" are page faults of the
plain window. A path must gain 1 % of one of the windows. --dry makes two rounds, to test the program itself.
"""

import argparse
import ctypes
import gc
import json
import math
import platform
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peers.work import Work, loss_of
from tables import print_table
from torch import Tensor
from workloads import works_named

from superbatch.torch import Accumulator, fastpaths
from superbatch.torch import Window as MicroBatches

HEAP, NOTHING = "keep_freed_memory", "nothing"
WARM_UP = 5


@dataclass(frozen=True)
class Gain:
    """Row of the table: time of the plain version over that of the path, minus one."""

    work: str
    path: str
    calls: float
    milliseconds: float
    gain: float
    low: float
    high: float
    microseconds: float


class Switch:
    """Wrapper of a fast path that can switch to the plain version."""

    def __init__(self, name: str) -> None:
        self.path, self.plain = getattr(fastpaths, name), fastpaths.PLAIN[name]
        self.is_plain, self.calls = False, 0
        setattr(fastpaths, name, self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return (self.plain if self.is_plain else self.path)(*args, **options)

    def turn(self, *, plain: bool) -> None:
        """Choose the version."""
        self.is_plain = plain


class Heap:
    """State of glibc's heap with the path and without it."""

    def __init__(self, largest: int) -> None:
        self._largest, self._mallopt = largest, ctypes.CDLL(None).mallopt

    def turn(self, *, plain: bool) -> None:
        """Set both thresholds, as glibc does when a block of that size is freed."""
        block = self._largest if plain else 2**25
        for option, value in ((-3, block), (-1, 2 * block)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            if not self._mallopt(option, value):
                raise RuntimeError(f"mallopt({option}, {value}) failed")


class Nothing:
    """The same window twice, to measure the noise."""

    def turn(self, *, plain: bool) -> None:
        """Change nothing."""


def window(work: Work, device: torch.device) -> Callable[[], object]:
    """Return a window that calls every path of the device."""
    model, optimizer = work.build()
    model.to(device).train()

    def loss_fn(microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return loss_of(model(microbatch["inputs"]), microbatch), len(microbatch["labels"])

    accumulate = Accumulator(model, optimizer, loss_fn, weight="returned", max_grad_norm=1e-3)
    batch = MicroBatches(
        [{name: leaf.to(device) for name, leaf in part.items()} for part in work.microbatches()]
    )
    return lambda: accumulate(batch)


def clock(run: Callable[[], object], device: torch.device) -> float:
    """Return the CPU seconds of a window; on an accelerator the wall time until the device has finished."""
    if device.type == "cpu":
        started = time.process_time_ns()
        run()
        return (time.process_time_ns() - started) / 1e9
    torch.cuda.synchronize(device)
    started = time.perf_counter_ns()
    run()
    torch.cuda.synchronize(device)
    return (time.perf_counter_ns() - started) / 1e9


def measure(
    work: Work, paths: dict[str, Any], rounds: int, device: torch.device, untimed: int = 0
) -> list[Gain]:
    """Measure pairs of windows for each path, in random order."""
    run, generator = window(work, device), random.Random(0)
    calls = {name: _calls(run, path) for name, path in paths.items()}
    for _ in range(WARM_UP):
        run()
    times: dict[tuple[str, bool], list[float]] = {(n, plain): [] for n in paths for plain in (False, True)}
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            for name in generator.sample(list(paths), len(paths)):
                for plain in generator.sample([False, True], 2):
                    paths[name].turn(plain=plain)
                    for _ in range(untimed):
                        run()
                    times[name, plain].append(clock(run, device))
                paths[name].turn(plain=False)
            if index % 10 == 9:
                gc.collect()
    finally:
        gc.enable()
    return [_gain(work.name, n, calls[n], times[n, True], times[n, False]) for n in paths]


def _calls(run: Callable[[], object], path: Any) -> float:
    """Return the calls of a path in the third window, or its page faults for the heap's path."""
    path.turn(plain=isinstance(path, Heap))
    for _ in range(2):
        run()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, getattr(path, "calls", 0)
    run()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, getattr(path, "calls", 0)
    path.turn(plain=False)
    return after[0] - before[0] if isinstance(path, Heap) else after[1] - before[1]


def _gain(work: str, name: str, calls: float, plain: list[float], clever: list[float]) -> Gain:
    ratios = sorted(a / b for a, b in zip(plain, clever, strict=True))
    middle, half = len(ratios) / 2, 0.98 * math.sqrt(len(ratios))
    low, high = ratios[max(0, int(middle - half))], ratios[min(len(ratios) - 1, int(middle + half))]
    difference = statistics.median(a - b for a, b in zip(plain, clever, strict=True))
    gain = statistics.median(ratios) - 1
    return Gain(work, name, calls, statistics.median(clever) * 1e3, gain, low - 1, high - 1, difference * 1e6)


def main() -> int:
    """Measure, print, and write JSON on request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [NOTHING, *fastpaths.PLAIN]
    parser.add_argument("--work", default="mlp,small-transformer")
    parser.add_argument("--rounds", type=int, help="rounds (default: the number of each training)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default=",".join(known), help="paths separated by commas (default: all)")
    parser.add_argument("--largest", type=int, default=2**20 + 4096, help="bytes of the largest block")
    parser.add_argument("--dry", action="store_true", help="two rounds, to test the program")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - set(known):
        parser.error(f"--only {', '.join(sorted(unknown))} is unknown. Pass some of {', '.join(known)}.")
    try:
        works = works_named(options.work)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    device = torch.device(options.device)
    paths: dict[str, Any] = {n: Nothing() if n == NOTHING else Switch(n) for n in names if n != HEAP}
    heap: dict[str, Any] = {}
    if HEAP in names and device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        heap[HEAP] = Heap(options.largest)
    found: list[Gain] = []
    for work in works:
        rounds = 2 if options.dry else options.rounds or work.rounds
        gains = measure(work, paths, rounds, device) if paths else []
        if heap:  # last, because glibc adapts by itself during the other paths
            gains += measure(work, heap, rounds, device, untimed=1)
        found += gains
        print_table(
            f"{work.name}: {len(work.microbatches())} micro-batches of {work.microbatch_size}",
            ("path", "calls", "window ms", "gain %", "interval", "us"),
            [
                (
                    row.path,
                    f"{row.calls:.0f}",
                    f"{row.milliseconds:.3f}",
                    f"{row.gain:.1%}",
                    f"{row.low:.1%} to {row.high:.1%}",
                    f"{row.microseconds:.1f}",
                )
                for row in gains
            ],
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
