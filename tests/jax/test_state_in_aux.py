"""A state in aux raises an error that names carry_argnum, because aux has one value per micro-batch."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.jax
jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")

import superbatch.jax  # noqa: E402
from superbatch.errors import LossSpecError  # noqa: E402

BATCH = {"x": jnp.arange(24.0).reshape(8, 3), "y": jnp.arange(8.0)}
PARAMS = {"w": jnp.ones(3)}
STATE = {"norm": {"mean": jnp.zeros(3), "var": jnp.ones(3)}}


def loss_of(p: Any, batch: Any) -> Any:
    return jnp.mean((batch["x"] @ p["w"] - batch["y"]) ** 2)


def moved(state: Any, batch: Any) -> Any:
    return jax.tree.map(lambda each: 0.9 * each + 0.1 * batch["x"].mean(0), state)


def named(p: Any, batch: Any, state: Any) -> Any:
    return loss_of(p, batch), {"batch_stats": moved(state, batch)}


def bare(p: Any, batch: Any, state: Any) -> Any:
    return loss_of(p, batch), moved(state, batch)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("fun", "message"),
    [(named, "aux holds 'batch_stats'"), (bare, "names and shapes of the argument 'state'")],
)
def test_a_state_in_aux_is_refused(fun: Any, message: str, jit: bool) -> None:
    call = superbatch.jax.value_and_grad(fun, microbatch_size=2, has_aux=True)
    with pytest.raises(LossSpecError, match=f"{message}.*carry_argnum="):
        (jax.jit(call) if jit else call)(PARAMS, BATCH, STATE)


def test_the_remedy_gives_one_state() -> None:
    options: Any = {"microbatch_size": 2, "carry_argnum": 2, "layout": "contiguous"}
    (_, state), _ = superbatch.jax.value_and_grad(bare, **options)(PARAMS, BATCH, STATE)
    expected = STATE
    for rows in range(0, 8, 2):
        expected = moved(expected, jax.tree.map(lambda each, rows=rows: each[rows : rows + 2], BATCH))
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b), state, expected))


def test_metrics_in_aux_stay(recwarn: pytest.WarningsRecorder) -> None:
    def metrics(p: Any, batch: Any, scale: Any) -> Any:
        return loss_of(p, batch), {"predictions": batch["x"] @ p["w"], "scale": scale["by"]}

    call = superbatch.jax.value_and_grad(metrics, microbatch_size=2, has_aux=True)
    (_, aux), _ = call(PARAMS, BATCH, {"by": jnp.ones(())})
    assert aux["predictions"].shape == (4, 2) and aux["scale"].shape == (4,)
