# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Time and memory of loops over micro-batches in JAX: a scan, an unrolled loop, and calls from the host.

    python benchmarks/jax_loops.py [--rounds N] [--rows 64] [--microbatch-size 8] [--models conv,text]

Gradients of one batch in float32, for three convolutions and for a four-layer transformer. Rows: the full
batch; `superbatch.jax` (a scan); three hand-written loops: the scan of JAX's documentation, the same loop
unrolled, and one program call for each micro-batch. Memory is `temp_size_in_bytes` of the compiled program.
Time is CPU time of all threads, the median of rounds in random order, and its ratio to that of superbatch.
The exit code is 1 if gradients differ, or if a loop is faster by more than a fifth and needs no less memory
than superbatch.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax_accumulation import error_of, exact_gradient, loss, parameters, texts
from tables import print_table

from superbatch.jax import value_and_grad

SLOWER = 1.2  # times are accurate to about 10 %
MIB = 2**20
Gradient = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Row:
    """Row of the table: one method to compute the gradient of one model."""

    model: str
    way: str
    temp_mib: float | None  # None for calls from the host, which are several programs
    cpu_ms: float
    ratio: float  # ratio of the time to superbatch's
    error: float


@dataclass
class Way:
    """Compiled method; `call` computes the gradient once and waits for it."""

    name: str
    temp_mib: float | None
    call: Callable[[], Any]


def convolutional() -> tuple[Any, Callable[[int], Any], Callable[..., Any]]:
    """Return parameters, batch and loss of three convolutions with pooling on 32 x 32 images."""
    draw = np.random.default_rng(0)

    def kernel(*shape: int) -> Any:
        return jnp.asarray(draw.normal(size=shape) / np.prod(shape[:-1]) ** 0.5, jnp.float32)

    p = {"kernels": [kernel(3, 3, 3, 32), kernel(3, 3, 32, 64), kernel(3, 3, 64, 64)], "head": kernel(64, 10)}

    def images(rows: int) -> Any:
        x, y = draw.normal(size=(rows, 32, 32, 3)), draw.normal(size=(rows, 10))
        return {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y, jnp.float32)}

    def squared(p: Any, batch: Any) -> Any:
        x = batch["x"]
        for one in p["kernels"]:
            x = lax.conv_general_dilated(x, one, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.mean((x.mean((1, 2)) @ p["head"] - batch["y"]) ** 2)

    return p, images, squared


def transformer() -> tuple[Any, Callable[[int], Any], Callable[..., Any]]:
    """Return parameters, batch and loss of the transformer of `jax_accumulation.py`, on full-length texts."""

    def full(rows: int) -> Any:
        batch = texts(rows)
        return batch | {"mask": jnp.ones_like(batch["mask"])}  # equal weights: loops by hand have none

    return parameters(), full, loss


MODELS = {"conv": convolutional, "text": transformer}


def ways(fun: Callable[..., Any], p: Any, batch: Any, size: int) -> list[Way]:
    """Compile each method to compute the gradient of a batch."""
    count = len(jax.tree.leaves(batch)[0]) // size
    gradient = jax.grad(fun)

    def cut(batch: Any, index: Any) -> Any:
        return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, index * size, size), batch)

    def add(sums: Any, p: Any, part: Any) -> Any:
        return jax.tree.map(lambda total, leaf: total + leaf / count, sums, gradient(p, part))

    def zeros(p: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, p)

    def scan(p: Any, batch: Any) -> Any:
        indices = jnp.arange(count)
        return lax.scan(lambda sums, i: (add(sums, p, cut(batch, i)), None), zeros(p), indices)[0]

    def written_out(p: Any, batch: Any) -> Any:
        sums = zeros(p)
        for i in range(count):
            sums = add(sums, p, cut(batch, i))
        return sums

    # Without the check, which runs only once.
    ours = value_and_grad(fun, microbatch_size=size, check=False)
    programs: dict[str, Gradient] = {
        "full batch": gradient,
        "superbatch": lambda p, batch: ours(p, batch)[1],
        "scan by hand": scan,
        "written out": written_out,
    }
    found = [compiled(name, program, p, batch) for name, program in programs.items()]
    step: Any = jax.jit(lambda sums, p, batch, i: add(sums, p, cut(batch, i)), donate_argnums=0)

    def host() -> Any:
        sums = zeros(p)
        for i in range(count):
            sums = step(sums, p, batch, i)
        return jax.block_until_ready(sums)

    return [*found, Way("calls from the host", None, host)]


def compiled(name: str, program: Gradient, p: Any, batch: Any) -> Way:
    """Compile a program."""
    done: Any = jax.jit(program).lower(p, batch).compile()
    temp = done.memory_analysis().temp_size_in_bytes / MIB
    return Way(name, temp, lambda: jax.block_until_ready(done(p, batch)))


def measure(model: str, rows: int, size: int, rounds: int) -> list[Row]:
    """Return the median CPU times of every method; the order within a round is random."""
    p, batch_of, fun = MODELS[model]()
    batch = batch_of(rows)
    contestants = ways(fun, p, batch, size)
    exact = exact_gradient(fun, p, batch)
    # Every method runs once before it is timed.
    errors = {way.name: error_of(way.call(), exact) for way in contestants}
    times: dict[str, list[float]] = {way.name: [] for way in contestants}
    for _ in range(rounds):
        for way in random.sample(contestants, len(contestants)):
            start = time.process_time()
            way.call()
            times[way.name].append(1000 * (time.process_time() - start))
    medians = {name: statistics.median(listed) for name, listed in times.items()}
    ours = medians["superbatch"]
    return [
        Row(model, way.name, way.temp_mib, medians[way.name], medians[way.name] / ours, errors[way.name])
        for way in contestants
    ]


def beyond(rows: list[Row]) -> list[str]:
    """Return loops that are faster than superbatch and need no less memory, and wrong gradients."""
    found = [f"{row.model}, {row.way}: gradient error {row.error:.1e}" for row in rows if row.error > 1e-4]
    ours = {row.model: row.temp_mib or 0.0 for row in rows if row.way == "superbatch"}
    for row in rows:
        leaner = row.temp_mib is None or row.temp_mib <= 1.1 * ours[row.model]
        if leaner and row.ratio < 1 / SLOWER:
            found.append(f"{row.model}, {row.way}: faster than superbatch, in {row.ratio:.2f} of its time")
    return found


def names(text: str) -> list[str]:
    """Return the models of ``--models``; argparse reports an unknown one."""
    listed = text.split(",")
    if not set(listed) <= set(MODELS):
        raise argparse.ArgumentTypeError(f"models are {', '.join(MODELS)}")
    return listed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--microbatch-size", type=int, default=8)
    parser.add_argument("--models", type=names, default="conv,text")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    random.seed(0)
    rows = [
        row
        for model in options.models
        for row in measure(model, options.rows, options.microbatch_size, options.rounds)
    ]
    print_table(
        f"jax {jax.__version__} on {jax.default_backend()}, {options.rounds} rounds",
        ["model", "loop", "XLA temp MiB", "CPU ms", "ratio", "gradient error"],
        [
            [
                row.model,
                row.way,
                "-" if row.temp_mib is None else f"{row.temp_mib:.1f}",
                f"{row.cpu_ms:.0f}",
                f"{row.ratio:.2f}",
                f"{row.error:.1e}",
            ]
            for row in rows
        ],
    )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    wrong = beyond(rows)
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
