# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Derivatives of the gradient in micro-batches: meta-learning and Hessian-vector products."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
pytest.importorskip("optax", reason="optax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402

from superbatch.jax import value_and_grad  # noqa: E402
from tests.jax import checks  # noqa: E402
from tests.jax.helpers import assert_same, count_tokens, mse, params, rows, texts, token_mean  # noqa: E402

pytestmark = pytest.mark.jax
CONTIGUOUS: Any = {"microbatch_size": 2, "layout": "contiguous"}
TEXTS_OF = [4, 1, 0, 0, 3, 2, 1]  # the second micro-batch has no token


def after_an_update(call: Any, batch: Any, test: Any) -> Any:
    """Outer loss of MAML: the loss after one update, plus the loss before it; with its gradient."""

    def outer(p: Any) -> Any:
        loss, gradient = call(p, batch)
        return mse(jax.tree.map(lambda leaf, slope: leaf - 0.1 * slope, p, gradient), test) + 0.1 * loss

    return jax.jit(jax.value_and_grad(outer))(params())


def test_a_mean_over_tokens_with_an_empty_microbatch() -> None:
    batch = texts(TEXTS_OF)
    empty = jax.tree.map(lambda leaf: leaf[2:4], batch)
    assert jnp.isnan(token_mean(params(), empty)), "the premise: there is no token"
    call = value_and_grad(token_mean, weight=count_tokens, **CONTIGUOUS)
    expected = after_an_update(jax.value_and_grad(token_mean), batch, rows(5))
    assert_same(after_an_update(call, batch, rows(5)), expected)

    def hessian_vector_product(of: Any) -> Any:
        """Forward over reverse."""
        return jax.jvp(lambda p: of(p, batch)[1], (params(),), (params(),))[1]

    assert_same(
        jax.jit(lambda: hessian_vector_product(call))(),
        hessian_vector_product(jax.value_and_grad(token_mean)),
    )


def test_several_losses_with_an_empty_microbatch() -> None:
    batch = texts(TEXTS_OF)
    weight = {"tokens": count_tokens, "rows": None}
    call = value_and_grad(checks.two_terms, weight=weight, **CONTIGUOUS)
    expected = after_an_update(jax.value_and_grad(checks.sum_of_terms), batch, rows(5))
    assert_same(after_an_update(call, batch, rows(5)), expected)


def test_a_number_of_real_microbatches() -> None:
    """A number known at tracing gives a scan of fixed length; a traced number has no second derivative."""
    batch = rows(16)
    first = jax.tree.map(lambda leaf: leaf[:6], batch)
    expected = after_an_update(jax.value_and_grad(mse), first, rows(5))
    call = value_and_grad(mse, num_real_microbatches=3, **CONTIGUOUS)
    assert_same(after_an_update(call, batch, rows(5)), expected)

    def traced_number(real: Any) -> Any:
        call = value_and_grad(mse, num_real_microbatches=real, check=False, **CONTIGUOUS)
        return jax.grad(lambda p: call(p, batch)[1]["w"].sum())(params())

    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.jit(traced_number)(3)
