# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Cases of Optax's tests of microbatching, for gradients: the same results, and cases that Optax gets wrong.

Other files test `in_axes`, names and positions (test_in_axes), a traced number of micro-batches
(test_real_microbatches), `micro_grad` and `micro_vmap` (test_per_sample).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
microbatching = pytest.importorskip("optax.microbatching", reason="optax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402

from superbatch import CoupledSamplesError  # noqa: E402
from superbatch.jax import value_and_grad  # noqa: E402
from tests.jax.helpers import assert_same  # noqa: E402

pytestmark = pytest.mark.jax


def arrays(dtype: Any = np.float64) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(0).normal
    return tuple(jnp.asarray(draw(size=shape), dtype) for shape in ((), (10, 3), (10, 3)))


def of_rows(p: Any, x: Any, y: Any) -> Any:
    return x * y, x / y * p


def mean(p: Any, x: Any, y: Any) -> tuple[Any, Any]:
    return jnp.mean(jnp.tanh(p * x) + y**2), of_rows(p, x, y)


def total(p: Any, x: Any, y: Any) -> tuple[Any, Any]:
    return jnp.sum(jnp.tanh(p + x) + 2 * y), of_rows(p, x, y)


@pytest.mark.parametrize("microbatch_size", [1, 2, 5, 10, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_reduction_and_values_per_row_in_one_call(reduction: Any, microbatch_size: int) -> None:
    """Optax's accumulators MEAN, SUM and CONCAT in one call; in Optax 3 must divide the 10 rows."""
    p, x, y = arrays()
    fun = mean if reduction == "mean" else total
    options: Any = {"has_aux": True, "aux": "concat", "batch_argnums": (1, 2), "reduction": reduction}
    (loss, aux), gradient = jax.jit(value_and_grad(fun, microbatch_size=microbatch_size, **options))(p, x, y)
    (whole, rows), slope = jax.jit(jax.value_and_grad(fun, has_aux=True))(p, x, y)
    share = 1 if reduction == "mean" else 1 / 10  # a sum is divided by the total weight
    assert_same((loss, gradient), (whole * share, slope * share))
    assert_same(aux, rows)


def test_optax_needs_a_divisible_batch() -> None:
    """Premise of the micro-batches of 3 above."""
    p, x, y = arrays()
    theirs = microbatching.microbatch(partial(total, p), argnums=(0, 1), microbatch_size=3)
    with pytest.raises(ValueError, match="divisible"):
        theirs(x, y)


def test_coupled_rows_are_an_error() -> None:
    """Optax returns another number, which depends on the grouping of rows."""

    def fun(p: Any, x: Any) -> Any:
        return p * (x[:-1] @ x[1:])

    x = jnp.arange(6.0) + 1
    theirs = microbatching.microbatch(partial(fun, 1.0), argnums=0, microbatch_size=3)
    assert float(theirs(x)) != float(fun(1.0, x)), "the premise: the sum over micro-batches is different"
    with pytest.raises(CoupledSamplesError, match="No weight explains the loss"):
        value_and_grad(fun, microbatch_size=3, reduction="sum")(1.0, x)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_dtypes_are_those_of_the_parameters(dtype: Any) -> None:
    p, x, y = arrays(dtype)
    call = value_and_grad(lambda p, x, y: mean(p, x, y)[0], microbatch_size=2, batch_argnums=(1, 2))
    loss, gradient = jax.jit(call)(p, x, y)
    assert loss.dtype == gradient.dtype == dtype
    wide = jax.grad(lambda p, x, y: mean(p, x, y)[0])(*(leaf.astype(jnp.float64) for leaf in (p, x, y)))
    assert abs(float(gradient) - float(wide)) < 4 * float(jnp.finfo(dtype).eps) * abs(float(wide)) + 1e-3


def test_rows_of_padding_are_zeros_in_aux() -> None:
    x = jnp.arange(12.0) + 1
    options: Any = {"has_aux": True, "aux": "concat", "layout": "contiguous"}
    options |= {"microbatch_size": 3, "num_real_microbatches": 2}
    call = value_and_grad(lambda p, x: (p * x.mean(), x), **options)
    (loss, aux), _ = call(1.0, x)
    assert float(loss) == 3.5 and aux.tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0]


def test_unequal_weights_unlike_in_optax() -> None:
    """MEAN and RUNNING_MEAN are means of means; superbatch weights a micro-batch by its tokens."""
    mask = (jnp.arange(4) < jnp.array([[4], [4], [1], [1]])).astype(float)
    x, p = jnp.arange(16.0).reshape(4, 4), jnp.asarray(0.5)

    def fun(p: Any, x: Any, mask: Any) -> Any:
        return (p * x * mask).sum() / mask.sum()

    whole = jax.grad(fun)(p, x, mask)
    for kind in (microbatching.AccumulationType.MEAN, microbatching.AccumulationType.RUNNING_MEAN):
        options: Any = {"argnums": (1, 2), "microbatch_size": 1, "accumulator": kind}
        assert abs(float(microbatching.microbatch(jax.grad(fun), **options)(p, x, mask) - whole)) > 0.1
    options = {"batch_argnums": (1, 2), "weight": lambda x, mask: mask.sum()}
    assert_same(value_and_grad(fun, microbatch_size=1, **options)(p, x, mask)[1], whole)
