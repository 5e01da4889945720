# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""`superbatch.jax.MultiSteps` against `optax.MultiSteps`: the same updates, and those that Optax gets wrong.

The cases are those of Optax's own tests, which also run unchanged against superbatch (slow).
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
optax = pytest.importorskip("optax", reason="optax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402

from superbatch import InputError  # noqa: E402
from superbatch.jax import MultiSteps, MultiStepsState, has_updated, multi_steps  # noqa: E402
from tests.jax.helpers import assert_same, mse, params, rows  # noqa: E402

pytestmark = pytest.mark.jax

THEIRS = """
import optax
from absl.testing import absltest
from optax.transforms import _accumulation
import superbatch.jax
_accumulation.MultiSteps = superbatch.jax.MultiSteps
from optax.transforms import _accumulation_test
absltest.main(module=_accumulation_test)
"""


def train(optimizer: Any, count: int, **options: Any) -> tuple[list[Any], list[bool], Any]:
    """Return parameters and `has_updated` after each micro-batch of 4 rows, and the last state."""
    p, batch = params(), rows(4 * count)
    state, step, gradient_of = optimizer.init(p), jax.jit(optimizer.update), jax.jit(jax.grad(mse))
    seen: list[Any] = []
    updated: list[bool] = []
    for number in range(count):
        part = jax.tree.map(lambda leaf, i=number: leaf[4 * i : 4 * i + 4], batch)
        updates, state = step(gradient_of(p, part), state, p, **options)
        p = optax.apply_updates(p, updates)
        seen.append(p)
        updated.append(bool(getattr(optimizer, "has_updated", has_updated)(state)))
    return seen, updated, state


def adam() -> Any:
    return optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.01), optax.scale(-0.1))


def growing(updates: Any) -> Any:
    return jnp.where(updates < 2, 1, 3)


SAME: dict[str, dict[str, Any]] = {
    "every 4": {"every_k_schedule": 4},
    "a schedule": {"every_k_schedule": growing},
    "sums": {"every_k_schedule": 3, "use_grad_mean": False},
    "large ones skipped": {
        "every_k_schedule": 2,
        "should_skip_update_fn": partial(optax.skip_large_updates, max_squared_norm=12.0),
    },
    "none skipped": {"every_k_schedule": 2, "should_skip_update_fn": optax.skip_not_finite},
}


@pytest.mark.parametrize("case", SAME)
def test_the_updates_equal_those_of_optax(case: str) -> None:
    """Compare in float64, which Optax needs as an option; every name of the state agrees too."""
    options = SAME[case] | {"accumulator_dtype": jnp.float64}
    theirs, their_updated, their_state = train(optax.MultiSteps(adam(), **options), 12)
    ours, updated, state = train(MultiSteps(adam(), **options), 12)
    assert_same(ours, theirs)
    if case == "large ones skipped":
        skipped = int(state.skipped)
        assert 0 < skipped < 9, "the premise: some are skipped"
        assert updated != their_updated, "the premise: Optax reports an update again after a skipped one"
    else:
        assert updated == their_updated
    assert 1 < sum(updated) < 12
    assert int(state.mini_step) == int(their_state.mini_step)
    assert int(state.gradient_step) == int(their_state.gradient_step) == sum(updated)
    assert jax.tree.structure(state.skip_state) == jax.tree.structure(their_state.skip_state)
    assert_same(state.inner_opt_state[0].mu, their_state.inner_opt_state[0].mu)


@pytest.mark.parametrize("mean", [True, False])
def test_the_gradient_within_a_window(mean: bool) -> None:
    """Compare `acc_grads` in the middle of a window."""
    options: Any = {"use_grad_mean": mean, "accumulator_dtype": jnp.float64}
    states = [train(make(adam(), 4, **options), 7)[2] for make in (MultiSteps, optax.MultiSteps)]
    assert int(states[0].mini_step) == 3, "the premise: the window is open"
    assert_same(states[0].acc_grads, states[1].acc_grads)


def test_a_divided_sum_is_found() -> None:
    """The mutant: `reduction="sum"` divides by the weights, unlike "total"."""
    options: Any = {"use_grad_mean": False, "accumulator_dtype": jnp.float64}
    theirs = train(optax.MultiSteps(optax.sgd(0.1), 3, **options), 3)[0]
    assert_same(train(MultiSteps(optax.sgd(0.1), 3, **options), 3)[0], theirs)
    wrong = multi_steps(optax.sgd(0.1), 3, reduction="sum")
    with pytest.raises(AssertionError, match="e-0"):
        assert_same(train(wrong, 3)[0][-1], theirs[-1])


def stream(optimizer: Any, gradients: list[float], **options: Any) -> tuple[list[float], list[bool], Any]:
    """Feed scalar gradients; return the update and `has_updated` of each call, and the last state."""
    p = jnp.zeros(1)
    state, seen, updated = optimizer.init(p), [], []
    step = jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = step(jnp.full(1, gradient), state, p, **options)
        seen.append(updates[0].item())
        updated.append(bool(optimizer.has_updated(state)))
    return seen, updated, state


def test_a_rejected_microbatch_has_no_effect() -> None:
    optimizer = MultiSteps(optax.sgd(1.0), 2, should_skip_update_fn=optax.skip_not_finite)
    seen, updated, state = stream(optimizer, [1.0, jnp.inf, 3.0, jnp.nan, 5.0])
    assert seen == [0.0, 0.0, -2.0, 0.0, 0.0]
    assert updated == [False, False, True, False, False]
    assert (int(state.skipped), int(state.mini_step), float(state.acc_grads[0])) == (2, 1, 5.0)
    assert int(state.skip_state["num_not_finite"]) == 0, "of the last micro-batch"


def test_has_updated_is_false_after_a_rejected_microbatch() -> None:
    options: Any = {"every_k_schedule": 1, "should_skip_update_fn": optax.skip_not_finite}
    assert stream(MultiSteps(optax.sgd(1.0), **options), [1.0, jnp.nan])[1] == [True, False]
    theirs = stream(optax.MultiSteps(optax.sgd(1.0), **options), [1.0, jnp.nan])[1]
    assert theirs == [True, True], "the premise: Optax reports an update although parameters are unchanged"


def test_skipping_by_norm() -> None:
    skip = partial(optax.skip_large_updates, max_squared_norm=10.0)
    seen, _, state = stream(MultiSteps(optax.sgd(1.0), 2, should_skip_update_fn=skip), [1.0, 4.0, 3.0])
    assert seen == [0.0, 0.0, -2.0]
    assert (float(state.skip_state["norm_squared"]), int(state.skipped)) == (9.0, 1)


def test_a_limit_that_depends_on_updates_and_parameters() -> None:
    def skip(updates: Any, count: Any, params: Any) -> tuple[Any, Any]:
        assert params is not None
        return updates[0] > 10.0 / (1 + count), {"limit": 10.0 / (1 + count)}

    optimizer = MultiSteps(optax.sgd(1.0), 1, should_skip_update_fn=skip)
    seen, _, state = stream(optimizer, [9.0, 9.0, 4.0])
    assert seen == [-9.0, 0.0, -4.0] and float(state.skip_state["limit"]) == 5.0


def test_a_rejected_tail_is_flushed_without_itself() -> None:
    optimizer = MultiSteps(optax.sgd(1.0), 4, should_skip_update_fn=optax.skip_not_finite)
    p = jnp.zeros(1)
    state = optimizer.init(p)
    _, state = optimizer.update(jnp.ones(1), state, p, weight=2)
    updates, state = optimizer.update(jnp.full(1, jnp.nan), state, p, weight=2, flush=True)
    assert updates.tolist() == [-1.0] and bool(has_updated(state)) and int(state.mini_step) == 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (True, "returned bool. Return \\(skip, state\\)"),
        ((jnp.zeros(2, bool), ()), "returned \\(bool of shape \\(2,\\), state\\)"),
        ((jnp.zeros(()), ()), "returned \\(float.. of shape \\(\\), state\\)"),
    ],
    ids=["no pair", "a vector", "a number"],
)
def test_a_skip_function_that_returns_no_boolean(answer: Any, message: str) -> None:
    optimizer = MultiSteps(optax.sgd(1.0), 2, should_skip_update_fn=lambda *_: answer)
    with pytest.raises(InputError, match=message):
        optimizer.init(jnp.zeros(1))


def test_weights_and_recovery_from_nan_unlike_in_optax() -> None:
    """The names are Optax's, the arithmetic is superbatch's."""
    p = jnp.zeros(1)
    for weights, expected in (((1, 3), -1.75), ((2, 2), -1.5)):
        optimizer = MultiSteps(optax.sgd(1.0), 2)
        state = optimizer.init(p)
        updates = p
        for gradient, weight in zip((1.0, 2.0), weights, strict=True):
            updates, state = optimizer.update(jnp.full(1, gradient), state, p, weight=weight)
        assert updates.tolist() == [expected]
    gradients = [jnp.nan, 1.0, 1.0, 3.0]
    assert stream(MultiSteps(optax.sgd(1.0), 2), gradients)[0][2:] == [0.0, -2.0]
    assert np.isnan(stream(optax.MultiSteps(optax.sgd(1.0), 2), gradients)[0][3]), "the premise"


@pytest.mark.parametrize("updates_dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("mu_dtype", [None, jnp.float32])
def test_dtypes_are_those_of_the_optimizer(dtype: Any, updates_dtype: Any, mu_dtype: Any) -> None:
    p, gradient = jnp.ones(3, dtype), jnp.ones(3, updates_dtype)
    optimizer = optax.adam(0.1, mu_dtype=mu_dtype)
    stream = MultiSteps(optimizer, 2)
    state: Any = stream.init(p)
    kinds = [leaf.dtype for leaf in jax.tree.leaves(state)]
    updates = gradient
    for _ in range(3):
        updates, state = stream.update(gradient, state, p)
    assert updates.dtype == optimizer.update(gradient, optimizer.init(p), p)[0].dtype
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == kinds
    assert state.acc_grads.dtype == jnp.float32


def test_the_state_keeps_its_form_in_a_scan() -> None:
    """The state of `should_skip_update_fn` has the dtype of low-precision gradients."""
    skip = partial(optax.skip_large_updates, max_squared_norm=1e3)
    optimizer = MultiSteps(optax.sgd(1.0), 2, should_skip_update_fn=skip)
    p = jnp.zeros((), jnp.bfloat16)

    def step(state: Any, gradient: Any) -> Any:
        updates, state = optimizer.update(gradient, state, p)
        return state, updates

    gradients = jnp.arange(4, dtype=jnp.float32)
    state, updates = jax.lax.scan(step, optimizer.init(p), gradients)
    assert updates.tolist() == [0.0, -0.5, 0.0, -2.5]
    assert isinstance(state, MultiStepsState) and state.skip_state["norm_squared"].dtype == jnp.bfloat16


def test_a_donated_state() -> None:
    optimizer = MultiSteps(optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite)
    p = jnp.ones(3)
    state, step = optimizer.init(p), jax.jit(optimizer.update, donate_argnums=1)
    for _ in range(3):
        _, state = step(p, state, p)
    assert int(state.gradient_step) == 1


def test_multi_steps_composes_with_other_transformations() -> None:
    """Use it in a chain, with a mask and around `zero_nans`."""
    inner = optax.chain(optax.zero_nans(), optax.sgd(1.0))
    optimizer = optax.chain(optax.scale(2.0), MultiSteps(inner, 2).gradient_transformation())
    p = {"a": jnp.zeros(())}
    state: Any = optimizer.init(p)
    for gradient in (1.0, 3.0):
        updates, state = optimizer.update({"a": jnp.asarray(gradient)}, state, p)
    assert float(updates["a"]) == -4.0
    assert MultiSteps(inner, 2).inner_opt.init(p) is not None


def test_a_traced_number_of_microbatches_per_window() -> None:
    """One program serves every number."""
    p, gradients = jnp.zeros(()), jnp.arange(1.0, 7.0)
    traces: list[int] = []

    @jax.jit
    def run(every: Any) -> Any:
        traces.append(1)
        optimizer = multi_steps(optax.sgd(1.0), every)

        def step(state: Any, gradient: Any) -> Any:
            updates, state = optimizer.update(gradient, state, p)
            return state, updates

        return jax.lax.scan(step, optimizer.init(p), gradients)[1]

    expected = {2: [0, -1.5, 0, -3.5, 0, -5.5], 3: [0, 0, -2, 0, 0, -5], 1: [-1, -2, -3, -4, -5, -6]}
    for every, updates in expected.items():
        assert run(jnp.asarray(every)).tolist() == updates
    assert len(traces) == 1
    with pytest.raises(InputError, match="every="):
        multi_steps(optax.sgd(1.0), jnp.ones(2, int))


@pytest.mark.slow  # takes minutes: flax's layers are compiled for each pair of dtypes
def test_optax_s_own_tests_pass_unchanged() -> None:
    pytest.importorskip("absl.testing", reason="Optax's tests need absl")
    pytest.importorskip("flax", reason="Optax's tests need flax")
    pytest.importorskip("optax.transforms._accumulation_test", reason="this wheel of Optax has no tests")
    done = subprocess.run(
        [sys.executable, "-c", THEIRS], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Ran 12 tests" in done.stderr
