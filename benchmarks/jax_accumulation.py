# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Cost and error of updates in micro-batches in JAX.

    python benchmarks/jax_accumulation.py [--rounds N] [--sizes 32,16,8,4,2] [--rows 64] [--json FILE]

A four-layer transformer on 64 texts of 1 to 64 tokens, AdamW, float32. Rows: the full batch;
`superbatch.jax`; `optax.microbatching` (mean over micro-batches); `optax.MultiSteps` and superbatch's
`multi_steps`, both fed from the host. Memory is `temp_size_in_bytes` of the compiled update (JAX's peak on
the CPU has arguments only). Time is CPU time of all threads, the median of rounds in random order. The
gradient's error is the largest difference of an element from the full batch's gradient in float64, relative
to the largest element; the float32 full batch has a rounding error too. Then a contrastive loss of 2048
pairs: full batch, `remat_map`, the same loop in plain JAX, plain micro-batches. The exit code is 1 if
superbatch is outside its bounds.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import microbatching
from tables import print_table

from superbatch.jax import multi_steps, remat_map, value_and_grad

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 1024, 256, 4, 4, 64
ROUNDING = 1.5  # allowed ratio of the rounding error to the full batch's
MIB = 2**20


@dataclass
class Contestant:
    """Method to make an update; `call` makes one and waits for it."""

    name: str
    temp: float  # MiB of the compiled program
    state: float  # MiB of optimizer state beyond AdamW's own
    error: float | None
    call: Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """A measured contestant."""

    name: str
    temp_mib: float
    state_mib: float
    cpu_ms: float
    error: float | None


def parameters() -> Any:
    """Return the parameters of a transformer: 3.7 million in float32."""
    draw = np.random.default_rng(0).normal

    def matrix(*shape: int) -> Any:
        return jnp.asarray(draw(size=shape) / shape[0] ** 0.5, jnp.float32)

    def layer() -> Any:
        return {
            "qkv": matrix(WIDTH, 3 * WIDTH),
            "out": matrix(WIDTH, WIDTH),
            "up": matrix(WIDTH, 4 * WIDTH),
            "down": matrix(4 * WIDTH, WIDTH),
        }

    return {
        "embed": matrix(VOCABULARY, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "head": matrix(WIDTH, VOCABULARY),
    }


def norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(layer: Any, x: Any) -> Any:
    b, t, d = x.shape
    q, k, v = (part.reshape(b, t, HEADS, d // HEADS) for part in jnp.split(x @ layer["qkv"], 3, -1))
    scores = jnp.einsum("bthc,bshc->bhts", q, k) / (d // HEADS) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9)
    return jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(scores), v).reshape(b, t, d) @ layer["out"]


def token_losses(p: Any, batch: Any) -> Any:
    x = p["embed"][batch["tokens"]]
    for layer in p["layers"]:
        x = x + attention(layer, norm(x))
        x = x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
    logits = norm(x) @ p["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]) * batch["mask"]


def loss(p: Any, batch: Any) -> Any:
    return token_losses(p, batch).sum() / batch["mask"].sum()


def count(batch: Any) -> Any:
    return batch["mask"].sum()


def texts(rows: int) -> Any:
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, VOCABULARY, (rows, LENGTH + 1))
    mask = np.arange(LENGTH)[None] < draw.integers(1, LENGTH + 1, (rows, 1))
    arrays = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "mask": mask.astype(np.float32)}
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def exact_gradient(loss: Callable[..., Any], p: Any, batch: Any) -> Any:
    """Return the full batch's gradient in float64, from the same float32 numbers."""

    def wider(leaf: Any) -> Any:
        return (
            jnp.asarray(leaf, jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.asarray(leaf)
        )

    p, batch = jax.tree.map(np.asarray, (p, batch))
    with jax.enable_x64(new_val=True):
        return jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(*jax.tree.map(wider, (p, batch))))


def error_of(gradient: Any, exact: Any) -> float:
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(exact), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def one_update(name: str, gradient_of: Callable[..., Any], p: Any, batch: Any, exact: Any) -> Contestant:
    """Return an update in one jitted program."""
    optimizer = optax.adamw(1e-3)
    state = optimizer.init(p)

    def update(p: Any, state: Any, batch: Any) -> Any:
        gradient = gradient_of(p, batch)
        updates, state = optimizer.update(gradient, state, p)
        return optax.apply_updates(p, updates), state

    program: Any = jax.jit(update).lower(p, state, batch).compile()
    error = error_of(jax.jit(gradient_of)(p, batch), exact) if exact is not None else None
    temp = program.memory_analysis().temp_size_in_bytes / MIB
    return Contestant(name, temp, 0.0, error, lambda: jax.block_until_ready(program(p, state, batch)))


def streamed(name: str, optimizer: Any, p: Any, batch: Any, *, size: int, weighted: bool) -> Contestant:
    """Return an update of micro-batches from the host, with one program call each."""
    plain = sum(leaf.nbytes for leaf in jax.tree.leaves(optax.adamw(1e-3).init(p)))
    state = optimizer.init(p)

    def update(p: Any, state: Any, part: Any) -> Any:
        gradient = jax.grad(loss)(p, part)
        more = {"weight": count(part)} if weighted else {}
        updates, state = optimizer.update(gradient, state, p, **more)
        return optax.apply_updates(p, updates), state

    parts = [jax.tree.map(lambda x, i=i: x[i : i + size], batch) for i in range(0, len(batch["mask"]), size)]
    # As in a training, parameters and state are donated, so XLA updates them in place.
    program: Any = jax.jit(update, donate_argnums=(0, 1)).lower(p, state, parts[0]).compile()

    def call() -> None:
        now = jax.tree.map(jnp.copy, (p, state))
        for part in parts:
            now = program(*now, part)
        jax.block_until_ready(now)

    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) - plain
    return Contestant(name, program.memory_analysis().temp_size_in_bytes / MIB, held / MIB, None, call)


def optax_gradient(size: int, *, inside: bool) -> Callable[..., Any]:
    """Return `optax.microbatching` of gradients of micro-batches, or the gradient of its loss."""
    options = {"argnums": 1, "microbatch_size": size, "accumulator": microbatching.AccumulationType.MEAN}
    if inside:
        return microbatching.microbatch(jax.grad(loss), **options)
    return jax.grad(microbatching.microbatch(loss, **options))


def transformer(rows: int, sizes: list[int]) -> list[Contestant]:
    p, batch = parameters(), texts(rows)
    exact = exact_gradient(loss, p, batch)

    def ours(size: int, **options: Any) -> Callable[..., Any]:
        call = value_and_grad(loss, microbatch_size=size, weight=count, **options)
        return lambda p, batch: call(p, batch)[1]

    def measuring(p: Any, batch: Any) -> Any:  # XLA would remove an unused result
        _, gradient, stats = value_and_grad(loss, microbatch_size=8, weight=count, noise=True)(p, batch)
        return jax.tree.map(lambda leaf: leaf + 0 * stats.a2, gradient)

    theirs, streaming = (make(optax.adamw(1e-3), rows // 8) for make in (optax.MultiSteps, multi_steps))
    return [
        one_update("full batch", jax.grad(loss), p, batch, exact),
        *(one_update(f"superbatch, {size}", ours(size), p, batch, exact) for size in sizes),
        one_update("superbatch, 8, noise", measuring, p, batch, exact),
        one_update("superbatch, 24 and a tail of 16", ours(24), p, batch, exact),
        one_update("optax microbatch(grad), 8", optax_gradient(8, inside=True), p, batch, exact),
        one_update("grad(optax microbatch), 8", optax_gradient(8, inside=False), p, batch, exact),
        streamed("optax.MultiSteps, 8", theirs, p, batch, size=8, weighted=False),
        streamed("superbatch multi_steps, 8", streaming, p, batch, size=8, weighted=True),
    ]


def contrastive(pairs: int) -> list[Contestant]:
    """Return contrastive losses of two views; the logits of all pairs need the least possible memory."""
    draw = np.random.default_rng(0).normal
    widths = [64, 1024, 1024, 1024, 64]
    p = [jnp.asarray(draw(size=shape) / shape[0] ** 0.5, jnp.float32) for shape in pairwise(widths)]
    batch = {name: jnp.asarray(draw(size=(pairs, 64)), jnp.float32) for name in ("x", "y")}

    def encode(p: Any, x: Any) -> Any:
        for matrix in p[:-1]:
            x = jax.nn.gelu(norm(x @ matrix))
        x = x @ p[-1]
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def of(encoder: Callable[..., Any]) -> Callable[..., Any]:
        def nce(p: Any, batch: Any) -> Any:
            logits = 10 * encoder(p, batch["x"]) @ encoder(p, batch["y"]).T
            return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)))

        return nce

    exact = exact_gradient(of(encode), p, batch)
    plain = value_and_grad(of(encode), microbatch_size=64)
    ours = of(lambda p, x: remat_map(encode, p, x, 64))
    checkpointed = jax.checkpoint(encode, policy=jax.checkpoint_policies.nothing_saveable)

    def pieces(p: Any, x: Any) -> Any:
        return jax.lax.map(lambda piece: checkpointed(p, piece), x.reshape(-1, 64, 64)).reshape(pairs, 64)

    return [
        one_update("contrastive: full batch", jax.grad(of(encode)), p, batch, exact),
        one_update("contrastive: remat_map, 64", jax.grad(ours), p, batch, exact),
        one_update("contrastive: its loop by hand", jax.grad(of(pieces)), p, batch, exact),
        one_update("contrastive: micro-batches", lambda p, batch: plain(p, batch)[1], p, batch, exact),
    ]


def measure(contestants: list[Contestant], rounds: int) -> list[Row]:
    """Return the median CPU times; the order within a round is random."""
    times: dict[str, list[float]] = {one.name: [] for one in contestants}
    for one in contestants:
        one.call()
        print(f"ready: {one.name}", file=sys.stderr)
    for _ in range(rounds):
        for one in random.sample(contestants, len(contestants)):
            start = time.process_time()
            one.call()
            times[one.name].append(1000 * (time.process_time() - start))
    return [
        Row(one.name, one.temp, one.state, statistics.median(times[one.name]), one.error)
        for one in contestants
    ]


def beyond(rows: list[Row]) -> list[str]:
    """Return the results of superbatch outside their bounds."""
    by_name = {row.name: row for row in rows}
    found = []
    for row in rows:
        full = by_name["contrastive: full batch" if row.name.startswith("contrastive") else "full batch"]
        ours = "superbatch" in row.name or "remat_map" in row.name
        if ours and row.error is not None and row.error > ROUNDING * (full.error or 0.0):
            found.append(f"{row.name}: gradient error {row.error:.1e}, the full batch's {full.error:.1e}")
    ours, theirs = by_name.get("superbatch, 8"), by_name["optax microbatch(grad), 8"]
    if ours and ours.temp_mib > 1.05 * theirs.temp_mib:
        found.append(f"superbatch, 8: {ours.temp_mib:.1f} MiB, optax {theirs.temp_mib:.1f}")
    return found


def whole_numbers(text: str) -> list[int]:
    """Return the micro-batch sizes of ``--sizes``; argparse reports an invalid one."""
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=whole_numbers, default="32,16,8,4,2")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    random.seed(0)
    rows = measure([*transformer(options.rows, options.sizes), *contrastive(options.pairs)], options.rounds)
    print_table(
        f"jax {jax.__version__}, optax {optax.__version__}, {options.rounds} rounds",
        ["", "XLA temp MiB", "more state MiB", "CPU ms", "gradient error"],
        [
            [
                row.name,
                f"{row.temp_mib:.1f}",
                f"{row.state_mib:.1f}",
                f"{row.cpu_ms:.0f}",
                "-" if row.error is None else f"{row.error:.1e}",
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
