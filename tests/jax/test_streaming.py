# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""`superbatch.jax.multi_steps` and `remat_map`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
optax = pytest.importorskip("optax", reason="optax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402

from superbatch import InputError  # noqa: E402
from superbatch.jax import flush, multi_steps, remat_map  # noqa: E402
from tests.jax import checks  # noqa: E402

pytestmark = pytest.mark.jax


def feed(optimizer: Any, gradients: list[Any], **options: Any) -> tuple[list[float], Any]:
    """Feed scalar gradients; return the updates and the last state."""
    p = jnp.zeros(1, options.pop("dtype", jnp.float64))
    state, seen = optimizer.init(p), []
    weights = options.pop("weights", [1] * len(gradients))
    for gradient, weight in zip(gradients, weights, strict=True):
        updates, state = optimizer.update(jnp.full(1, gradient, p.dtype), state, p, weight=weight)
        seen.append(updates[0].item())
    return seen, state


def test_windows_and_a_flushed_tail_equal_whole_batches() -> None:
    checks.stream()


def test_a_nan_affects_only_its_window() -> None:
    checks.stream_recovers()


def test_a_nan_microbatch_can_be_left_out() -> None:
    optimizer = multi_steps(optax.sgd(1.0), every=3, nonfinite="skip_microbatch")
    seen, state = feed(optimizer, [1.0, jnp.nan, 4.0], weights=[1, 5, 3])
    assert seen == [0.0, 0.0, -3.25] and int(state.skipped) == 1


def test_a_window_with_a_nan_can_be_skipped() -> None:
    optimizer = multi_steps(optax.sgd(1.0, momentum=0.9), every=2, nonfinite="skip_update")
    seen, state = feed(optimizer, [1.0, jnp.inf, 1.0, 3.0])
    assert seen == [0.0, 0.0, 0.0, -2.0]
    assert (int(state.skipped), int(state.updates)) == (1, 1)


def test_the_guard_of_optax_recovers() -> None:
    """With `optax.MultiSteps` every later update is NaN and skipped, so the model never moves again."""
    guarded = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=100)
    seen, _ = feed(multi_steps(guarded, every=2), [jnp.nan, 1.0, 1.0, 3.0])
    assert seen == [0.0, 0.0, 0.0, -2.0]
    theirs = optax.MultiSteps(guarded, every_k_schedule=2)
    state, p = theirs.init(jnp.zeros(1)), jnp.zeros(1)
    for gradient in (jnp.nan, 1.0, 1.0, 3.0):
        updates, state = theirs.update(jnp.full(1, gradient), state, p)
    assert float(updates[0]) == 0.0, "the premise: optax 0.2.8 does not recover"


def test_an_empty_microbatch_contributes_nothing() -> None:
    seen, _ = feed(multi_steps(optax.sgd(1.0), every=3), [1.0, jnp.nan, 2.0], weights=[1, 0, 3])
    assert seen[2] == -1.75


def test_a_window_of_empty_microbatches_makes_no_update() -> None:
    optimizer = multi_steps(optax.sgd(optax.piecewise_constant_schedule(1.0, {1: 0.5})), every=2)
    seen, state = feed(optimizer, [jnp.nan, jnp.nan, 1.0, 3.0], weights=[0, 0, 1, 1])
    assert seen == [0.0, 0.0, 0.0, -2.0], "the schedule did not advance"
    assert int(state.updates) == 1


def test_sums_over_a_window() -> None:
    seen, _ = feed(multi_steps(optax.sgd(1.0), every=2, reduction="sum"), [1.0, 6.0], weights=[1, 3])
    assert seen == [0.0, -1.75]


def test_flush_without_a_microbatch() -> None:
    optimizer = multi_steps(optax.sgd(1.0), every=4)
    _, state = feed(optimizer, [1.0, 2.0], weights=[1, 3])
    p = jnp.zeros(1)
    updates, state = flush(optimizer, state, p)
    assert updates.tolist() == [-1.75] and bool(state.updated)
    updates, state = flush(optimizer, state, p)
    assert updates.tolist() == [0.0] and not bool(state.updated)


def test_a_schedule_of_windows() -> None:
    optimizer = multi_steps(optax.sgd(1.0), every=lambda updates: jnp.where(updates < 1, 1, 2))
    seen, _ = feed(optimizer, [1.0, 2.0, 4.0, 1.0])
    assert seen == [-1.0, 0.0, -3.0, 0.0]


def test_complex_and_float64() -> None:
    gradients = [1 + 2j, 3 - 4j]
    seen, _ = feed(multi_steps(optax.sgd(1.0), every=2), gradients, dtype=jnp.complex128)
    assert seen[1] == -(2 - 1j)
    seen, _ = feed(multi_steps(optax.sgd(1.0), every=2), [1.0, 1e-12])
    assert seen[1] == -(1 + 1e-12) / 2


def test_bfloat16_is_summed_in_float32() -> None:
    gradients = [1.0] + [0.003] * 511
    exact = float(np.asarray(jnp.asarray(gradients, jnp.bfloat16), np.float64).mean())
    optimizer = multi_steps(optax.sgd(1.0), every=512)
    p = jnp.zeros((), jnp.bfloat16)

    def step(state: Any, gradient: Any) -> Any:
        updates, state = optimizer.update(gradient, state, p)
        return state, updates

    _, updates = jax.jit(lambda: jax.lax.scan(step, optimizer.init(p), jnp.asarray(gradients, p.dtype)))()
    assert updates.dtype == p.dtype and abs(float(-updates[-1]) / exact - 1) < 2**-8


@pytest.mark.parametrize("optimizer", [optax.sgd(1.0, momentum=0.5), optax.adam(0.1), optax.adafactor(0.1)])
def test_float32_gradients_of_bfloat16_parameters(optimizer: Any) -> None:
    """The state keeps its dtypes, as `lax.cond` requires; sums have the dtype of the gradients."""
    p = jnp.ones(4, jnp.bfloat16)
    stream = multi_steps(optimizer, every=2)
    state, step = stream.init(p), jax.jit(stream.update)
    before = [leaf.dtype for leaf in jax.tree.leaves(state)]
    for gradient in (1.0, 2.0 + 2**-12):
        updates, state = step(jnp.full(4, gradient, jnp.float32), state, p)
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == before
    expected = jax.jit(optimizer.update)(jnp.full(4, 1.5 + 2**-13, jnp.float32), optimizer.init(p), p)[0]
    assert updates.dtype == expected.dtype == jnp.float32 and updates.tolist() == expected.tolist()


def test_one_program_that_evaluates_the_optimizer_in_a_branch() -> None:
    optimizer = multi_steps(optax.adam(0.1), every=2)
    p = jnp.zeros(8)
    state = optimizer.init(p)
    step = jax.jit(optimizer.update, donate_argnums=1)  # no two leaves may share a buffer
    text = step.lower(p, state, p).compile().as_text()
    assert " conditional(" in text
    for weight in (1, 2, 3):
        _, state = step(p, state, p, weight=weight, flush=False)
    assert step._cache_size() == 1


def test_extra_arguments_are_passed_to_the_optimizer() -> None:
    def update(updates: Any, state: Any, params: Any = None, *, value: Any, **_: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf * value, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    optimizer = multi_steps(inner, every=1)
    p = jnp.ones(1)
    assert optimizer.update(p, optimizer.init(p), p, value=3.0)[0].tolist() == [3.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": 2, "reduction": "none"}, "reduction='none'"),
        ({"every": 2, "nonfinite": "raise"}, "nonfinite='raise'"),
        ({"every": 2, "accumulator_dtype": "float99"}, "accumulator_dtype='float99'"),
    ],
    ids=str,
)
def test_invalid_options(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        multi_steps(optax.sgd(1.0), **options)


def test_a_contrastive_loss_of_the_whole_batch() -> None:
    checks.contrastive()


def test_the_memory_of_a_contrastive_loss() -> None:
    draw = np.random.default_rng(0).normal
    p = {"in": jnp.asarray(draw(size=(8, 256)) / 3), "out": jnp.asarray(draw(size=(256, 8)) / 16)}
    x, y = jnp.asarray(draw(size=(128, 8))), jnp.asarray(draw(size=(128, 8)))

    def encode(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ p["in"]) @ p["out"]

    def loss(p: Any, encoder: Any) -> Any:
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(encoder(p, x) @ encoder(p, y).T)))

    whole, ours = (
        jax.jit(jax.grad(loss), static_argnums=1)
        .lower(p, encoder)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for encoder in (encode, lambda p, x: remat_map(encode, p, x, 8))
    )
    logits = 128 * 128 * 8
    assert whole > 3 * logits and ours < 2.5 * logits + 16 * 256 * 8 * 8, (whole, ours, logits)


def test_recomputed_encodings_have_the_same_dropout() -> None:
    """The gradient equals a finite difference, which another mask would change."""
    p, x = jnp.ones(3), jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)))

    def encode(p: Any, x: Any, key: Any) -> Any:
        return jnp.tanh(x * p) * jax.random.bernoulli(key, 0.5, x.shape)

    @jax.jit
    def loss(p: Any) -> Any:
        return jnp.sum(remat_map(encode, p, x, 2, rng=jax.random.key(1)) ** 2)

    gradient = jax.jit(jax.grad(loss))(p)
    step = 1e-5 * jnp.eye(3)
    differences = [float(loss(p + e) - loss(p - e)) / 2e-5 for e in step]
    np.testing.assert_allclose(gradient, differences, rtol=1e-7)


def test_cotangents_of_bfloat16_are_summed_in_float32() -> None:
    p = jnp.ones(1, jnp.bfloat16)
    x = jnp.asarray([1.0] + [0.003] * 511, jnp.bfloat16)[:, None]
    loss = lambda p: jnp.sum(remat_map(lambda p, x: p * x, p, x, 1, layout="contiguous"))  # noqa: E731
    exact = float(np.asarray(x, np.float64).sum())
    assert abs(float(jax.jit(jax.grad(loss))(p)[0]) / exact - 1) < 2**-8
