# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""`in_axes`: rows along any axis, per argument (as in Optax's microbatching) or per leaf."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402

from superbatch import InputError, LossSpecError, SplitError  # noqa: E402
from superbatch.jax import value_and_grad  # noqa: E402
from tests.jax.helpers import assert_same, params, texts, token_mean  # noqa: E402

pytestmark = pytest.mark.jax

TIME_FIRST: dict[str, int] = {"x": 1, "y": -1, "mask": 1}


def time_first(batch: Any) -> Any:
    """Return the texts in the layout of recurrent networks: [time, text, ...]."""
    return {name: jnp.swapaxes(leaf, 0, 1) for name, leaf in batch.items()}


def loss_of_columns(p: Any, batch: Any) -> Any:
    """The same mean over tokens, with a recursion over time that detects misplaced rows."""

    def step(hidden: Any, now: Any) -> Any:
        hidden = jnp.tanh(now["x"] @ p["w"] + 0.5 * hidden + p["b"])
        return hidden, ((hidden @ p["v"] - now["y"]) ** 2 * now["mask"]).sum()

    start = jnp.zeros((batch["x"].shape[1], 5))
    return jax.lax.scan(step, start, batch)[1].sum() / batch["mask"].sum()


def whole(fun: Any, p: Any, *batch: Any) -> Any:
    return jax.jit(jax.value_and_grad(fun))(p, *batch)


@pytest.mark.parametrize("layout", ["strided", "contiguous"])
@pytest.mark.parametrize("in_axes", [1, (1,), (TIME_FIRST,)], ids=["all", "argument", "leaf"])
def test_texts_in_columns(layout: Any, in_axes: Any) -> None:
    """7 texts of 4 steps in micro-batches of 2 and a tail of 1, in jit and outside."""
    p, batch = params(), time_first(texts([4, 1, 3, 2, 2, 1, 4]))
    assert batch["x"].shape[:2] == (4, 7), "the premise: time comes first"
    options: Any = {"microbatch_size": 2, "weight": lambda batch: batch["mask"].sum(), "layout": layout}
    call = value_and_grad(loss_of_columns, in_axes=in_axes, **options)
    assert_same(jax.jit(call)(p, batch), whole(loss_of_columns, p, batch))
    assert_same(call(p, batch), whole(loss_of_columns, p, batch), 1e-11)


def test_the_wrong_axis_is_found() -> None:
    """The mutant splits along time, so the recursion restarts in each micro-batch."""
    p, batch = params(), time_first(texts([4] * 7))
    call = value_and_grad(loss_of_columns, microbatch_size=2, check=False)
    with pytest.raises(AssertionError):
        assert_same(jax.jit(call)(p, batch), whole(loss_of_columns, p, batch))


def test_the_order_of_positions_and_names() -> None:
    """Entries belong to batch_argnums first, then to batch_argnames, in any order of the call."""

    def fun(p: Any, a: Any, b: Any) -> Any:
        return jnp.mean((jnp.tanh(jnp.einsum("bi,jb->bij", a, b)) * p) ** 2)

    p, draw = jnp.asarray(0.7), np.random.default_rng(0).normal
    a, b = jnp.asarray(draw(size=(10, 4))), jnp.asarray(draw(size=(5, 10)))
    expected = whole(fun, p, a, b)
    ways: list[tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = [
        ({"batch_argnums": (1, 2), "in_axes": (0, 1)}, (a, b), {}),
        ({"batch_argnums": (2, 1), "in_axes": (1, 0)}, (a, b), {}),
        ({"batch_argnums": (), "batch_argnames": ("a", "b"), "in_axes": (0, 1)}, (), {"b": b, "a": a}),
        ({"batch_argnums": (), "batch_argnames": ("b", "a"), "in_axes": (1, 0)}, (), {"a": a, "b": b}),
        ({"batch_argnums": 1, "batch_argnames": "b", "in_axes": (0, -1)}, (a,), {"b": b}),
    ]
    for options, positional, named in ways:
        call = value_and_grad(fun, microbatch_size=4, **options)
        assert_same(jax.jit(call)(p, *positional, **named), expected)


def test_none_passes_an_argument_unsplit() -> None:
    def fun(p: Any, batch: Any) -> Any:
        return jnp.mean((jnp.tanh(batch["table"][batch["ids"]] @ p["w"] + p["b"]) @ p["v"]) ** 2)

    p = params()
    batch = {"ids": jnp.arange(6) % 3, "table": jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)))}
    call = value_and_grad(fun, microbatch_size=2, in_axes=({"ids": 0, "table": None},))
    assert_same(jax.jit(call)(p, batch), whole(fun, p, batch))
    with pytest.raises(LossSpecError, match="Pass unsplit="):
        value_and_grad(fun, microbatch_size=2)(p, batch)


def test_keys_and_aux_along_other_axes() -> None:
    """Images with the batch axis last and one key per image give aux in the order of the batch."""

    def fun(p: Any, batch: Any) -> Any:
        noise = jax.vmap(jax.random.normal)(batch["keys"][0])
        rows = jnp.tanh(jnp.einsum("hwb,hw->b", batch["x"], p)) + noise
        return jnp.mean(rows**2), rows

    p = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2)))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 7)))
    batch = {"x": x, "keys": jax.random.split(jax.random.key(0), (1, 7))}
    call = value_and_grad(fun, steps=3, has_aux=True, aux="concat", in_axes=({"x": 2, "keys": 1},))
    got = jax.jit(call)(p, batch)
    assert_same(got, jax.jit(jax.value_and_grad(fun, has_aux=True))(p, batch))


def test_padding_along_another_axis() -> None:
    p, batch = params(), time_first(texts([4, 3, 2, 1, 4, 4]))
    short = {name: leaf[:, :4] for name, leaf in batch.items()}
    options: Any = {"microbatch_size": 2, "layout": "contiguous", "in_axes": 1}
    call = value_and_grad(
        loss_of_columns, weight=lambda batch: batch["mask"].sum(), num_real_microbatches=2, **options
    )
    assert_same(jax.jit(call)(p, batch), whole(loss_of_columns, p, short))


def test_the_batch_is_not_copied() -> None:
    """An array transposed before the loop would be in memory twice."""
    batch = {"x": jnp.zeros((4, 4096, 3)), "y": jnp.zeros((4, 4096)), "mask": jnp.ones((4, 4096))}

    def temp(in_axes: int, batch: Any, fun: Any) -> int:
        options: Any = {"microbatch_size": 64, "weight": lambda batch: batch["mask"].sum(), "check": False}
        call = jax.jit(value_and_grad(fun, in_axes=in_axes, layout="contiguous", **options))
        return call.lower(params(), batch).compile().memory_analysis().temp_size_in_bytes

    rows_first = {name: jnp.swapaxes(leaf, 0, 1) for name, leaf in batch.items()}
    assert temp(1, batch, loss_of_columns) < temp(0, rows_first, token_mean) + batch["x"].nbytes / 2


@pytest.mark.parametrize(
    ("in_axes", "message"),
    [
        (1.0, "in_axes=1.0 is not an int, list or tuple. Pass an int"),
        (None, "in_axes=None is not an int"),
        ({"x": 1}, r"in_axes=\{'x': 1\} is not an int"),
        ((0, 0), r"in_axes=\(0, 0\) has 2 entries, but 1 arguments are split"),
        (3, r"in_axes has the axis 3 for batch\['mask'\] of shape \(4, 7\). Pass an axis from -2 to 1"),
        (("x",), r"in_axes has the axis 'x' for batch\['mask'\]"),
        (({"x": 1},), r"The entry \{'x': 1\} of in_axes does not have the structure of batch"),
    ],
    ids=str,
)
def test_invalid_axes(in_axes: Any, message: str) -> None:
    batch = time_first(texts([4] * 7))
    with pytest.raises(InputError, match=message):
        value_and_grad(loss_of_columns, microbatch_size=2, in_axes=in_axes)(params(), batch)


def test_different_lengths_along_the_axes() -> None:
    with pytest.raises(SplitError, match=r"batch\['mask'\] 7, batch\['x'\] 4, batch\['y'\] 7"):
        value_and_grad(loss_of_columns, microbatch_size=2, in_axes=({**TIME_FIRST, "x": 0},))(
            params(), time_first(texts([4] * 7))
        )
