# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Structure of a returned state, and mesh axes other than that of the batch."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
pytest.importorskip("optax", reason="optax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from superbatch import InputError, LossSpecError  # noqa: E402
from superbatch.jax import value_and_grad  # noqa: E402
from tests.jax.helpers import assert_same, mse, params, rows  # noqa: E402

pytestmark = pytest.mark.jax
AUTO = jax.sharding.AxisType.Auto
SPECS = {"w": P(None, "model"), "b": P("model"), "v": P("model")}


def with_state(new: Any) -> Any:
    return lambda p, batch, state: (mse(p, batch), new(state))


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (
            lambda state: {"m": state["m"].astype("float64")},
            r"returns state\['m'\] as float64 .*, but was given float32 .*astype\('float32'\)",
        ),
        (lambda state: {"m": state["m"][:2]}, r"of shape \(2,\), but was given float32 of shape \(3,\)"),
        (lambda state: {**state, "n": 1.0}, "Return the same structure"),
    ],
    ids=["dtype", "shape", "names"],
)
def test_a_state_of_another_structure_is_refused(new: Any, message: str) -> None:
    call = jax.jit(value_and_grad(with_state(new), microbatch_size=4, carry_argnum=2, check=False))
    state = {"m": jnp.zeros(3, "float32")}
    with pytest.raises(LossSpecError, match=message):
        call(params(), rows(12), state)
    call(params(), rows(4), state)  # one micro-batch: no other receives the state


@pytest.mark.parametrize("real", [None, 3])
def test_parameters_sharded_over_a_model_axis(real: int | None) -> None:
    """Gradients differ along the model axis, over which the batch is not sharded."""
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AUTO, AUTO))

    def loss_of_shard(p: Any, batch: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ p["w"] + p["b"]) @ p["v"]
        return jnp.mean((jax.lax.psum(hidden, "model") - batch["y"]) ** 2)

    options: Any = {"layout": "contiguous", "num_real_microbatches": real, "axis_name": "data"}
    call = value_and_grad(loss_of_shard, microbatch_size=4, **options)
    mapped = jax.shard_map(call, mesh=mesh, in_specs=(SPECS, P("data")), out_specs=(P(), SPECS))
    p, batch = params(), rows(12)
    assert_same(jax.jit(mapped)(p, batch), jax.jit(jax.value_and_grad(mse))(p, batch))


def test_parameters_that_the_user_marks_as_varying() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AUTO,))

    def by_hand(p: Any, batch: Any) -> Any:
        p = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, ("data",), to="varying"), p)
        return jax.lax.pmean(value_and_grad(mse, microbatch_size=4)(p, batch), "data")

    mapped = jax.shard_map(by_hand, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    p, batch = params(), rows(10)
    assert_same(jax.jit(mapped)(p, batch), jax.jit(jax.value_and_grad(mse))(p, batch))


def test_a_state_that_the_function_averages_over_devices() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AUTO,))
    averaged = with_state(lambda state: jax.lax.pmean(state + 1, "data"))
    call = value_and_grad(averaged, microbatch_size=4, axis_name="data", carry_argnum=2)
    specs: Any = {"in_specs": (P(), P("data"), P()), "out_specs": ((P(), P("data")), P())}
    p, batch = params(), rows(12)
    (loss, state), gradient = jax.jit(jax.shard_map(call, mesh=mesh, **specs))(p, batch, jnp.zeros(1))
    assert_same((loss, gradient), jax.jit(jax.value_and_grad(mse))(p, batch))
    assert state.tolist() == [3.0]


def test_an_unknown_axis() -> None:
    with pytest.raises(
        InputError, match=r"axis_name='dta', but no axis 'dta' is bound .*leave axis_name out"
    ):
        jax.jit(value_and_grad(mse, microbatch_size=4, axis_name="dta"))(params(), rows(8))
