# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Roles of arguments: rows to split, random keys, and values that all micro-batches share."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
pytest.importorskip("optax", reason="optax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402

from superbatch import InputError, SplitError  # noqa: E402
from superbatch.jax import remat_map, roles  # noqa: E402
from superbatch.jax import value_and_grad as checked_value_and_grad  # noqa: E402
from tests.jax import checks  # noqa: E402
from tests.jax.helpers import assert_same, mse, params, rows  # noqa: E402

pytestmark = pytest.mark.jax
value_and_grad = partial(checked_value_and_grad, check=False)  # tests/jax/test_check.py tests the check
SIZE: Any = {"microbatch_size": 1}


def of_two(p: Any, x: Any, y: Any) -> Any:
    return mse(p, {"x": x, "y": y})


def expected(batch: Any) -> Any:
    return checks.whole(mse, params(), batch)


@pytest.mark.parametrize("by_name", [False, True])
def test_rows_that_are_not_split_are_an_error(by_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    p, batch = params(), rows(6)
    call = value_and_grad(of_two, **SIZE)
    args = (p, batch["x"]) if by_name else (p, batch["x"], batch["y"])
    kwargs = {"y": batch["y"]} if by_name else {}
    wanted = r"batch_argnames=\('y',\)" if by_name else r"batch_argnums=\(1, 2\)"
    with pytest.raises(InputError, match=f"y has 6 rows, as many as the batch.* Pass {wanted} .* unsplit="):
        call(*args, **kwargs)
    monkeypatch.setattr(roles, "_refuse_rows_that_are_not_split", lambda *_: None)
    loss = call(*args, **kwargs)[0]
    assert abs(loss / expected(batch)[0] - 1) > 0.1, "the premise: broadcast against all labels, it is wrong"


@pytest.mark.parametrize("microbatch_size", [1, 4])
def test_every_way_to_split_two_arguments(microbatch_size: int) -> None:
    p, batch = params(), rows(6)
    x, y = batch["x"], batch["y"]
    options: Any = {"microbatch_size": microbatch_size}
    both = value_and_grad(of_two, batch_argnums=(1, 2), **options)
    one_named = value_and_grad(of_two, batch_argnames="y", **options)
    named = value_and_grad(of_two, batch_argnames=("x", "y"), **options)
    from_the_end = value_and_grad(of_two, batch_argnums=(-2, -1), **options)
    only_names = value_and_grad(lambda p, *, x, y: of_two(p, x, y), batch_argnames=("x", "y"), **options)
    for call, args, kwargs in (
        (both, (p, x, y), {}),
        (both, (p, x), {"y": y}),
        (both, (p,), {"y": y, "x": x}),
        (one_named, (p, x), {"y": y}),
        (one_named, (p, x, y), {}),
        (named, (p,), {"x": x, "y": y}),
        (from_the_end, (p, x, y), {}),
        (only_names, (p,), {"x": x, "y": y}),
    ):
        assert_same(jax.jit(call)(*args, **kwargs), expected(batch))


def test_the_weight_function_gets_the_split_arguments() -> None:
    p, batch = params(), rows(6)
    weights = jnp.arange(1.0, 7.0)

    def fun(p: Any, x: Any, *, y: Any, w: Any) -> Any:
        return jnp.sum((jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] - y) ** 2 * w) / jnp.sum(w)

    call = value_and_grad(fun, steps=2, batch_argnames=("y", "w"), weight=lambda x, y, w: jnp.sum(w))
    args: Any = {"y": batch["y"], "w": weights}
    assert_same(jax.jit(call)(p, batch["x"], **args), jax.value_and_grad(fun)(p, batch["x"], **args))


@pytest.mark.parametrize("where", ["argument", "keyword", "batch", "inside the batch"])
def test_a_table_must_be_declared(where: str) -> None:
    """The table has as many rows as the batch, or another number."""
    p, ids = params(), jnp.array([5, 0, 3, 1, 1, 4])
    table = rows(6)["x"]

    def fun(p: Any, batch: Any, table: Any = None) -> Any:
        table = batch["deep"]["table"] if table is None else table
        return jnp.mean(jnp.tanh(table[batch["ids"]] @ p["w"]) @ p["v"])

    batch = {"ids": ids}
    args: dict[str, tuple[Any, ...]] = {
        "argument": ((p, batch, table), {}, {"unsplit": 2}),
        "keyword": ((p, batch), {"table": table}, {"unsplit": "table"}),
        "batch": ((p, batch | {"deep": {"table": table}}), {}, {"unsplit": ("deep.table",)}),
        "inside the batch": ((p, batch | {"deep": {"table": table}}), {}, {"unsplit": ("batch.deep",)}),
    }
    positional, named, declared = args[where]
    got = jax.jit(value_and_grad(fun, **SIZE, **declared))(*positional, **named)
    expected_value, gradient = jax.value_and_grad(fun)(*positional, **named)
    assert_same((got[0], got[1]["w"]), (expected_value, gradient["w"]))
    longer = jnp.concatenate([table, table])
    if "batch" in where:
        with pytest.raises(SplitError, match=r"different lengths .*table.* 12.*unsplit="):
            value_and_grad(fun, **SIZE)(p, batch | {"deep": {"table": longer}})


def test_parameters_may_have_the_length_of_the_batch() -> None:
    p, batch = params(), rows(5)
    assert p["b"].shape == batch["y"].shape, "the premise"
    assert_same(jax.jit(value_and_grad(mse, **SIZE))(p, batch), expected(batch))


@pytest.mark.parametrize(
    ("options", "kwargs", "message"),
    [
        (
            {"unsplit": "tabel"},
            {},
            r"unsplit names 'tabel', which the call does not have. It has batch\['x'\]",
        ),
        ({"unsplit": 7}, {}, "unsplit names 7"),
        ({"batch_argnames": "z"}, {}, "batch_argnames names 'z'"),
        ({}, {"scale": jnp.ones(6)}, "scale has 6 rows"),
        ({}, {"scale": {"deep": jnp.ones((6, 2))}}, r"scale\['deep'\] has 6 rows"),
        ({}, {"scale": [1.0] * 6}, "scale is a list of 6 numbers"),
        ({}, {"scale": jax.random.split(jax.random.key(0), 6)}, "scale has 6 rows"),
    ],
    ids=str,
)
def test_calls_that_are_refused(options: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        value_and_grad(lambda p, batch, scale=1: mse(p, batch), **SIZE, **options)(
            params(), rows(6), **kwargs
        )


@pytest.mark.parametrize(
    "options", [{"unsplit": 1.5}, {"batch_argnames": 1}, {"batch_argnames": (1,)}], ids=str
)
def test_options_that_are_refused(options: Any) -> None:
    with pytest.raises(InputError, match=f"{next(iter(options))}=.* does not name arguments"):
        value_and_grad(mse, **SIZE, **options)


def noisy(p: Any, batch: Any, key: Any = None) -> Any:
    key = batch["key"] if key is None else key
    return mse(p, batch), jax.random.uniform(key)


KEY = jax.random.key(3)


@pytest.mark.parametrize("where", ["batch", "position", "keyword"])
@pytest.mark.parametrize("declared", [False, True])
def test_a_typed_key_differs_between_microbatches(where: str, declared: bool) -> None:
    batch, args, kwargs = rows(6), (), {}
    if where == "batch":
        batch["key"] = KEY
    elif where == "position":
        args = (KEY,)
    else:
        kwargs = {"key": KEY}
    options: Any = {"unsplit": "key"} if declared else {}
    call = value_and_grad(noisy, has_aux=True, steps=3, **options)
    drawn = jax.jit(call)(params(), batch, *args, **kwargs)[0][1]
    wanted = [KEY] * 3 if declared else [jax.random.fold_in(KEY, i) for i in range(3)]
    assert drawn.tolist() == [float(jax.random.uniform(key)) for key in wanted]


def test_arrays_of_keys_differ_between_microbatches() -> None:
    keys = jax.random.split(KEY, 2)
    fun = lambda p, batch, keys: (mse(p, batch), jax.random.uniform(keys[1]))  # noqa: E731
    drawn = jax.jit(value_and_grad(fun, has_aux=True, steps=3))(params(), rows(6), keys)[0][1]
    assert len(set(drawn.tolist())) == 3


def test_a_key_of_each_row_is_split() -> None:
    batch = rows(6) | {"key": jax.random.split(KEY, 6)}

    def fun(p: Any, batch: Any) -> Any:
        noise = jax.vmap(lambda key: jax.random.uniform(key, dtype=jnp.float64))(batch["key"])
        return mse(p, batch | {"y": batch["y"] + noise})

    assert_same(
        jax.jit(value_and_grad(fun, microbatch_size=4))(params(), batch), checks.whole(fun, params(), batch)
    )


@pytest.mark.parametrize("where", ["batch", "position", "keyword"])
def test_a_legacy_key_is_refused_by_name(where: str) -> None:
    key, batch, args, kwargs = jax.random.PRNGKey(3), rows(2), (), {}
    if where == "batch":
        batch["key"] = key  # two numbers, which would be split like two rows
    elif where == "position":
        args = (key,)
    else:
        kwargs = {"key": key}
    call = value_and_grad(noisy, has_aux=True, steps=2)
    with pytest.raises(InputError, match=r"key.* looks like a legacy random key .* jax.random.key\(seed\)"):
        call(params(), batch, *args, **kwargs)
    if where != "batch":
        whole = value_and_grad(noisy, has_aux=True, steps=2, unsplit="key")
        assert len(set(whole(params(), batch, *args, **kwargs)[0][1].tolist())) == 1


@pytest.mark.parametrize("leaf", [jnp.arange(3), KEY, jnp.tanh], ids=["int", "key", "function"])
def test_leaves_without_a_gradient_are_refused_with_the_remedy(leaf: Any) -> None:
    wanted = r"argument 0\['z'\] is .* no gradient.*nnx.split\(model, nnx.Param, ...\).*eqx.partition"
    with pytest.raises(InputError, match=wanted):
        value_and_grad(mse, **SIZE)(params() | {"z": leaf}, rows(6))


def test_a_module_of_nnx_with_dropout() -> None:
    """Its keys and counters are refused; the two lines in the error make it train."""
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(3, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
    )

    def loss(model: Any, batch: Any) -> Any:
        out = model(batch["x"].astype(jnp.float32))
        return jnp.mean((out[:, 0] - batch["y"]) ** 2), out

    with pytest.raises(InputError, match="has no gradient"):
        value_and_grad(loss, has_aux=True, steps=3)(model, rows(6))
    graphdef, p, rest = nnx.split(model, nnx.Param, ...)
    batch = {"x": jnp.ones((6, 3)), "y": jnp.ones(6)}

    def split_loss(p: Any, batch: Any, rest: Any) -> Any:
        return loss(nnx.merge(graphdef, p, rest, copy=True), batch)

    call = jax.jit(value_and_grad(split_loss, has_aux=True, steps=3))
    (_, out), gradient = call(p, batch, rest)
    assert any(leaf.any() for leaf in jax.tree.leaves(gradient))
    assert len({tuple(part.ravel().tolist()) for part in out}) == 3, "micro-batches have different masks"


def test_a_key_in_the_batch_of_remat_map() -> None:
    batch = {"x": jnp.ones((6, 1)), "key": KEY}

    def encode(p: Any, batch: Any) -> Any:
        return batch["x"] * p * jax.random.uniform(batch["key"])

    assert len(set(remat_map(encode, jnp.ones(()), batch, 2)[:, 0].tolist())) == 3
