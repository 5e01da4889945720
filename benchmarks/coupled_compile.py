"""Gain and cost of compiling the recorded operations of `virtual_batch`.

    python benchmarks/coupled_compile.py [--work resnet20,convnet,views,towers] [--samples 256] [--size 16]
                                         [--rounds 9] [--quick]

CPU ms      median over rounds of updates that take turns, on one thread; / plain: median of the ratios.
first s     wall time of the first update, with empty caches of Inductor on disk.
segments    segments compiled in the first update; "again": in all later ones.
device MiB  peak of live tensor bytes on top of parameters and data, of an update without and with segments
            (Inductor's own buffers included).
error       relative difference of the gradient from that of the full batch in float64: of the full batch, the
            uncompiled and the compiled block in float32; with --errors also of the compiled block in float64,
            which compiles everything again.
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from coupled_memory import measure as peaks_of
from coupled_ways import WAYS, error, gradient
from coupled_work import Work, works
from tables import print_table

from superbatch.torch import virtual_batch

TITLES = ("", "plain ms", "compiled ms", "/ plain", "first s", "segments", "again", "device MiB", "errors")


def update(work: Work, model: torch.nn.Module, batch: Any, size: int, *, compiled: bool) -> None:
    """Compute the gradient of one batch."""
    model.zero_grad()
    with virtual_batch(model, size, compile=compiled) as virtual:
        work.loss(model, work.encode(model, virtual(batch))).backward()


def compilations() -> int:
    """Return the number of segments that were compiled in this process."""
    from superbatch.torch.virtual.run import compiled

    return compiled._cached.cache_info().misses


def in_turns(runs: list[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Run the functions in turns; return the CPU seconds of each in each round."""
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        gc.collect()
        for run, seconds in zip(runs, found, strict=True):
            start = time.process_time()
            run()
            seconds.append(time.process_time() - start)
    return found


def measure(work: Work, samples: int, size: int, rounds: int, *, double: bool) -> list[str]:
    """Return a row of the table."""
    models = [work.build(), work.build()]
    batch = work.batch(samples)
    runs = [
        lambda: update(work, models[0], batch, size, compiled=False),
        lambda: update(work, models[1], batch, size, compiled=True),
    ]
    runs[0]()
    before, start = compilations(), time.perf_counter()
    runs[1]()
    first, segments = time.perf_counter() - start, compilations() - before
    plain, fast = in_turns(runs, rounds)
    again = compilations() - before - segments
    ratio = statistics.median(b / a for a, b in zip(plain, fast, strict=True))
    peaks = [peaks_of(run)[0] / 2**20 for run in runs]
    real = gradient(WAYS[0], work, samples, samples, torch.float64)[0]
    errors = [error(gradient(WAYS[0], work, samples, samples, torch.float32)[0], real)]
    errors += [error(_gradients(model), real) for model in models]
    if double:
        model = work.build(torch.float64)
        update(work, model, work.batch(samples, torch.float64), size, compiled=True)
        errors.append(error(_gradients(model), real))
    return [
        work.name,
        f"{statistics.median(plain) * 1e3:.0f}",
        f"{statistics.median(fast) * 1e3:.0f}",
        f"{ratio:.2f}",
        f"{first:.0f}",
        str(segments),
        str(again),
        " ".join(f"{peak:.1f}" for peak in peaks),
        " ".join(f"{one:.0e}" for one in errors),
    ]


def _empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", default=",".join(works()))
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--errors", action="store_true", help="also measure the error in float64")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny batch of one training, to test the program"
    )
    options = parser.parse_args()
    known = works()
    names = options.work.split(",")
    if not set(names) <= set(known):
        parser.error(f"--work {options.work!r} has an unknown name. Pass some of {', '.join(known)}.")
    if options.quick:
        names, options.samples, options.size, options.rounds = ["convnet"], 4, 2, 1
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        # Inductor allocates without the dispatcher, where the ledger counts memory.
        torch._C._dynamo.guards._empty_strided_cpu = _empty  # type: ignore[attr-defined]  (not in its stubs)
        rows = []
        for name in names:
            work = known[name]
            rows.append(measure(work, options.samples, options.size, options.rounds, double=options.errors))
            print(*rows[-1], sep=" | ")
            sys.stdout.flush()
    print_table(f"\nN={options.samples}, m={options.size}", list(TITLES), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
