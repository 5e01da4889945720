# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Checks as functions: the tests call them, and the mutants must make them fail."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from superbatch.jax import multi_steps, remat_map, value_and_grad
from tests.jax.helpers import (
    assert_same,
    count_tokens,
    errors,
    mse,
    params,
    rows,
    texts,
    token_mean,
    token_sum,
)

LENGTHS = [4, 1, 0, 2, 3, 1, 0, 4, 2, 1]  # contiguous micro-batches of one: two are empty


def whole(fun: Any, p: Any, batch: Any) -> Any:
    return jax.jit(jax.value_and_grad(fun))(p, batch)


def tail(samples: int = 11, **options: Any) -> None:
    options = options or {"microbatch_size": 4}
    p, batch = params(), rows(samples)
    assert_same(jax.jit(value_and_grad(mse, **options))(p, batch), whole(mse, p, batch))


def tokens(**options: Any) -> None:
    """A window with a tail and an empty micro-batch, whose loss is NaN, gives the gradient of the batch."""
    p, batch = params(), texts(LENGTHS)
    empty = jax.tree.map(lambda leaf: leaf[2:3], batch)
    loss, gradient = whole(token_mean, p, empty)
    assert jnp.isnan(loss) and jnp.isnan(gradient["w"]).any(), "the premise: an empty micro-batch is 0 / 0"
    options = {"steps": 10, "weight": count_tokens} | options
    got = jax.jit(value_and_grad(token_mean, **options))(p, batch)
    assert_same(got, whole(token_mean, p, batch))
    means = [token_sum(p, one) / max(int(count_tokens(one)), 1) for one in microbatches(batch, 5)]
    assert abs(float(sum(means)) / 2 - float(got[0])) > 1e-3, "the premise: a mean of means is different"


def microbatches(batch: Any, size: int) -> list[Any]:
    samples = len(batch["y"])
    return [jax.tree.map(lambda x, i=i: x[i : i + size], batch) for i in range(0, samples, size)]


def balance(p: Any, batch: Any) -> Any:
    """Mean over all rows, with or without tokens."""
    return jnp.mean(jnp.tanh(batch["x"] @ p["w"]) ** 2)


def two_terms(p: Any, batch: Any) -> Any:
    return {"tokens": token_mean(p, batch), "rows": balance(p, batch)}


def two_sums(p: Any, batch: Any) -> Any:
    """The same two terms as sums, each with its weight."""
    count = jnp.asarray(len(batch["y"]))
    rows = jnp.sum(jnp.mean(jnp.tanh(batch["x"] @ p["w"]) ** 2, axis=(1, 2)))
    return {"tokens": (token_sum(p, batch), count_tokens(batch)), "rows": (rows, count)}


def sum_of_terms(p: Any, batch: Any) -> Any:
    """Sum of both terms on the whole batch."""
    return sum(two_terms(p, batch).values())


def terms() -> None:
    """A mean over rows plus a mean over tokens, with a tail and a micro-batch without tokens, is exact."""
    p, batch = params(), texts([4, 1, 3, 0, 0, 0, 1, 4, 2, 1])
    assert jnp.isnan(token_mean(p, microbatches(batch, 3)[1])), "the premise: there is no token"
    expected = whole(sum_of_terms, p, batch)
    ways: Any = (
        (two_terms, {"weight": {"tokens": count_tokens, "rows": None}}),
        (two_sums, {"weight": "returned", "reduction": "sum"}),
    )
    for fun, declared in ways:
        options: Any = {"microbatch_size": 3, "layout": "contiguous", "stats": True} | declared
        *got, stats = jax.jit(value_and_grad(fun, **options))(p, batch)
        assert_same(tuple(got), expected)
        assert_same(stats.losses, {"tokens": token_mean(p, batch), "rows": balance(p, batch)})
        assert {name: int(weight) for name, weight in stats.weights.items()} == {"tokens": 16, "rows": 10}


def random_keys() -> None:
    """Each micro-batch and the tail has its own dropout mask."""

    def noisy(p: Any, batch: Any, key: Any) -> Any:
        kept = jax.random.uniform(key, p["b"].shape)
        return mse({**p, "b": p["b"] * kept}, batch), kept

    p, batch, key = params(), rows(10), jax.random.key(3)
    options: Any = {"microbatch_size": 4, "rng_argnum": 2, "has_aux": True, "layout": "contiguous"}
    (loss, masks), gradient = jax.jit(value_and_grad(noisy, **options))(p, batch, key)
    assert len({tuple(np.asarray(mask)) for mask in masks}) == 3, f"masks repeat: {masks}"

    def by_hand(p: Any) -> Any:
        parts = microbatches(batch, 4)
        losses = [noisy(p, part, jax.random.fold_in(key, i))[0] for i, part in enumerate(parts)]
        return sum(len(part["y"]) * one for part, one in zip(parts, losses, strict=True)) / 10

    assert_same((loss, gradient), jax.jit(jax.value_and_grad(by_hand))(p))


def low_precision() -> None:
    """Sum 1 + 511 x 0.003: a sum in bfloat16 stops when 0.003 is less than half of its last bit."""
    p = jnp.ones(1, jnp.bfloat16)
    batch = jnp.asarray([1.0] + [0.003] * 511, jnp.bfloat16)[:, None]

    def loss(p: Any, batch: Any) -> Any:
        return jnp.mean(p * batch)

    exact = float(np.asarray(batch, np.float64).mean())
    inexact = value_and_grad(loss, microbatch_size=1, layout="contiguous", accumulator_dtype=None)
    assert abs(float(jax.jit(inexact)(p, batch)[1][0]) / exact - 1) > 0.1, (
        "the premise: bfloat16 is too inexact"
    )
    got = jax.jit(value_and_grad(loss, microbatch_size=1, layout="contiguous"))(p, batch)[1]
    assert got.dtype == jnp.bfloat16
    assert abs(float(got[0]) / exact - 1) < 2**-8


def rows_of_aux(layout: Any = "strided") -> None:
    """Values of aux per row are in the order of the batch, tail included."""
    p, batch = params(), rows(11)
    options: Any = {"microbatch_size": 4, "has_aux": True, "aux": "concat", "layout": layout}
    fun = lambda p, batch: (mse(p, batch), errors(p, batch))  # noqa: E731  (shorter than a def)
    (_, got), _ = jax.jit(value_and_grad(fun, **options))(p, batch)
    assert_same(got, errors(p, batch))


def noise() -> None:
    """a2 and b2 equal those of separately computed gradients, with weights and an empty micro-batch."""
    p, batch = params(), texts([4, 1, 0, 0, 3, 1, 1, 4, 2, 1])
    options: Any = {"microbatch_size": 2, "weight": count_tokens, "layout": "contiguous", "noise": True}
    _, gradient, stats = jax.jit(value_and_grad(token_mean, **options))(p, batch)
    parts = [part for part in microbatches(batch, 2) if count_tokens(part)]
    assert len(parts) == 4, "the premise: one of five is empty"
    weights = np.array([float(count_tokens(part)) for part in parts])
    squares = [
        sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(jax.grad(token_mean)(p, part)))
        for part in parts
    ]
    shares = weights / weights.sum()
    assert_same(
        [stats.a2, stats.b2, stats.q, stats.effective_samples],
        [
            jnp.asarray(np.sum(shares**2 * squares)),
            sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)),
            jnp.asarray(np.sum(shares**2)),
            jnp.asarray(1 / np.sum(shares**2 / 2)),
        ],
    )
    assert (int(stats.weight), int(stats.samples), int(stats.microbatches)) == (17, 8, 5)


def contrastive() -> None:
    p, (x, y) = params(), (rows(11)["x"], rows(12)["x"][:11])

    def encode(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ p["w"] + p["b"]) * p["v"]

    def loss(p: Any, encoder: Any) -> Any:
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(encoder(p, x) @ encoder(p, y).T)))

    assert_same(jax.jit(lambda p: remat_map(encode, p, x, 4))(p), encode(p, x))
    got = jax.jit(jax.value_and_grad(lambda p: loss(p, lambda p, x: remat_map(encode, p, x, 4))))(p)
    assert_same(got, jax.jit(jax.value_and_grad(lambda p: loss(p, encode)))(p))


def stream(**options: Any) -> None:
    """Windows of 4 + 3 + 3 rows and a flushed tail of 2 equal Adam on whole batches of 10, 10 and 2."""
    sizes = [4, 3, 3, 4, 3, 3, 2]
    gradient_of = jax.jit(jax.grad(mse))
    optimizer = multi_steps(optax.adam(0.1), every=3, **options)
    batch = rows(sum(sizes))
    p, plain = params(), params()
    state: Any = optimizer.init(p)
    adam: Any = optax.adam(0.1)
    plain_state = adam.init(plain)
    step = jax.jit(optimizer.update)
    start = 0
    for number, size in enumerate(sizes):
        part = jax.tree.map(lambda x, i=start, n=size: x[i : i + n], batch)
        start += size
        last = jnp.asarray(number == len(sizes) - 1)
        updates, state = step(gradient_of(p, part), state, p, weight=size, flush=last)
        p = optax.apply_updates(p, updates)
    for window in (slice(0, 10), slice(10, 20), slice(20, 22)):
        part = jax.tree.map(lambda x, window=window: x[window], batch)
        updates, plain_state = adam.update(gradient_of(plain, part), plain_state)
        plain = optax.apply_updates(plain, updates)
    assert int(state.updates) == 3 and int(state.microbatches) == 0
    assert_same(p, plain)
    assert_same(state.inner[0].mu, plain_state[0].mu)


def stream_recovers() -> None:
    """A NaN micro-batch makes its own window NaN and does not affect the next window."""
    optimizer: Any = multi_steps(optax.sgd(1.0), every=2)
    p = jnp.zeros(1)
    state = optimizer.init(p)
    seen = []
    for gradient in (jnp.nan, 1.0, 2.0, 4.0):
        updates, state = optimizer.update(jnp.full(1, gradient), state, p)
        seen.append(float(updates[0]))
    assert np.isnan(seen[1]), "the premise: the NaN is seen"
    assert [seen[0], seen[2], seen[3]] == [0.0, 0.0, -3.0], seen
