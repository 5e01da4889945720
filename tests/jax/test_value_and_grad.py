# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""`superbatch.jax.value_and_grad` against `jax.value_and_grad` of the whole batch, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
pytest.importorskip("optax", reason="optax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402

from superbatch import InputError, LossSpecError, NoiseMeter, SplitError  # noqa: E402
from superbatch.jax import add_noise, value_and_grad  # noqa: E402
from tests.jax import checks  # noqa: E402
from tests.jax.helpers import (  # noqa: E402
    assert_same,
    count_tokens,
    mse,
    params,
    rows,
    texts,
    token_mean,
    token_sum,
)

pytestmark = pytest.mark.jax


@pytest.mark.parametrize("samples", [8, 9, 10, 11])
def test_tails_of_every_length(samples: int) -> None:
    checks.tail(samples)


@pytest.mark.parametrize(
    "options",
    [
        {"microbatch_size": 1},
        {"microbatch_size": 11},
        {"microbatch_size": 40},
        {"microbatch_size": 4, "layout": "contiguous"},
        {"steps": 1},
        {"steps": 4},
        {"steps": 11},
    ],
    ids=str,
)
def test_every_split_gives_the_gradient_of_the_batch(options: Any) -> None:
    checks.tail(11, **options)


@pytest.mark.parametrize(("microbatch_size", "layout"), [(2, "strided"), (4, "contiguous")])
def test_any_lengths(microbatch_size: int, layout: Any) -> None:
    ours = jax.jit(
        value_and_grad(token_mean, microbatch_size=microbatch_size, weight=count_tokens, layout=layout)
    )
    theirs = jax.jit(jax.value_and_grad(token_mean))

    @given(st.lists(st.integers(0, 4), min_size=9, max_size=9).filter(any))  # one shape, compiled once
    @settings(max_examples=30)
    def hold(lengths: list[int]) -> None:
        batch = texts(lengths)
        assert_same(ours(p, batch), theirs(p, batch))

    p = params()
    hold()


def test_tokens_with_an_empty_microbatch() -> None:
    checks.tokens()


def test_the_returned_weight() -> None:
    p, batch = params(), texts(checks.LENGTHS)
    fun = lambda p, batch: (token_mean(p, batch), count_tokens(batch))  # noqa: E731
    got = jax.jit(value_and_grad(fun, steps=10, weight="returned"))(p, batch)
    assert_same(got, checks.whole(token_mean, p, batch))


def test_losses_that_are_sums() -> None:
    p, batch = params(), texts(checks.LENGTHS)
    got = value_and_grad(token_sum, microbatch_size=3, weight=count_tokens, reduction="sum")
    assert_same(jax.jit(got)(p, batch), checks.whole(token_mean, p, batch))


def test_a_window_without_weight_has_no_loss_and_no_gradient() -> None:
    p, batch = params(), texts([0, 0, 0, 0])
    got = jax.jit(value_and_grad(token_mean, microbatch_size=2, weight=count_tokens, stats=True))
    loss, gradient, stats = got(p, batch)
    assert jnp.isnan(loss) and float(stats.weight) == 0
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("where", ["x", "y"])
def test_a_microbatch_that_is_not_finite_is_left_out(where: str) -> None:
    p, batch = params(), rows(11)
    batch[where] = batch[where].at[5].set(jnp.nan)
    options: Any = {"microbatch_size": 4, "layout": "contiguous", "stats": True}
    assert jnp.isnan(jax.jit(value_and_grad(mse, **options))(p, batch)[0]), (
        "the premise: the NaN reaches the loss"
    )
    skipping = jax.jit(value_and_grad(mse, nonfinite="skip_microbatch", **options))
    *got, stats = skipping(p, batch)
    rest = jax.tree.map(lambda leaf: jnp.concatenate([leaf[:4], leaf[8:]]), batch)
    assert_same(tuple(got), checks.whole(mse, p, rest))
    assert (int(stats.dropped), int(stats.weight), int(stats.samples)) == (1, 7, 7)


def test_low_precision_is_summed_in_float32() -> None:
    checks.low_precision()


def test_a_large_weight_does_not_overflow_float16() -> None:
    p, batch = jnp.ones(1, jnp.float16), jnp.ones((4, 1), jnp.float16)
    weight = lambda batch: jnp.float32(1e5)  # noqa: E731
    fun = lambda p, batch: jnp.mean(p * batch)  # noqa: E731
    gradient = jax.jit(value_and_grad(fun, microbatch_size=1, weight=weight, check=False))(p, batch)[1]
    assert gradient.dtype == jnp.float16 and float(gradient[0]) == 1.0


def test_weights_are_counted_beyond_float32() -> None:
    """The total is 2**24 + 200; a float32 counter would stop at 2**24."""
    p, batch = params(np.float32), rows(201)
    weights = jnp.ones(201, jnp.float32).at[0].set(2**24)
    with jax.enable_x64(new_val=False):
        got = value_and_grad(
            lambda p, batch, w: jnp.float32(1) * p["b"][0],
            batch_argnums=(1, 2),
            weight=lambda batch, w: w.sum(),
            microbatch_size=1,
            layout="contiguous",
            stats=True,
        )
        stats = jax.jit(got)(p, jax.tree.map(jnp.float32, batch), weights)[2]
    assert stats.weight.dtype == jnp.float32
    assert float(stats.weight) == 2**24 + 200


def test_every_microbatch_has_its_own_key() -> None:
    checks.random_keys()


def test_keys_may_be_a_tree_or_legacy_keys() -> None:
    def fun(p: Any, batch: Any, rngs: Any) -> Any:
        return mse(p, batch), jax.random.uniform(rngs["dropout"])

    call = jax.jit(value_and_grad(fun, microbatch_size=4, rng_argnum=2, has_aux=True))
    drawn = [call(params(), rows(10), {"dropout": key})[0][1] for key in (jax.random.PRNGKey(0),) * 2]
    assert len(set(drawn[0].tolist())) == 3 and drawn[0].tolist() == drawn[1].tolist()


def test_each_microbatch_passes_its_state_to_the_next() -> None:
    def fun(p: Any, batch: Any, state: Any) -> Any:
        new = {"mean": 0.9 * state["mean"] + 0.1 * jnp.mean(batch["x"]), "seen": state["seen"] + 1}
        return token_mean(p, batch), (jnp.max(batch["x"]), new)

    p, batch = params(), texts([4, 1, 0, 2, 3])
    state = {"mean": 0.5, "seen": 0}
    options: Any = {"microbatch_size": 1, "carry_argnum": 2, "has_aux": True, "layout": "contiguous"}
    got = jax.jit(value_and_grad(fun, weight=count_tokens, **options))
    (loss, (aux, after)), _ = got(p, batch, state)
    for part in checks.microbatches(batch, 1):
        if count_tokens(part):  # an empty one does not change the state
            state = fun(p, part, state)[1][1]
    assert int(after["seen"]) == state["seen"] == 4
    np.testing.assert_allclose(after["mean"], state["mean"], rtol=1e-14)
    np.testing.assert_allclose(loss, token_mean(p, batch), rtol=1e-13)
    assert aux.shape == (5,)


def test_batch_statistics_of_flax() -> None:
    nn = pytest.importorskip("flax.linen", reason="flax is not installed")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.BatchNorm(use_running_average=False, momentum=0.5, dtype=jnp.float64)(nn.Dense(4)(x))
            return nn.Dense(1)(x)[:, 0]

    def fun(p: Any, batch: Any, statistics: Any) -> Any:
        out, new = model.apply({"params": p, "batch_stats": statistics}, batch["x"], mutable=["batch_stats"])
        return jnp.mean((out - batch["y"]) ** 2), new["batch_stats"]

    model, batch = Model(), rows(10)
    variables = jax.jit(model.init)(jax.random.key(0), batch["x"])
    p, statistics = (jax.tree.map(jnp.float64, variables[name]) for name in ("params", "batch_stats"))
    options: Any = {"microbatch_size": 4, "carry_argnum": 2, "layout": "contiguous", "check": False}
    (_, after), gradient = jax.jit(value_and_grad(fun, **options))(p, batch, statistics)
    by_hand = jax.jit(jax.value_and_grad(fun, has_aux=True))
    expected, total = statistics, jax.tree.map(jnp.zeros_like, p)
    for part in checks.microbatches(batch, 4):
        (_, expected), one = by_hand(p, part, expected)
        share = len(part["y"]) / 10
        total = jax.tree.map(lambda a, b, share=share: a + share * b, total, one)
    assert_same(after, expected)
    for name in ("kernel", "bias"):  # a bias before BatchNorm has no gradient
        assert_same(gradient["Dense_1"][name], total["Dense_1"][name])


def test_noise() -> None:
    checks.noise()


def test_noise_goes_into_the_meter() -> None:
    meter = NoiseMeter()
    call = jax.jit(value_and_grad(mse, microbatch_size=4, noise=True))
    for samples in (8, 12):
        add_noise(meter, call(params(), rows(samples))[2])
    assert meter.windows == 2
    add_noise(meter, jax.jit(value_and_grad(mse, steps=1, noise=True))(params(), rows(4))[2])
    assert meter.windows == 2
    assert "nearly all the weight" in str(meter.estimate().reason)


def test_noise_needs_little_arithmetic() -> None:
    """The squares need two flops per parameter and micro-batch, the model hundreds."""
    draw = np.random.default_rng(0).normal
    p = {"w": jnp.asarray(draw(size=(64, 64))), "b": jnp.zeros(64), "v": jnp.ones(64)}
    batch = {"x": jnp.asarray(draw(size=(256, 64))), "y": jnp.ones(256)}
    flops = [
        jax.jit(value_and_grad(mse, microbatch_size=64, noise=noise))
        .lower(p, batch)
        .compile()
        .cost_analysis()["flops"]
        for noise in (False, True)
    ]
    assert flops[0] < flops[1] < 1.03 * flops[0]


def test_the_program_is_compiled_once() -> None:
    traced = []

    def fun(p: Any, batch: Any) -> Any:
        traced.append(batch["y"].shape)
        return mse(p, batch)

    call = jax.jit(value_and_grad(fun, microbatch_size=4, check=False))
    p, batch = params(), rows(11)
    call(p, batch)
    first = list(traced)
    assert set(first) == {(4,), (3,)}, "a loop of four rows and a tail of three"
    for _ in range(3):
        _, p = call(p, batch)
    assert traced == first and call._cache_size() == 1


def test_the_program_size_does_not_depend_on_the_number_of_microbatches() -> None:
    texts_of_programs = [
        jax.jit(value_and_grad(mse, microbatch_size=1)).lower(params(), rows(samples)).as_text()
        for samples in (4, 400)
    ]
    found = [text.count("stablehlo.tanh") for text in texts_of_programs]
    assert found[0] == found[1] > 0


def test_peak_memory_is_that_of_a_microbatch() -> None:
    p, batch = params(), rows(4096)
    whole, ours = (
        jax.jit(call).lower(p, batch).compile().memory_analysis().temp_size_in_bytes
        for call in (jax.value_and_grad(mse), value_and_grad(mse, microbatch_size=64))
    )
    assert whole > 100_000, "the premise: activations are most of the memory"
    assert ours < whole / 10


@pytest.mark.parametrize("layout", ["strided", "contiguous"])
def test_rows_of_aux_are_in_the_order_of_the_batch(layout: Any) -> None:
    checks.rows_of_aux(layout)


def test_positions_and_keywords_work_as_in_jax() -> None:
    def fun(a: Any, x: Any, b: Any, y: Any, *, power: int, shift: Any) -> Any:
        return jnp.mean((jnp.tanh(x["x"] @ a["w"] + a["b"]) @ b - y["y"] * y["scale"]) ** power + shift)

    p, batch = params(), rows(10)
    args = ({"w": p["w"], "b": p["b"]}, {"x": batch["x"]}, p["v"], {"y": batch["y"], "scale": 2.0})
    got = value_and_grad(fun, (-2, 0), batch_argnums=(1, 3), microbatch_size=4)
    expected = jax.jit(jax.value_and_grad(fun, (-2, 0)), static_argnames="power")(*args, power=2, shift=0.5)
    assert_same(jax.jit(got, static_argnames="power")(*args, power=2, shift=0.5), expected)


def test_complex_parameters() -> None:
    z = jnp.array([1 + 2j, -0.5 + 0.25j])
    batch = jnp.asarray(np.random.default_rng(0).normal(size=(7, 2)) + 0.5j)
    fun = lambda z, batch: jnp.mean(jnp.abs(batch @ z - 1) ** 2)  # noqa: E731
    got = jax.jit(value_and_grad(fun, microbatch_size=3))(z, batch)
    assert_same(got, checks.whole(fun, z, batch))
    assert jnp.abs(got[1].imag).min() > 0, "the premise: there is an imaginary part"


def test_a_negative_weight_gives_nan() -> None:
    got = value_and_grad(mse, microbatch_size=4, weight=lambda batch: jnp.min(batch["y"]), check=False)
    loss, gradient = jax.jit(got)(params(), rows(11))
    assert jnp.isnan(loss) and all(jnp.isnan(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Pass microbatch_size= .* or steps="),
        ({"microbatch_size": 4, "steps": 2}, "exactly one of them is needed"),
        ({"microbatch_size": 0}, "microbatch_size=0"),
        ({"steps": 2, "layout": "F"}, "layout='F'"),
        ({"steps": 2, "reduction": "none"}, "reduction='none'"),
        ({"steps": 2, "weight": 3}, "weight=3"),
        ({"steps": 2, "aux": "mean"}, "aux='mean'"),
        ({"steps": 2, "nonfinite": "raise"}, "nonfinite='raise'"),
        ({"steps": 2, "accumulator_dtype": "int32"}, "accumulator_dtype='int32'"),
    ],
    ids=str,
)
def test_invalid_options(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        value_and_grad(mse, **options)


@pytest.mark.parametrize(
    ("fun", "options", "error", "message"),
    [
        (mse, {"rng_argnum": 2}, InputError, "names argument 2"),
        (mse, {"argnums": 1}, InputError, "Argument 1 has two roles"),
        (mse, {"steps": 12, "microbatch_size": None}, SplitError, "11 samples for steps=12"),
        (mse, {"has_aux": True}, LossSpecError, "has_aux or carry_argnum is given"),
        (mse, {"weight": "returned"}, LossSpecError, 'weight="returned" is given'),
        (lambda p, b: b["y"], {}, LossSpecError, "a loss of shape"),
        (lambda p, b: (mse(p, b), b["y"]), {"has_aux": True}, LossSpecError, 'Use aux="concat"'),
        (
            lambda p, b: (mse(p, b), p["b"]),
            {"has_aux": True, "aux": "concat"},
            LossSpecError,
            "one entry for each row",
        ),
        (
            mse,
            {"weight": lambda b: b["y"]},
            InputError,
            "weight of a micro-batch is one real number, but .* has shape",
        ),
        (mse, {"weight": lambda b: b["y"].sum(dtype=jnp.bfloat16)}, InputError, "bfloat16 counts to 256"),
    ],
)
def test_invalid_calls(fun: Any, options: Any, error: Any, message: str) -> None:
    call = value_and_grad(fun, **({"microbatch_size": 4} | options))
    with pytest.raises(error, match=message):
        jax.eval_shape(call, params(), rows(11))


def test_arrays_of_different_length() -> None:
    batch = rows(11)
    batch["y"] = batch["y"][:10]
    with pytest.raises(SplitError, match="one row for each sample"):
        value_and_grad(mse, microbatch_size=4)(params(), batch)
