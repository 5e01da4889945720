# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Several named losses, each divided by its own total weight, against the whole batch in float64."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
optax = pytest.importorskip("optax", reason="optax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from superbatch import CoupledSamplesError, InputError, LossSpecError  # noqa: E402
from superbatch.jax import multi_steps, terms, value_and_grad  # noqa: E402
from tests.jax import checks  # noqa: E402
from tests.jax.checks import balance, sum_of_terms, two_sums, two_terms, whole  # noqa: E402
from tests.jax.helpers import assert_same, count_tokens, params, texts, token_mean, token_sum  # noqa: E402

pytestmark = pytest.mark.jax
plan_of_terms = terms.Plan
LENGTHS = [4, 1, 3, 0, 0, 0, 1, 4, 2, 1]
DECLARED: Any = {"weight": {"tokens": count_tokens, "rows": None}}


def test_a_mean_over_rows_plus_a_mean_over_tokens() -> None:
    checks.terms()


@pytest.mark.parametrize("layout", ["strided", "contiguous"])
@pytest.mark.parametrize("size", [1, 3, 10])
def test_every_split(size: int, layout: Any) -> None:
    p, batch = params(), texts(LENGTHS)
    call = value_and_grad(two_terms, microbatch_size=size, layout=layout, check=False, **DECLARED)
    assert_same(jax.jit(call)(p, batch), whole(sum_of_terms, p, batch))


def test_a_sum_plus_a_mean_with_a_returned_weight() -> None:
    """Each term has a reduction, and one returns its weight."""

    def fun(p: Any, batch: Any) -> Any:
        return {"tokens": (token_sum(p, batch), count_tokens(batch)), "rows": balance(p, batch)}

    p, batch = params(), texts(LENGTHS)
    options: Any = {
        "weight": {"tokens": "returned", "rows": None},
        "reduction": {"tokens": "sum", "rows": "mean"},
    }
    got = jax.jit(value_and_grad(fun, steps=4, **options))(p, batch)
    assert_same(got, whole(sum_of_terms, p, batch))


def test_one_weight_for_the_sum_of_both_is_wrong() -> None:
    """Premise of this file: neither weight is right for both terms."""
    p, batch = params(), texts([4, 1, 3, 1, 1, 1, 1, 4, 2, 1])
    for weight in (count_tokens, None):
        call = value_and_grad(sum_of_terms, microbatch_size=3, weight=weight, check=False)
        with pytest.raises(AssertionError):
            assert_same(jax.jit(call)(p, batch), whole(sum_of_terms, p, batch), 1e-3)


def test_aux_state_and_keys_with_several_terms() -> None:
    def fun(p: Any, batch: Any, state: Any, key: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.5, p["v"].shape)
        p = {**p, "v": p["v"] * kept}
        return two_terms(p, batch), (kept, {"seen": state["seen"] + 1})

    p, batch, key = params(), texts(LENGTHS), jax.random.key(0)
    options: Any = {"microbatch_size": 3, "layout": "contiguous", "has_aux": True} | DECLARED
    call = value_and_grad(fun, carry_argnum=2, rng_argnum=3, **options)
    (loss, (masks, state)), gradient = jax.jit(call)(p, batch, {"seen": 0}, key)
    assert masks.shape == (4, 5) and int(state["seen"]) == 4
    assert len({tuple(mask.tolist()) for mask in masks}) > 1, "the premise: masks differ"

    def by_hand(p: Any) -> Any:
        parts = checks.microbatches(batch, 3)
        masked = [{**p, "v": p["v"] * mask} for mask in masks]
        found = [two_sums(one, part) for one, part in zip(masked, parts, strict=True)]
        return sum(one["tokens"][0] for one in found) / 16 + sum(one["rows"][0] for one in found) / 10

    assert_same((loss, gradient), jax.jit(jax.value_and_grad(by_hand))(p))


def test_a_term_of_weight_zero_adds_nothing() -> None:
    p, batch = params(), texts([0, 0, 0, 0])
    call = jax.jit(value_and_grad(two_terms, microbatch_size=2, stats=True, **DECLARED))
    loss, gradient, stats = call(p, batch)
    expected = whole(balance, p, batch)
    assert jnp.abs(loss - expected[0]) < 1e-14
    assert jnp.abs(gradient["w"] - expected[1]["w"]).max() < 1e-14 < jnp.abs(gradient["w"]).max()
    assert jnp.isnan(stats.losses["tokens"]) and int(stats.weight) == 1
    both: Any = {"weight": {"tokens": count_tokens, "rows": count_tokens}}
    alone = value_and_grad(two_terms, microbatch_size=2, stats=True, check=False, **both)
    loss, gradient, stats = jax.jit(alone)(p, batch)
    assert jnp.isnan(loss) and int(stats.weight) == 0 and int(stats.samples) == 0
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradient))


def test_bfloat16_losses_are_weighted_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding to bfloat16 would change the weights 1 / 181 and 1 / 543 by 0.1 to 0.2 %."""
    p, batch = jnp.ones(2, jnp.float32), jnp.ones((181, 2), jnp.bfloat16)

    def fun(p: Any, batch: Any) -> Any:
        short = p.astype(jnp.bfloat16)
        return {"a": jnp.sum(short[0] * batch[:, 0]), "b": jnp.sum(short[1] * batch[:, 1])}

    weight: Any = {"a": None, "b": lambda batch: 3 * len(batch)}
    call = value_and_grad(fun, reduction="sum", weight=weight, microbatch_size=1, check=False)
    gradient = call(p, batch)[1]
    assert gradient.dtype == jnp.float32
    assert jnp.abs(gradient - jnp.array([1, 1 / 3])).max() < 1e-5
    monkeypatch.setattr(terms, "Plan", lambda totals, apart: plan_of_terms(totals, apart=False))
    assert jnp.abs(call(p, batch)[1] - jnp.array([1, 1 / 3])).max() > 5e-4, (
        "the mutant: one backward for both terms"
    )


def test_terms_on_an_axis_of_devices() -> None:
    p, batch = params(), texts([*LENGTHS, 2, 3])
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    inside = value_and_grad(two_terms, microbatch_size=3, axis_name="data", check=False, **DECLARED)
    call = jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    assert_same(call(p, batch), whole(sum_of_terms, p, batch))


def test_the_loop_has_one_backward() -> None:
    """If no weight can be 0, the loop differentiates only once."""

    def rows_only(p: Any, batch: Any) -> Any:
        return {"a": balance(p, batch), "b": jnp.mean(batch["x"] @ p["w"])}

    counts = []
    programs: Any = (
        (lambda p, b: sum(rows_only(p, b).values()), {}),
        (rows_only, {"weight": {"a": None, "b": None}}),
    )
    for fun, options in programs:
        call = value_and_grad(fun, microbatch_size=3, check=False, **options)
        text = jax.jit(call).lower(params(), texts(LENGTHS)).compile().as_text()
        counts.append(text.count("dot("))
    assert counts[0] == counts[1] > 0


FULL = [4, 1, 3, 2, 3, 1, 1, 4, 2, 1]
WRONG: dict[str, Any] = {
    "a sum": (
        lambda p, b: {"tokens": token_mean(p, b), "rows": 10 * balance(p, b) * len(b["y"])},
        {},
        LossSpecError,
        r"The term 'rows' is a sum, not a mean.* Pass reduction=\{'rows': \"sum\", \.\.\.\}",
    ),
    "a mean over tokens": (
        two_terms,
        {"weight": {"tokens": None, "rows": None}},
        LossSpecError,
        r"'tokens' is not a mean over .*weight=\{'tokens': lambda batch: batch\['mask'\]\.sum\(\), \.\.\.\}",
    ),
    "weights": (
        two_terms,
        {"weight": {"tokens": count_tokens, "rows": lambda batch: 1}},
        LossSpecError,
        "The weights of the term 'rows' do not add up",
    ),
    "coupled": (
        lambda p, b: {"tokens": token_mean(p, b), "rows": jnp.mean(b["x"] @ p["w"]) ** 2},
        {},
        CoupledSamplesError,
        r"No weight explains the term 'rows'.*\"rows\": \(mean, rows\)",
    ),
}


@pytest.mark.parametrize("jitted", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WRONG)
def test_each_term_is_checked(name: str, jitted: bool) -> None:
    fun, options, error, message = WRONG[name]
    call = value_and_grad(fun, **({"microbatch_size": 3} | DECLARED | options))
    with pytest.raises(error, match=message):
        (jax.jit(call) if jitted else call)(params(), texts(FULL))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": {}}, r"names of the losses are \[\]"),
        ({"weight": {"a": None, 2: None}}, r"names of the losses are \['a', 2\]"),
        ({"weight": {"a": 3}}, "weight=3 for the term 'a'"),
        (
            {"weight": {"a": None}, "reduction": {"b": "sum"}},
            r"weight= names the losses \['a'\], but reduction=",
        ),
        ({"weight": len, "reduction": {"a": "sum"}}, "weight= is one function, but reduction="),
        ({"weight": {"a": None}, "reduction": {"a": "total"}}, "reduction='total'"),
        ({"weight": {"a": None}, "nonfinite": "skip_microbatch"}, "needs a single loss"),
        ({"weight": {"a": None}, "noise": True}, "noise=True needs a single loss"),
    ],
    ids=str,
)
def test_invalid_options(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        value_and_grad(two_terms, microbatch_size=3, **options)


@pytest.mark.parametrize(
    ("fun", "options", "error", "message"),
    [
        (
            two_terms,
            {},
            LossSpecError,
            r"returns a mapping with the losses \['tokens', 'rows'\].*weight=\{'tokens': None",
        ),
        (token_mean, DECLARED, LossSpecError, r"the losses \['rows', 'tokens'\] are declared"),
        (two_terms, {"weight": {"tokens": None}}, LossSpecError, "declared losses are .'tokens'.*in weight="),
        (two_terms, {"weight": "returned"}, LossSpecError, r"Return \(loss, weight\) for 'rows'"),
        (two_sums, DECLARED, LossSpecError, "loss of the term 'rows'"),
        (two_sums, {"weight": "returned", "reduction": "sum", "noise": True}, InputError, "several losses"),
    ],
)
def test_functions_with_a_wrong_return_value(fun: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        value_and_grad(fun, **({"microbatch_size": 3} | options))(params(), texts(FULL))


def test_a_stream_of_micro_batches_takes_one_weight() -> None:
    """The optimizer receives one gradient, whose terms cannot be divided separately."""
    p = params()
    optimizer = multi_steps(optax.sgd(1.0), every=2)
    with pytest.raises(InputError, match=r"not one number\. .*value_and_grad"):
        optimizer.update(p, optimizer.init(p), p, weight={"tokens": 3, "rows": 2})
