# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Sums of clipped per-sample gradients against `jax.vmap` over the batch and Optax, in float64."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
optax = pytest.importorskip("optax", reason="optax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402

from superbatch import InputError, LossSpecError, SplitError  # noqa: E402
from superbatch.jax import per_sample, per_sample_value_and_grad  # noqa: E402
from tests.jax.helpers import assert_same, errors, mse, params, rows  # noqa: E402

pytestmark = pytest.mark.jax
CLIP = 2.0


def of_each(p: Any, batch: Any, fun: Any = mse) -> Any:
    """Return loss and gradient of every sample, as Optax's example of differential privacy does."""
    with_axis = jax.tree.map(lambda leaf: leaf[:, None], batch)
    return jax.jit(jax.vmap(jax.value_and_grad(fun), in_axes=(None, 0)))(p, with_axis)


def whole(p: Any, batch: Any, clip: float = CLIP) -> Any:
    """Return the sum computed by Optax, and the number of clipped samples."""
    leaves, structure = jax.tree.flatten(of_each(p, batch)[1])
    total, clipped = optax.per_example_global_norm_clip(leaves, clip)
    return structure.unflatten(total), int(clipped)


def check_sum(**options: Any) -> None:
    p, batch = params(), rows(11)
    expected, clipped = whole(p, batch)
    assert 3 <= clipped <= 8, f"the premise: some are clipped, {clipped}"
    given: Any = {"microbatch_size": 4} | options
    call = per_sample_value_and_grad(mse, max_grad_norm=CLIP, **given)
    each, total = jax.jit(call)(p, batch)
    assert_same(total, expected)
    losses, gradients = of_each(p, batch)
    assert_same((each.loss, each.norm), (losses, jax.vmap(optax.tree.norm)(gradients)))


@pytest.mark.parametrize("size", [1, 3, 4, 11, 40])
def test_every_split_gives_the_sum_of_the_whole_batch(size: int) -> None:
    check_sum(microbatch_size=size)


def unclipped(gradient: Any, norm: Any, most: Any) -> Any:
    return gradient


WRONG: dict[str, tuple[str, Any]] = {
    "nothing is clipped": ("_clipped", unclipped),
    "the norm of one leaf": (
        "_clipped",
        lambda gradient, norm, most: jax.tree.map(
            lambda leaf: leaf * jnp.minimum(1, most / jnp.linalg.norm(leaf)), gradient
        ),
    ),
    "the tail is dropped": ("groups", lambda samples, **options: [per_sample.Group(2, 4, 0, 0)]),
    "rows in strided order": (
        "rows_in_order",
        lambda stacked, layout: jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), stacked),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mutant_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attribute, wrong = WRONG[name]
    monkeypatch.setattr(per_sample, attribute, wrong)
    with pytest.raises(AssertionError):
        check_sum()


def test_clipping_the_sum_is_different() -> None:
    """Premise: clipping the gradient of the batch gives another result."""
    p, batch = params(), rows(11)
    total = jax.tree.map(lambda leaf: leaf.sum(0), of_each(p, batch)[1])
    clipped, _ = optax.clip_by_global_norm(11 * CLIP).update(total, optax.EmptyState())
    with pytest.raises(AssertionError):
        assert_same(clipped, whole(p, batch)[0], 1e-2)


def test_differential_privacy_with_optax() -> None:
    """Five noisy updates equal those with the gradients of all samples at once."""
    clip, noise, size, p = 1.0, 1.1, 10, params()
    aggregate = optax.contrib.differentially_private_aggregate
    theirs = optax.chain(aggregate(clip, noise, key=jax.random.key(7)), optax.adam(0.1))
    ours = optax.chain(
        aggregate(size * clip, noise / size, key=jax.random.key(7)), optax.scale(1 / size), optax.adam(0.1)
    )
    call = jax.jit(per_sample_value_and_grad(mse, microbatch_size=3, max_grad_norm=clip))
    q, state, other = p, ours.init(p), theirs.init(p)
    for number in range(5):
        batch = jax.tree.map(lambda leaf, n=number: leaf[n * size : (n + 1) * size], rows(5 * size))
        alone = jax.tree.map(lambda leaf: leaf[None], call(p, batch)[1])
        updates, state = ours.update(alone, state)
        p = optax.apply_updates(p, updates)
        updates, other = theirs.update(of_each(q, batch)[1], other)
        q = optax.apply_updates(q, updates)
    assert_same(p, q)
    assert jnp.abs(p["w"] - params()["w"]).max() > 0.1, "the premise: it moved"


def test_each_sample_has_its_own_random_key() -> None:
    def noisy(p: Any, batch: Any, key: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.5, p["v"].shape)
        return mse({**p, "v": p["v"] * kept}, batch), kept

    p, batch, key = params(), rows(11), jax.random.key(3)
    found = []
    for size in (1, 4, 11):
        call = per_sample_value_and_grad(noisy, microbatch_size=size, max_grad_norm=CLIP, has_aux=True)
        found.append(jax.jit(call)(p, batch, key))
        assert_same(found[-1][1], found[0][1])
    masks = found[0][0].aux
    assert masks.shape == (11, 5) and len({tuple(mask.tolist()) for mask in masks}) > 5
    assert jnp.array_equal(masks, found[1][0].aux)


def test_a_transform_comes_before_the_clip() -> None:
    p, batch = params(), rows(11)
    squares = lambda gradient: jax.tree.map(jnp.square, gradient)  # noqa: E731
    each, total = per_sample_value_and_grad(mse, microbatch_size=4, transform=squares)(p, batch)
    expected = jax.tree.map(lambda leaf: jnp.square(leaf).sum(0), of_each(p, batch)[1])
    assert_same(total, expected)
    clipped = per_sample_value_and_grad(mse, microbatch_size=4, transform=squares, max_grad_norm=1e-3)
    assert optax.tree.norm(clipped(p, batch)[1]) <= 11e-3 < optax.tree.norm(total)
    assert_same(each.norm, jax.vmap(optax.tree.norm)(squares(of_each(p, batch)[1])))


def test_a_traced_norm() -> None:
    """As in adaptive clipping, a changed norm does not compile the program again."""

    @jax.jit
    def run(p: Any, batch: Any, clip: Any) -> Any:
        return per_sample_value_and_grad(mse, microbatch_size=4, max_grad_norm=clip)(p, batch)[1]

    p, batch = params(), rows(11)
    for clip in (0.5, 2.0):
        assert_same(run(p, batch, clip), whole(p, batch, clip)[0])


def test_several_arguments_and_a_table() -> None:
    def fun(v: Any, x: Any, y: Any, table: Any, *, shift: Any) -> Any:
        return jnp.mean((jnp.tanh(table[x]) @ v - y) ** 2 + shift)

    draw = jax.random.normal(jax.random.key(0), (3, 6, 3))
    x, y, table, v = jnp.arange(6)[::-1], draw[0, :, 0], draw[1], draw[2, 0]
    options: Any = {"microbatch_size": 2, "batch_argnums": (1, 2), "unsplit": "table"}
    _, total = per_sample_value_and_grad(fun, **options)(v, x, y, table, shift=0.5)
    expected = jax.grad(lambda v: 6 * fun(v, x, y, table, shift=0.5))(v)
    assert_same(total, expected)
    del options["unsplit"]
    with pytest.raises(InputError, match=r"table has 6 rows, as many as the batch.* unsplit="):
        per_sample_value_and_grad(fun, **options)(v, x, y, table, shift=0.5)


def test_low_precision_is_summed_in_float32() -> None:
    p, batch = jnp.ones(1, jnp.bfloat16), jnp.asarray([1.0] + [0.003] * 511, jnp.bfloat16)[:, None]
    call = per_sample_value_and_grad(lambda p, batch: jnp.mean(p * batch), microbatch_size=1)
    total = jax.jit(call)(p, batch)[1]
    assert total.dtype == jnp.float32
    assert abs(float(total[0]) / float(batch.astype(jnp.float32).sum()) - 1) < 1e-6


def test_peak_memory_is_that_of_a_microbatch() -> None:
    p = {"w": jnp.ones((3, 500)), "b": jnp.zeros(500), "v": jnp.ones(500)}
    batch = rows(512)
    call = per_sample_value_and_grad(mse, microbatch_size=8, max_grad_norm=1.0)
    ours, theirs = (
        jax.jit(one).lower(p, batch).compile().memory_analysis().temp_size_in_bytes
        for one in (call, lambda p, batch: whole_sum(p, batch))
    )
    assert theirs > 512 * 2500 * 8, "the premise: all gradients are in memory"
    assert ours < theirs / 20


def whole_sum(p: Any, batch: Any) -> Any:
    with_axis = jax.tree.map(lambda leaf: leaf[:, None], batch)
    leaves = jax.tree.leaves(jax.vmap(jax.grad(mse), in_axes=(None, 0))(p, with_axis))
    return optax.per_example_global_norm_clip(leaves, 1.0)[0], leaves


@pytest.mark.parametrize("most", [0, -1.0, float("nan")])
def test_an_invalid_norm(most: float) -> None:
    with pytest.raises(InputError, match=r"max_grad_norm=.* is not positive\. Pass a number above 0"):
        per_sample_value_and_grad(mse, microbatch_size=4, max_grad_norm=most)


def test_invalid_calls() -> None:
    with pytest.raises(InputError, match="microbatch_size=0"):
        per_sample_value_and_grad(mse, microbatch_size=0)
    with pytest.raises(InputError, match="has no gradient"):
        per_sample_value_and_grad(mse, microbatch_size=4)(params() | {"n": jnp.arange(3)}, rows(11))
    with pytest.raises(LossSpecError, match="a loss of shape"):
        per_sample_value_and_grad(errors, microbatch_size=4)(params(), rows(11))
    batch = rows(11)
    batch["y"] = batch["y"][:10]
    with pytest.raises(SplitError, match="different lengths"):
        per_sample_value_and_grad(mse, microbatch_size=4)(params(), batch)
