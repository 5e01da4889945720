# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""A traced number of micro-batches: one program serves every number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from superbatch import InputError  # noqa: E402
from superbatch.jax import value_and_grad  # noqa: E402
from tests.jax.helpers import (  # noqa: E402
    assert_same,
    count_tokens,
    errors,
    mse,
    params,
    rows,
    texts,
    token_mean,
    token_sum,
)

pytestmark = pytest.mark.jax


def padded(samples: int, real: int, value: float = np.nan) -> Any:
    """Return a batch whose rows from `real` on are padding; with NaN, reading them spoils the result."""
    return jax.tree.map(lambda leaf: leaf.at[real:].set(value), rows(samples))


def whole(fun: Any, p: Any, batch: Any, real: int) -> Any:
    return jax.jit(jax.value_and_grad(fun))(p, jax.tree.map(lambda leaf: leaf[:real], batch))


def test_one_program_is_exact_for_every_number() -> None:
    """14 rows in micro-batches of 4, the fourth a tail of 2."""
    traces: list[int] = []

    @jax.jit
    def gradient(p: Any, batch: Any, real: Any) -> Any:
        traces.append(1)
        options: Any = {"microbatch_size": 4, "layout": "contiguous", "check": False, "stats": True}
        return value_and_grad(mse, num_real_microbatches=real, **options)(p, batch)

    p = params()
    for real, samples in ((1, 4), (3, 12), (4, 14), (2, 8)):
        batch = padded(14, samples)
        assert samples == 14 or jnp.isnan(whole(mse, p, batch, 14)[0]), "the premise: padding is read as NaN"
        loss, slope, stats = gradient(p, batch, real)
        assert_same((loss, slope), whole(mse, p, batch, samples))
        assert (int(stats.samples), int(stats.microbatches)) == (samples, real)
    loss, slope, _ = gradient(p, padded(14, 0), 0)
    assert jnp.isnan(loss) and not any(leaf.any() for leaf in jax.tree.leaves(slope))
    assert_same(gradient(p, rows(14), 99)[:2], whole(mse, p, rows(14), 14))
    assert len(traces) == 1


def test_optax_reads_rows_of_the_padding() -> None:
    """Reason for `layout="contiguous"`: the first 2 of 4 strided micro-batches contain padding."""
    microbatching = pytest.importorskip("optax").microbatching
    x = jnp.arange(8.0)
    theirs = microbatching.microbatch(jnp.sum, argnums=0, microbatch_size=2, num_real_microbatches=2)(x)
    assert float(theirs) == 0 + 4 + 1 + 5 != 0 + 1 + 2 + 3
    ours = value_and_grad(
        lambda p, x: (p * x).sum(),
        microbatch_size=2,
        reduction="sum",
        num_real_microbatches=2,
        layout="contiguous",
    )
    assert float(ours(1.0, x)[0]) == (0 + 1 + 2 + 3) / 4


@pytest.mark.parametrize("options", [{"steps": 4}, {"steps": 3}, {"microbatch_size": 11}, {"steps": 11}])
def test_every_split_of_the_rows(options: Any) -> None:
    """Sizes that differ by one, a single micro-batch, and micro-batches of one row."""
    p, batch = params(), rows(11)
    sizes = {4: [3, 3, 3, 2], 3: [4, 4, 3], 11: [1] * 11}.get(options.get("steps"), [11])
    for real in range(1, len(sizes) + 1):
        call = value_and_grad(mse, layout="contiguous", num_real_microbatches=real, **options)
        assert_same(jax.jit(call)(p, batch), whole(mse, p, batch, sum(sizes[:real])))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights_and_a_micro_batch_with_padding(reduction: Any) -> None:
    """The last real micro-batch contains a row of padding, with an empty mask."""
    p, batch = params(), texts([4, 1, 3, 2, 2, 0, 4, 4])
    fun = token_mean if reduction == "mean" else token_sum
    options: Any = {"microbatch_size": 2, "weight": count_tokens, "reduction": reduction}
    call = value_and_grad(
        fun, layout="contiguous", num_real_microbatches=jnp.asarray(3), stats=True, **options
    )
    loss, gradient, stats = jax.jit(call)(p, batch)
    assert_same((loss, gradient), whole(token_mean, p, batch, 5))
    assert (int(stats.weight), int(stats.microbatches)) == (12, 3)


def test_several_losses() -> None:
    def fun(p: Any, batch: Any) -> Any:
        return {"tokens": token_sum(p, batch), "rows": jnp.mean(jnp.tanh(batch["x"] @ p["w"]) ** 2)}

    def in_one(p: Any, batch: Any) -> Any:
        return token_mean(p, batch) + fun(p, batch)["rows"]

    p, batch = params(), texts([4, 1, 3, 2, 2, 1, 4, 4])
    weight: Any = {"tokens": count_tokens, "rows": None}
    reduction: Any = {"tokens": "sum", "rows": "mean"}
    options: Any = {"weight": weight, "reduction": reduction, "layout": "contiguous"}
    call = value_and_grad(fun, microbatch_size=2, num_real_microbatches=3, **options)
    assert_same(jax.jit(call)(p, batch), whole(in_one, p, batch, 6))


def test_aux_noise_and_state() -> None:
    """Aux of padding is zero; the state is the one after the last real micro-batch."""

    def fun(p: Any, batch: Any, state: Any) -> Any:
        return mse(p, batch), (errors(p, batch), state + batch["y"].sum())

    p, batch = params(), rows(10)
    options: Any = {
        "has_aux": True,
        "aux": "concat",
        "carry_argnum": 2,
        "layout": "contiguous",
        "noise": True,
    }
    call = value_and_grad(fun, microbatch_size=4, num_real_microbatches=2, check=False, **options)
    (loss, (aux, state)), gradient, stats = jax.jit(call)(p, batch, jnp.zeros(()))
    assert_same((loss, gradient), whole(mse, p, batch, 8))
    assert_same(aux[:8], errors(p, batch)[:8])
    assert aux.shape == (10,) and not aux[8:].any()
    assert_same(state, batch["y"][:8].sum())
    short = value_and_grad(fun, microbatch_size=4, check=False, **options)
    _, _, expected = jax.jit(short)(p, jax.tree.map(lambda leaf: leaf[:8], batch), jnp.zeros(()))
    fields = ("weight", "samples", "microbatches", "a2", "b2", "q", "effective_samples")
    for field in fields:
        assert_same(getattr(stats, field), getattr(expected, field))


def test_padding_does_not_count_as_dropped() -> None:
    p, batch = params(), rows(12)
    batch["y"] = batch["y"].at[5].set(jnp.nan)
    options: Any = {"nonfinite": "skip_microbatch", "stats": True, "layout": "contiguous"}
    call = value_and_grad(mse, microbatch_size=4, num_real_microbatches=2, check=False, **options)
    loss, gradient, stats = jax.jit(call)(p, batch)
    assert_same((loss, gradient), whole(mse, p, batch, 4))
    assert (int(stats.dropped), int(stats.samples), int(stats.microbatches)) == (1, 4, 2)


def test_a_number_for_each_device_in_a_shard_map() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def gradient(p: Any, batch: Any, real: Any) -> Any:
        options: Any = {"microbatch_size": 4, "layout": "contiguous", "axis_name": "data", "stats": True}
        return value_and_grad(mse, num_real_microbatches=real[0], **options)(p, batch)

    specs: Any = {"in_specs": (P(), P("data"), P("data")), "out_specs": P()}
    sharded = jax.jit(jax.shard_map(gradient, mesh=mesh, **specs))
    p, batch = params(), rows(12)
    loss, slope, stats = sharded(p, batch, jnp.array([2]))
    assert_same((loss, slope), whole(mse, p, batch, 8))
    assert int(stats.microbatches) == 2


def test_padding_is_not_computed() -> None:
    """The loop is a while loop, whose length is not a constant of the program."""
    p, batch = params(), rows(12)
    call = lambda p, batch, real: value_and_grad(  # noqa: E731  (shorter than a def)
        mse, microbatch_size=2, layout="contiguous", num_real_microbatches=real, check=False
    )(p, batch)
    names = [equation.primitive.name for equation in jax.make_jaxpr(call)(p, batch, 3).jaxpr.eqns]
    assert "while" in names and "scan" not in names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_real_microbatches": 2.0}, "num_real_microbatches=2.0 is not a scalar integer"),
        ({"num_real_microbatches": True}, "num_real_microbatches=True is not a scalar integer"),
        ({"num_real_microbatches": jnp.ones(2, jnp.int32)}, "is not a scalar integer. Pass an int"),
        ({"num_real_microbatches": 2, "layout": "strided"}, 'Pass layout="contiguous"'),
    ],
    ids=["a float", "a bool", "a vector", "strided"],
)
def test_invalid_options(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        value_and_grad(mse, microbatch_size=2, **({"layout": "contiguous"} | options))


def test_more_real_micro_batches_than_micro_batches() -> None:
    call = value_and_grad(mse, microbatch_size=4, layout="contiguous", num_real_microbatches=4)
    with pytest.raises(InputError, match=r"=4, but the batch has 3 micro-batches\. Pass 0 to 3"):
        call(params(), rows(12))
