# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Named axes: `jax.vmap` inside the loss and around the call, and losses that reduce over devices."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
pytest.importorskip("optax", reason="optax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from superbatch import CoupledSamplesError, LossSpecError  # noqa: E402
from superbatch.jax import value_and_grad  # noqa: E402
from tests.jax import checks  # noqa: E402
from tests.jax.checks import two_terms, whole  # noqa: E402
from tests.jax.helpers import (  # noqa: E402
    assert_same,
    count_tokens,
    errors,
    mse,
    params,
    rows,
    texts,
    token_mean,
)

pytestmark = pytest.mark.jax


def replicas(batch: Any, count: int) -> Any:
    return jax.tree.map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), batch)


def on_each(call: Any, *, count: int) -> Any:
    """Run the call under `jax.vmap` and return the result of each replica."""

    def run(p: Any, batch: Any) -> list[Any]:
        found = jax.jit(jax.vmap(call, axis_name="data", in_axes=(None, 0)))(p, replicas(batch, count))
        return [jax.tree.map(lambda leaf, i=i: leaf[i], found) for i in range(count)]

    return run


def test_a_mean_over_samples_within_the_loss() -> None:
    def of_samples(p: Any, batch: Any) -> Any:
        one = lambda x, y: jax.lax.pmean(errors(p, {"x": x, "y": y}), "batch")  # noqa: E731
        return jax.vmap(one, axis_name="batch")(batch["x"], batch["y"])[0]

    p, batch = params(), rows(11)
    assert_same(jax.jit(value_and_grad(of_samples, microbatch_size=4))(p, batch), whole(mse, p, batch))


@pytest.mark.parametrize("jitted", [False, True])
def test_statistics_over_samples_within_the_loss_are_an_error(jitted: bool) -> None:
    """The loss computes statistics as flax's and Equinox's BatchNorm with ``axis_name="batch"``."""

    def centred(p: Any, batch: Any) -> Any:
        def one(x: Any, y: Any) -> Any:
            hidden = x @ p["w"]
            hidden = hidden - jax.lax.pmean(hidden, "batch")
            return (jnp.tanh(hidden + p["b"]) @ p["v"] - y) ** 2

        return jnp.mean(jax.vmap(one, axis_name="batch")(batch["x"], batch["y"]))

    call = value_and_grad(centred, microbatch_size=4)
    with pytest.raises(CoupledSamplesError, match=r"pmean under jax\.vmap.*check=False"):
        (jax.jit(call) if jitted else call)(params(), rows(11))


@pytest.mark.parametrize("check", [True, False])
def test_replicas_of_vmap(check: bool) -> None:
    p, batch = params(), rows(12)
    call = value_and_grad(mse, microbatch_size=3, axis_name="data", check=check)
    for found in on_each(call, count=3)(p, batch):
        assert_same(found, whole(mse, p, batch))


def test_replicas_of_unequal_tokens() -> None:
    """The replicas have 8 tokens and 1 token, so the mean over replicas is wrong."""
    p, batch = params(), texts([4, 4, 0, 1])
    for fun, weight in ((token_mean, count_tokens), (two_terms, {"tokens": count_tokens, "rows": None})):
        expected = whole(token_mean if fun is token_mean else checks.sum_of_terms, p, batch)
        call = value_and_grad(fun, microbatch_size=1, axis_name="data", weight=weight, check=False)
        for found in on_each(call, count=2)(p, batch):
            assert_same(found, expected)
        alone = value_and_grad(fun, microbatch_size=1, weight=weight, check=False)
        means = [loss for loss, _ in on_each(alone, count=2)(p, batch)]
        assert abs(sum(means) / 2 / expected[0] - 1) > 1e-2, "the premise: a mean of means is wrong"


def test_each_replica_has_its_own_random_numbers() -> None:
    def noisy(p: Any, batch: Any, key: Any) -> Any:
        return mse(p, batch), jax.random.uniform(key)

    options: Any = {"microbatch_size": 3, "axis_name": "data", "rng_argnum": 2, "has_aux": True}
    call = jax.vmap(value_and_grad(noisy, **options), axis_name="data", in_axes=(None, 0, None))
    drawn = jax.jit(call)(params(), replicas(rows(12), 2), jax.random.key(0))[0][1]
    assert len(set(drawn.ravel().tolist())) == 4


def averaged(p: Any, batch: Any) -> Any:
    return jax.lax.pmean(mse(p, batch), "data")


def synchronised(p: Any, batch: Any) -> Any:
    hidden = batch["x"] @ p["w"]
    hidden = hidden - jax.lax.pmean(hidden.mean(0), "data")
    return jnp.mean((jnp.tanh(hidden + p["b"]) @ p["v"] - batch["y"]) ** 2)


@pytest.mark.parametrize("fun", [averaged, synchronised])
@pytest.mark.parametrize("around", ["vmap", "shard_map", "jit in shard_map"])
def test_a_loss_with_its_own_reduction_is_refused(fun: Any, around: str) -> None:
    call = value_and_grad(jax.jit(fun) if "jit" in around else fun, microbatch_size=3, axis_name="data")
    p, batch = params(), rows(12)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    run = on_each(call, count=2) if around == "vmap" else sharded
    message = r"reduces over the axis 'data' itself \(psum.*Remove jax\.lax\.pmean, psum"
    with pytest.raises(LossSpecError, match=message):
        run(p, batch)


def test_metrics_may_be_reduced() -> None:
    def with_metric(p: Any, batch: Any) -> Any:
        return mse(p, batch), jax.lax.pmean(batch["y"].mean(), "data")

    p, batch = params(), rows(12)
    call = value_and_grad(with_metric, microbatch_size=6, axis_name="data", has_aux=True)
    for (loss, metric), gradient in on_each(call, count=2)(p, batch):
        assert_same((loss, gradient), whole(mse, p, batch))
        assert metric.shape == (1,) and abs(metric[0] - batch["y"].mean()) < 1e-14
