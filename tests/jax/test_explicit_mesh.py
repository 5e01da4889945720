# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""A batch sharded over an explicit mesh, whose axes belong to the types of arrays.

These tests only trace, on a mesh without devices. `tests.jax.sharded` computes on four devices.
"""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
pytest.importorskip("optax", reason="optax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import AbstractMesh, AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from superbatch import SplitError  # noqa: E402
from superbatch.jax import per_sample_value_and_grad, value_and_grad  # noqa: E402
from tests.jax.helpers import mse, params, rows  # noqa: E402

pytestmark = pytest.mark.jax


def traced(call: Any) -> Any:
    """Return the shapes of the result for 32 rows on four devices."""
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Explicit,))

    def sharded(leaf: Any) -> Any:
        sharding = NamedSharding(mesh, P("data", *[None] * (leaf.ndim - 1)))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    given = params(), jax.tree.map(sharded, rows(32))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.eval_shape(call, *given)


def test_rows_that_stay_on_their_devices() -> None:
    loss, gradient = traced(value_and_grad(mse, microbatch_size=8, check=False))
    assert loss.shape == () and gradient["w"].shape == (3, 5)
    each, total = traced(per_sample_value_and_grad(mse, microbatch_size=8, max_grad_norm=1.0))
    assert each.norm.shape == (32,) and total["w"].dtype == jnp.float64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 4, "layout": "contiguous"}, r'over \'data\' of an explicit mesh.*Pass layout="strided"'),
        ({"microbatch_size": 5}, r"Micro-batches of 5 rows do not divide 32 rows.*multiple of 4 and divides"),
        ({"microbatch_size": 2}, r"Micro-batches of 2 rows.*jax\.sharding\.reshard\(batch, jax\.P\(\)\)"),
    ],
)
def test_rows_that_would_change_devices_are_refused(options: Any, message: str) -> None:
    """Without this error JAX raises a ShardingTypeError inside the loop."""
    with pytest.raises(SplitError, match=message):
        traced(value_and_grad(mse, check=False, **options))


def test_per_sample_gradients_with_a_tail_are_refused() -> None:
    with pytest.raises(SplitError, match="Micro-batches of 5 rows do not divide 32 rows"):
        traced(per_sample_value_and_grad(mse, microbatch_size=5))
