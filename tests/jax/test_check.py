# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""The check of a loss against its declaration at the first call, inside and outside of `jax.jit`."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
pytest.importorskip("optax", reason="optax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402

from superbatch import CoupledSamplesError, LossSpecError  # noqa: E402
from superbatch.jax import check, gradient, value_and_grad  # noqa: E402
from tests.jax import checks  # noqa: E402
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
with jax.enable_x64(new_val=True):
    ROWS = rows(11)
    TEXTS = texts([4, 1, 3, 2, 3, 1, 1, 4, 2, 1, 3])
    LABELS = TEXTS | {"labels": jnp.where(TEXTS["mask"] > 0, 1, -100)}
    IDS = TEXTS | {"ids": jnp.where(TEXTS["mask"] > 0, 7, 0)}
    COUNTED = TEXTS | {"tokens": TEXTS["mask"].sum(1)}
    TABLE = {"table": ROWS["x"], "ids": jnp.arange(11)[::-1] % 7, "y": ROWS["y"]}


def labelled(p: Any, batch: Any) -> Any:
    return jnp.mean(errors(p, batch), where=batch["labels"] != -100)


def looked_up(p: Any, batch: Any) -> Any:
    return jnp.mean((jnp.tanh(batch["table"][batch["ids"]] @ p["w"] + p["b"]) @ p["v"] - batch["y"]) ** 2)


def normalised(p: Any, batch: Any) -> Any:
    hidden = batch["x"] @ p["w"]
    hidden = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-5) + p["b"]
    return jnp.mean((jnp.tanh(hidden) @ p["v"] - batch["y"]) ** 2)


def contrastive(p: Any, batch: Any) -> Any:
    embedded = jnp.tanh(batch["x"] @ p["w"] + p["b"]) * p["v"]
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(embedded @ embedded.T)))


def balanced(p: Any, batch: Any) -> Any:
    return mse(p, batch) + 0.01 * jnp.sum(jax.nn.softmax(batch["x"] @ p["w"]).mean(0) ** 2)


def called(fun: Any, batch: Any, *, jitted: bool, **options: Any) -> Any:
    given: Any = {"microbatch_size": 4} | options
    call = value_and_grad(fun, **given)
    return (jax.jit(call) if jitted else call)(params(), batch)


WRONG: dict[str, Any] = {
    "sum": (lambda p, b: jnp.sum(errors(p, b)), ROWS, {}, LossSpecError, 'Pass reduction="sum"'),
    "mean": (mse, ROWS, {"reduction": "sum"}, LossSpecError, 'Pass reduction="mean"'),
    "tokens": (token_mean, TEXTS, {}, LossSpecError, r"Pass weight=lambda batch: batch\['mask'\].sum\(\)"),
    "labels": (
        labelled,
        LABELS,
        {},
        LossSpecError,
        r"weight=lambda batch: \(batch\['labels'\] != -100\).sum\(\)",
    ),
    "constant": (
        mse,
        ROWS,
        {"weight": lambda b: 1},
        LossSpecError,
        r"11 rows have the weight 1, their parts 1 \+ 1 \+ 1",
    ),
    "table": (looked_up, TABLE, {}, LossSpecError, r"'table' is split .* Pass unsplit=\('table',\)"),
    "batch norm": (normalised, ROWS, {}, CoupledSamplesError, "samples influence each other"),
    "contrastive": (contrastive, ROWS, {}, CoupledSamplesError, "samples influence each other"),
    "balance": (balanced, ROWS, {}, CoupledSamplesError, "No weight explains the loss"),
    "single rows": (
        balanced,
        ROWS,
        {"microbatch_size": 1},
        CoupledSamplesError,
        "No weight explains the loss",
    ),
}


@pytest.mark.parametrize("jitted", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_declaration_is_found(name: str, jitted: bool) -> None:
    fun, batch, options, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        called(fun, batch, jitted=jitted, **options)


def test_the_check_inside_jit_uses_generated_values() -> None:
    for name in ("sum", "tokens", "batch norm"):
        fun, batch, options, error, message = WRONG[name]
        with pytest.raises(error, match=r"checked with made-up values") as found:
            called(fun, batch, jitted=True, **options)
        assert found.match(message)


@pytest.mark.parametrize("name", ["sum", "tokens", "balance"])
def test_without_the_check_a_wrong_declaration_is_silently_wrong(name: str) -> None:
    fun, batch, options, *_ = WRONG[name]
    got = called(fun, batch, jitted=True, check=False, **options)
    with pytest.raises(AssertionError):
        assert_same(got, checks.whole(fun, params(), batch))


def returned(count: Any) -> Any:
    return lambda p, batch: (token_mean(p, batch), count(batch))


MISCOUNTED: dict[str, Any] = {
    "rows": (token_mean, TEXTS, lambda b: len(b["y"])),
    "positions": (token_mean, TEXTS, lambda b: b["mask"].size),
    "returned rows": (returned(lambda b: jnp.asarray(len(b["y"]))), TEXTS, "returned"),
    "empty positions": (token_mean, TEXTS, lambda b: (b["mask"] == 0).sum() + len(b["y"])),
    "not 0, of labels of -100": (labelled, LABELS, lambda b: (b["labels"] != 0).sum()),
}


@pytest.mark.parametrize("name", MISCOUNTED)
def test_a_wrong_count_is_found_inside_jit(name: str) -> None:
    """The weight reads no values or those that the loss counts, so it is wrong for every batch."""
    fun, batch, weight = MISCOUNTED[name]
    message = r"not a mean over its weight.*made-up.* Pass weight=lambda batch: "
    with pytest.raises(LossSpecError, match=message):
        called(fun, batch, jitted=True, weight=weight)


MAY_AGREE: dict[str, Any] = {
    "a count next to the mask": (token_mean, COUNTED, lambda b: b["tokens"].sum()),
    "ids above 0 for ids that are not 0": (
        lambda p, b: jnp.mean(errors(p, b), where=b["ids"] != 0),
        IDS,
        lambda b: (b["ids"] > 0).sum(),
    ),
    "labels with a separate mask": (labelled, LABELS, count_tokens),
}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", MAY_AGREE)
def test_a_weight_that_is_right_for_real_data_passes(name: str, jitted: bool) -> None:
    """Generated values contradict the weight: ids below 0, a mask that does not match the labels."""
    fun, batch, weight = MAY_AGREE[name]
    called(fun, batch, jitted=jitted, weight=weight)


def test_the_arrays_that_a_weight_reads() -> None:
    options: Any = {"microbatch_size": 4, "weight": lambda b: b["mask"].sum() + 0 * b["tokens"].size}
    for weight, fun, expected in (
        (options["weight"], token_mean, {"batch['mask']"}),
        (lambda b: len(b["y"]), token_mean, set()),
        ("returned", returned(lambda b: b["tokens"].sum()), {"batch['tokens']"}),
        (lambda b: TABLE["y"][: len(b["y"])].sum(), token_mean, {"elsewhere"}),
        ("returned", lambda p, batch: (token_mean(p, batch), jnp.sum(p["w"] > 0)), {"elsewhere"}),
    ):
        seen: list[Any] = []
        call = value_and_grad(fun, **(options | {"weight": weight, "check": False}))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradient, "computed", seen.append)
            call(params(), COUNTED)
        assert check.leaves_read(seen[0], "") == expected


RIGHT: dict[str, Any] = {
    "mean": (mse, ROWS, {}),
    "sum": (lambda p, b: jnp.sum(errors(p, b)), ROWS, {"reduction": "sum"}),
    "tokens": (token_mean, TEXTS, {"weight": count_tokens}),
    "token sum": (token_sum, TEXTS, {"weight": count_tokens, "reduction": "sum"}),
    "returned": (lambda p, b: (token_mean(p, b), count_tokens(b)), TEXTS, {"weight": "returned"}),
    "at least 1": (
        lambda p, b: token_sum(p, b) / jnp.maximum(count_tokens(b), 1),
        TEXTS,
        {"weight": count_tokens, "microbatch_size": 1},
    ),
    "table": (looked_up, TABLE, {"unsplit": "table"}),
}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_declaration_passes(name: str, jitted: bool) -> None:
    fun, batch, options = RIGHT[name]
    called(fun, batch, jitted=jitted, **options)


@pytest.mark.parametrize("names", [("x", "y"), ("y", "x")])
def test_keywords_in_any_order(names: Any) -> None:
    """JAX sorts keyword arguments; x must not be mistaken for y, which has the same shape."""

    def of_columns(p: Any, *, x: Any, y: Any) -> Any:
        return jnp.sum((p["b"][0] * x - 1) ** 2 * y) / jnp.sum(y)

    given = {"x": ROWS["x"][:, 0], "y": jnp.arange(1.0, 12.0)}
    weight = lambda x, y: y.sum()  # noqa: E731
    call = value_and_grad(of_columns, microbatch_size=4, batch_argnames=("x", "y"), weight=weight)
    call(params(), **{name: given[name] for name in names})
    wrong = value_and_grad(of_columns, microbatch_size=4, batch_argnames=("x", "y"))
    with pytest.raises(LossSpecError, match=r"weight=lambda .*: y\.sum"):
        wrong(params(), **{name: given[name] for name in names})


def test_pairs_of_rows_in_contiguous_microbatches() -> None:
    def of_pairs(p: Any, batch: Any) -> Any:
        out = jnp.tanh(batch["x"] @ p["w"] + p["b"]) @ p["v"]
        return -jnp.mean(jax.nn.log_sigmoid(out[0::2] - out[1::2]))

    called(of_pairs, rows(12), jitted=False, layout="contiguous")
    with pytest.raises(CoupledSamplesError):
        called(of_pairs, rows(12), jitted=False)  # a strided split separates pairs


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_dropout_passes_the_check(make: Any) -> None:
    def noisy(p: Any, batch: Any, key: Any) -> Any:
        one, two = jax.random.split(key)
        kept = jax.random.bernoulli(one, 0.5, batch["x"].shape)
        own = jax.vmap(jax.random.normal)(jax.random.split(two, len(batch["y"])))
        return mse(p, {"x": batch["x"] * kept + own[:, None], "y": batch["y"]})

    call = value_and_grad(noisy, microbatch_size=4, rng_argnum=2)
    call(params(), ROWS, make(0))


def test_bfloat16_and_float32_round_without_an_error() -> None:
    for dtype in (jnp.bfloat16, jnp.float32):
        fun = lambda p, b, dtype=dtype: mse(*jax.tree.map(lambda x: x.astype(dtype), (p, b)))  # noqa: E731
        called(fun, ROWS, jitted=True)


def test_the_function_may_close_over_traced_values() -> None:
    @jax.jit
    def update(p: Any, batch: Any, scale: Any) -> Any:
        return value_and_grad(lambda p, b: scale * mse(p, b), microbatch_size=4)(p, batch)

    update(params(), ROWS, 2.0)

    @jax.jit
    def wrong(p: Any, batch: Any, scale: Any) -> Any:
        return value_and_grad(lambda p, b: scale * jnp.sum(errors(p, b)), microbatch_size=4)(p, batch)

    with pytest.raises(LossSpecError, match="is a sum"):
        wrong(params(), ROWS, 2.0)


def test_the_check_runs_once_for_each_structure() -> None:
    traced = []

    def fun(p: Any, batch: Any) -> Any:
        traced.append(len(batch["y"]))
        return mse(p, batch)

    call = value_and_grad(fun, microbatch_size=4)
    counts = []
    for samples in (8, 8, 12):
        call(params(), rows(samples))
        counts.append(len(traced))
        traced.clear()
    assert counts[0] > counts[1] and counts[2] > counts[1], counts


@pytest.mark.parametrize("jitted", [False, True])
def test_a_repeated_call_raises_the_error_again(jitted: bool) -> None:
    """A notebook cell that is run again must not be silently wrong."""
    call = value_and_grad(lambda p, batch: jnp.sum(errors(p, batch)), microbatch_size=4)
    call = jax.jit(call) if jitted else call
    for _ in range(2):
        with pytest.raises(LossSpecError, match="is a sum"):
            call(params(), ROWS)
