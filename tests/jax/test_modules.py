# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Modules of Equinox and flax.nnx raise an error, and are exact with the code in that error."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
pytest.importorskip("optax", reason="optax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from superbatch import CoupledSamplesError, InputError  # noqa: E402
from superbatch.jax import value_and_grad  # noqa: E402
from tests.jax import checks  # noqa: E402
from tests.jax.helpers import assert_same, rows  # noqa: E402

pytestmark = pytest.mark.jax
LINES = r"no gradient.*eqx\.partition\(model, eqx\.is_inexact_array\), and model = eqx\.combine\(params, rest"


def error_of(outputs: Any, batch: Any) -> Any:
    return jnp.mean((outputs[:, 0] - batch["y"]) ** 2)


def wide(model: Any) -> Any:
    """Return the module in float64."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64) if hasattr(leaf, "astype") else leaf, model)


@pytest.fixture
def eqx() -> Any:
    return pytest.importorskip("equinox", reason="equinox is not installed")


def test_a_module_of_equinox(eqx: Any) -> None:
    """Its activation functions are leaves too, so `jax.value_and_grad` refuses it as well."""
    model, batch = wide(eqx.nn.MLP(3, 1, 8, 2, key=jax.random.key(0))), rows(11)

    def loss(model: Any, batch: Any) -> Any:
        return error_of(jax.vmap(model)(batch["x"]), batch)

    with pytest.raises(InputError, match=LINES):
        value_and_grad(loss, microbatch_size=4)(model, batch)
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def partitioned_loss(params: Any, batch: Any) -> Any:
        return loss(eqx.combine(params, rest), batch)

    expected, gradient = eqx.filter_value_and_grad(loss)(model, batch)
    for jit in (jax.jit, eqx.filter_jit):
        got = jit(value_and_grad(partitioned_loss, microbatch_size=4))(params, batch)
        assert_same(got, (expected, gradient))


def test_a_module_of_arrays_only_is_accepted(eqx: Any) -> None:
    model, batch = wide(eqx.nn.Linear(3, 1, key=jax.random.key(0))), rows(11)

    def loss(model: Any, batch: Any) -> Any:
        return error_of(jax.vmap(model)(batch["x"]), batch)

    got = jax.jit(value_and_grad(loss, microbatch_size=4))(model, batch)
    assert_same(got, checks.whole(loss, model, batch))


def test_dropout_of_equinox(eqx: Any) -> None:
    one, two = jax.random.split(jax.random.key(0))
    layers = [eqx.nn.Linear(3, 8, key=one), eqx.nn.Dropout(0.5), eqx.nn.Linear(8, 1, key=two)]
    model, batch = wide(eqx.nn.Sequential(layers)), rows(11)

    def loss(model: Any, batch: Any, key: Any) -> Any:
        keys = jax.random.split(key, len(batch["y"]))
        outputs = jax.vmap(lambda x, key: model(x, key=key))(batch["x"], keys)
        return error_of(outputs, batch)

    options: Any = {"microbatch_size": 4, "rng_argnum": 2, "layout": "contiguous"}
    with pytest.raises(InputError, match=LINES):
        value_and_grad(loss, **options)(model, batch, jax.random.key(1))
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    call = value_and_grad(lambda p, batch, key: loss(eqx.combine(p, rest), batch, key), **options)

    def by_hand(p: Any) -> Any:
        whole = eqx.combine(p, rest)
        parts = checks.microbatches(batch, 4)
        keys = [jax.random.fold_in(jax.random.key(1), i) for i in range(len(parts))]
        return sum(len(b["y"]) * loss(whole, b, key) for b, key in zip(parts, keys, strict=True)) / 11

    assert_same(jax.jit(call)(params, batch, jax.random.key(1)), jax.jit(jax.value_and_grad(by_hand))(params))


def test_batch_statistics_of_equinox(eqx: Any) -> None:
    """BatchNorm couples samples; with check=False each micro-batch passes its state to the next."""

    class Model(eqx.Module):
        norm: Any
        last: Any

        def __init__(self) -> None:
            self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="ema", dtype=jnp.float64)
            self.last = eqx.nn.Linear(3, 1, key=jax.random.key(0))

        def __call__(self, x: Any, state: Any) -> Any:
            x, state = self.norm(x, state)
            return self.last(x), state

    model, state = eqx.nn.make_with_state(Model)()
    params, rest = eqx.partition(wide(model), eqx.is_inexact_array)

    def loss(params: Any, batch: Any, state: Any) -> Any:
        each = jax.vmap(eqx.combine(params, rest), axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        outputs, state = each(batch["x"], state)
        return error_of(outputs, batch), state

    options: Any = {"microbatch_size": 4, "carry_argnum": 2, "layout": "contiguous"}
    batch = rows(12)
    with pytest.raises(CoupledSamplesError, match=r"pmean under jax\.vmap"):
        value_and_grad(loss, **options)(params, batch, state)
    (_, after), _ = jax.jit(value_and_grad(loss, check=False, **options))(params, batch, state)
    expected = state
    for part in checks.microbatches(batch, 4):
        _, expected = loss(params, part, expected)
    for got, right in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-12)


def test_batch_statistics_of_nnx() -> None:
    """Statistics are float leaves like parameters; an optimizer would update them by their gradient."""
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.norm = nnx.BatchNorm(3, rngs=rngs, momentum=0.5)
            self.last = nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(self.norm(x))

    def loss(model: Any, batch: Any) -> Any:
        return error_of(model(batch["x"].astype(jnp.float32)), batch)

    model, batch = Model(nnx.Rngs(0)), rows(12)
    with pytest.raises(
        InputError, match=r"0\.norm\.mean is a BatchStat.*nnx\.split\(model, nnx\.Param, \.\.\.\)"
    ):
        value_and_grad(loss, microbatch_size=4, check=False)(model, batch)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def partitioned_loss(params: Any, batch: Any, rest: Any) -> Any:
        model = nnx.merge(graphdef, params, rest, copy=True)
        found = loss(model, batch)
        return found, nnx.split(model, nnx.Param, ...)[2]

    options: Any = {"microbatch_size": 4, "carry_argnum": 2, "layout": "contiguous", "check": False}
    (_, after), gradient = jax.jit(value_and_grad(partitioned_loss, **options))(params, batch, rest)
    expected = rest
    for part in checks.microbatches(batch, 4):
        _, expected = partitioned_loss(params, part, expected)
    for got, right in zip(jax.tree.leaves(after), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-6)
        assert not np.allclose(right, 0) and not np.allclose(right, 1), "the premise: statistics moved"
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
