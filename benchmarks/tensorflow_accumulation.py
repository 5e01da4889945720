# TensorFlow is an extra. pyright prefers its incomplete stubs of TensorFlow, installed or not.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Cost and error of updates in micro-batches in TensorFlow.

    python benchmarks/tensorflow_accumulation.py [--rounds N] [--rows 1024] [--size 64] [--json FILE]

An MLP on rows of unequal numbers of tokens (a mask), Adam, float32, steps in `tf.function`: the large batch;
the loop of tutorials (buffers around a GradientTape, divided by K); the same loop with weights; Keras'
`gradient_accumulation_steps`; superbatch in two graphs, with the window as a loop in one graph, with the
micro-batches unrolled in one graph (TensorFlow then runs several in parallel), and eager.

Error: the largest difference of a variable from the large batch after some windows (the last one a tail),
relative to its change, in float64. Memory: the peak RSS of a separate process minus that after making
variables and data, the least of three processes (--processes 0: not measured). Time: CPU time of a window,
all threads, in rounds of random order in one process, the median of ratios to the loop of tutorials. The exit
code is 1 if superbatch is outside its bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow
from tables import print_table

from superbatch.tensorflow import Accumulator

tf: Any = tensorflow  # the stubs are incomplete
TOKENS, FEATURES, WIDTH, LAYERS = 16, 64, 512, 3
MIB = 2**20
ERROR_BOUND, TIME_BOUND, MEMORY_BOUND = 1e-12, 1.10, 1.10


@dataclass
class Work:
    """Variables, an optimizer, and the data of some windows."""

    variables: list[Any]
    optimizer: Any
    arrays: dict[str, Any]
    rows: int
    size: int

    def part(self, start: int, stop: int) -> dict[str, Any]:
        return {name: tf.constant(array[start:stop]) for name, array in self.arrays.items()}

    def parts(self, start: int, stop: int) -> list[dict[str, Any]]:
        return [self.part(i, min(i + self.size, stop)) for i in range(start, stop, self.size)]


@dataclass(frozen=True)
class Row:
    """A measured contestant."""

    name: str
    error: float
    peak_mib: float
    ratio: float
    milliseconds: float


def make(
    rows: int, size: int, dtype: str, *, accumulate: int | None = None, total: int | None = None
) -> Work:
    """Return the same weights and data in every call: `total` rows, with `rows` in each window."""
    draw = np.random.default_rng(0)
    widths = [FEATURES, *[WIDTH] * LAYERS]
    shapes = [*pairwise(widths), (WIDTH,)]
    variables = [tf.Variable(tf.constant(draw.normal(size=s) / s[0] ** 0.5, dtype)) for s in shapes]
    total = total or rows
    arrays = {
        "x": draw.normal(size=(total, TOKENS, FEATURES)).astype(dtype),
        "y": draw.normal(size=(total, TOKENS)).astype(dtype),
        "mask": (np.arange(TOKENS) < draw.integers(1, TOKENS + 1, (total, 1))).astype(dtype),
    }
    # With this epsilon Adam does not scale up the rounding of a gradient near 0.
    optimizer = keras.optimizers.Adam(1e-3, epsilon=1e-3, gradient_accumulation_steps=accumulate)
    optimizer.build(variables)
    return Work(variables, optimizer, arrays, rows, size)


def gradients(work: Work, batch: Any) -> tuple[Any, list[Any]]:
    with tf.GradientTape() as tape:
        hidden = batch["x"]
        for matrix in work.variables[:-1]:
            hidden = tf.tanh(hidden @ matrix)
        errors = (tf.linalg.matvec(hidden, work.variables[-1]) - batch["y"]) ** 2
        loss = tf.reduce_sum(errors * batch["mask"]) / count(batch)
    return loss, tape.gradient(loss, work.variables)


def count(batch: Any) -> Any:
    return tf.reduce_sum(batch["mask"])


Window = Callable[[int, int], None]


def large_batch(work: Work) -> Window:
    @tf.function(reduce_retracing=True)
    def update(batch: Any) -> None:
        work.optimizer.apply_gradients(zip(gradients(work, batch)[1], work.variables, strict=True))

    return lambda start, stop: update(work.part(start, stop))


def by_hand(work: Work, *, weighted: bool) -> Window:
    """Hand-written buffers around a tape: divided by K as in tutorials, or weighted by tokens."""
    buffers = [tf.Variable(tf.zeros_like(v), trainable=False) for v in work.variables]
    total = tf.Variable(tf.zeros([], work.variables[0].dtype), trainable=False)

    @tf.function(reduce_retracing=True)
    def add(batch: Any) -> None:
        weight = count(batch) if weighted else tf.ones([], total.dtype)
        total.assign_add(weight)
        for buffer, gradient in zip(buffers, gradients(work, batch)[1], strict=True):
            buffer.assign_add(gradient * weight if weighted else gradient)

    @tf.function
    def update() -> None:
        work.optimizer.apply_gradients([(b / total, v) for b, v in zip(buffers, work.variables, strict=True)])
        for buffer in [*buffers, total]:
            buffer.assign(tf.zeros_like(buffer))

    return lambda start, stop: _stream(work, add, update, start, stop)


def keras_option(work: Work) -> Window:
    """Keras' option: it keeps the buffers and counts to K; a tail stays in the buffers."""

    @tf.function(reduce_retracing=True)
    def add(batch: Any) -> None:
        work.optimizer.apply_gradients(zip(gradients(work, batch)[1], work.variables, strict=True))

    return lambda start, stop: _stream(work, add, lambda: None, start, stop)


def ours(work: Work, *, way: str) -> Window:
    accumulator = Accumulator(work.variables)

    def add(batch: Any) -> None:
        _, found = gradients(work, batch)
        accumulator.add(found, count(batch))

    def update() -> None:
        accumulator.apply(work.optimizer)

    def written_out(parts: Any) -> None:
        for part in parts:
            add(part)
        update()

    def in_a_loop(batch: Any) -> None:
        for start in tf.range(0, tf.shape(batch["y"])[0], work.size):
            # One iteration at a time: otherwise TensorFlow runs up to ten and keeps all their activations.
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            add({name: array[start : start + work.size] for name, array in batch.items()})
        update()

    if way == "written out":
        window = tf.function(written_out)
        return lambda start, stop: window(work.parts(start, stop))
    if way == "loop":
        window = tf.function(in_a_loop, reduce_retracing=True)
        return lambda start, stop: window(work.part(start, stop))
    if way == "two graphs":
        return _graphs(work, tf.function(add, reduce_retracing=True), tf.function(update))
    return _graphs(work, add, update)


def _graphs(work: Work, add: Any, update: Any) -> Window:
    return lambda start, stop: _stream(work, add, update, start, stop)


def _stream(work: Work, add: Any, update: Any, start: int, stop: int) -> None:
    for part in work.parts(start, stop):
        add(part)
    update()


WAYS: dict[str, Callable[[Work], Window]] = {
    "large batch": large_batch,
    "by hand, as tutorials": lambda work: by_hand(work, weighted=False),
    "by hand, weighted": lambda work: by_hand(work, weighted=True),
    "Keras gradient_accumulation_steps": keras_option,
    "superbatch, two graphs": lambda work: ours(work, way="two graphs"),
    "superbatch, a loop in one graph": lambda work: ours(work, way="loop"),
    "superbatch, written out": lambda work: ours(work, way="written out"),
    "superbatch, eager": lambda work: ours(work, way="eager"),
}
BASE = "by hand, as tutorials"


def steps_of(name: str, rows: int, size: int) -> int | None:
    return -(-rows // size) if name.startswith("Keras") else None


def error_of(name: str) -> float:
    """Return the error of three windows of 24 rows in micro-batches of 5, the last of 17, in float64."""
    weights = []
    for way in ("large batch", name):
        work = make(24, 5, "float64", accumulate=steps_of(way, 24, 5), total=65)
        start = [variable.numpy() for variable in work.variables]
        window = WAYS[way](work)
        for first, last in ((0, 24), (24, 48), (48, 65)):
            window(first, last)
        weights.append([variable.numpy() for variable in work.variables])
    moved = [np.abs(a - b).max() for a, b in zip(weights[0], start, strict=True)]
    assert min(moved) > 1e-4, "the premise: every variable moves"
    return max(np.abs(a - b).max() / m for a, b, m in zip(*weights, moved, strict=True))


def peak_of(name: str, rows: int, size: int) -> float:
    """Return the peak memory of this process in two windows minus the memory before, in MiB."""
    work = make(rows, size, "float32", accumulate=steps_of(name, rows, size))
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    window = WAYS[name](work)
    for _ in range(2):
        window(0, rows)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / MIB


def in_a_process(name: str, rows: int, size: int) -> float:
    command = [sys.executable, __file__, "--peak", name, "--rows", str(rows), "--size", str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


def least_peak(name: str, options: argparse.Namespace) -> float:
    found = [in_a_process(name, options.rows, options.size) for _ in range(options.processes)]
    return min(found, default=float("nan"))


def times_of(names: list[str], rows: int, size: int, rounds: int) -> dict[str, list[float]]:
    """Return CPU times of a window in milliseconds; the order within a round is random."""
    calls = {}
    for name in names:
        work = make(rows, size, "float32", accumulate=steps_of(name, rows, size))
        calls[name] = WAYS[name](work)
        calls[name](0, rows)
        print(f"ready: {name}", file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in random.sample(names, len(names)):
            start = time.process_time()
            calls[name](0, rows)
            times[name].append(1000 * (time.process_time() - start))
    return times


def beyond(rows: list[Row]) -> list[str]:
    """Return superbatch's results outside their bounds, relative to the correct hand-written loop."""
    right = next(row for row in rows if row.name == "by hand, weighted")
    found = []
    for row in rows:
        if not row.name.startswith("superbatch"):
            continue
        if not row.error <= ERROR_BOUND:
            found.append(f"{row.name}: error {row.error:.1e}")
        if (
            row.name in ("superbatch, two graphs", "superbatch, a loop in one graph")
            and row.ratio > TIME_BOUND * right.ratio
        ):
            found.append(f"{row.name}: time {row.ratio:.3f}, by hand {right.ratio:.3f}")
        if row.name == "superbatch, two graphs" and row.peak_mib > MEMORY_BOUND * right.peak_mib:
            found.append(f"{row.name}: {row.peak_mib:.0f} MiB, by hand {right.peak_mib:.0f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.peak:
        print(peak_of(options.peak, options.rows, options.size))
        return
    random.seed(0)
    peaks = {name: least_peak(name, options) for name in WAYS}
    errors = {name: error_of(name) for name in WAYS}
    times = times_of(list(WAYS), options.rows, options.size, options.rounds)
    rows = [
        Row(
            name,
            errors[name],
            peaks[name],
            statistics.median(a / b for a, b in zip(times[name], times[BASE], strict=True)),
            statistics.median(times[name]),
        )
        for name in WAYS
    ]
    print_table(
        f"tensorflow {tf.__version__}, keras {keras.__version__}, {options.rows} rows in {options.size}s",
        ["", "update error", "peak MiB", "time ratio", "CPU ms"],
        [
            [r.name, f"{r.error:.1e}", f"{r.peak_mib:.0f}", f"{r.ratio:.3f}", f"{r.milliseconds:.0f}"]
            for r in rows
        ],
    )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    wrong = beyond(rows)
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
