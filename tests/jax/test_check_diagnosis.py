# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Errors of the check name the right cause and remedy."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
pytest.importorskip("optax", reason="optax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from superbatch import CoupledSamplesError, InputError, LossSpecError  # noqa: E402
from superbatch.jax import value_and_grad  # noqa: E402
from tests.jax.helpers import assert_same, errors, mse, params, rows, texts  # noqa: E402

pytestmark = pytest.mark.jax
BOTH = pytest.mark.parametrize("jitted", [False, True])


def called(fun: Any, *args: Any, jitted: bool, microbatch_size: int = 4, **options: Any) -> Any:
    call = value_and_grad(fun, microbatch_size=microbatch_size, **options)
    return (jax.jit(call) if jitted else call)(params(), *args)


def pairs_of_texts() -> Any:
    """Return texts of a source and of a target, each with its own mask."""
    one, other = (
        texts([4, 1, 3, 2, 3, 1, 1, 4, 2, 1, 3]),
        texts([1, 2, 2, 4, 1, 3, 2, 1, 4, 4, 1]),
    )
    return {"x": one["x"], "y": one["y"], "source": one["mask"], "target": other["mask"]}


def translation(p: Any, batch: Any) -> Any:
    each = errors(p, batch)
    return {
        "source": (each * batch["source"]).sum() / batch["source"].sum(),
        "target": (each**2 * batch["target"]).sum() / batch["target"].sum(),
    }


def source_mask(batch: Any) -> Any:
    return batch["source"].sum()


def target_mask(batch: Any) -> Any:
    return batch["target"].sum()


@BOTH
def test_swapped_weights_of_two_terms(jitted: bool) -> None:
    batch = pairs_of_texts()
    wrong = {"source": target_mask, "target": source_mask}
    message = (
        r"not a mean over its weight.*weight=\{'source': lambda batch: batch\['source'\]\.sum\(\), \.\.\."
    )
    with pytest.raises(LossSpecError, match=message):
        called(translation, batch, jitted=jitted, weight=wrong)
    right = {"source": source_mask, "target": target_mask}
    expected = jax.value_and_grad(lambda p: sum(translation(p, batch).values()))(params())
    assert_same(called(translation, batch, jitted=jitted, weight=right), expected)
    silent = called(translation, batch, jitted=True, weight=wrong, check=False)
    assert abs(float(silent[0] / expected[0]) - 1) > 1e-2, "the premise: it is another loss"


def next_token(p: Any, batch: Any) -> Any:
    """Loss of predicting each next token; the first token has no prediction."""
    mask = batch["mask"][:, 1:]
    return (errors(p, batch)[:, :-1] * mask).sum() / mask.sum()


@BOTH
def test_a_mask_that_is_not_shifted_with_the_labels(jitted: bool) -> None:
    """The mask with its first column is a wrong weight, inside `jax.jit` too."""
    batch = texts([4, 2, 3, 2, 3, 2, 2, 4, 2, 3, 3])
    wrong = lambda batch: batch["mask"].sum()  # noqa: E731
    with pytest.raises(LossSpecError, match=r"weight=lambda batch: batch\['mask'\]\[:, 1:\]\.sum\(\)"):
        called(next_token, batch, jitted=jitted, weight=wrong)
    got = called(next_token, batch, jitted=jitted, weight=lambda batch: batch["mask"][:, 1:].sum())
    expected = jax.value_and_grad(next_token)(params(), batch)
    assert_same(got, expected)
    silent = called(next_token, batch, jitted=True, weight=wrong, check=False)
    assert abs(float(silent[0] / expected[0]) - 1) > 1e-3, "the premise: it is another loss"


def detection_sum(p: Any, batch: Any) -> Any:
    """Sum of losses of all positions, with or without objects."""
    return (errors(p, batch) * (1 + batch["mask"])).sum()


def detection(p: Any, batch: Any) -> Any:
    """The sum divided by max(number of objects, 1)."""
    return detection_sum(p, batch) / jnp.maximum(batch["mask"].sum(), 1)


def count_objects(batch: Any) -> Any:
    return batch["mask"].sum()


@pytest.mark.parametrize("empty", [False, True])
@BOTH
def test_a_mean_divided_by_at_least_one(jitted: bool, empty: bool) -> None:
    """With that weight, micro-batches without an object would be lost."""
    batch = texts([4, 1, 0, 0, 3, 1, 2, 4] if empty else [4, 1, 3, 2, 3, 1, 2, 4])
    options: Any = {"jitted": jitted, "microbatch_size": 2, "layout": "contiguous", "weight": count_objects}
    with pytest.raises(
        LossSpecError, match=r'divides by max\(count, 1\).*Pass reduction="sum"|Return the sum'
    ):
        called(detection, batch, **options)
    got = called(detection_sum, batch, reduction="sum", **options)
    assert_same(got, jax.value_and_grad(detection)(params(), batch))


@pytest.mark.parametrize("seed", range(4))
@BOTH
def test_a_mean_over_positive_rows_divided_by_at_least_one(jitted: bool, seed: int) -> None:
    """A generated micro-batch may have weight 0 by chance; the check must still find the wrong weight."""
    random = np.random.default_rng(seed)
    batch = {"x": jnp.asarray(random.normal(size=(16, 3))), "positive": jnp.asarray(random.random(16) > 0.5)}
    batch["positive"] = batch["positive"].at[0::4].set(False).astype(float)
    at = {"w": jnp.ones(3)}

    def focal(p: Any, batch: Any) -> Any:
        return ((batch["x"] @ p["w"]) ** 2).sum() / jnp.maximum(batch["positive"].sum(), 1)

    def masked(p: Any, batch: Any) -> Any:
        each = (batch["x"] @ p["w"]) ** 2
        return (each * batch["positive"]).sum() / jnp.maximum(batch["positive"].sum(), 1)

    def update(loss: Any, **options: Any) -> Any:
        count = lambda batch: batch["positive"].sum()  # noqa: E731
        one = value_and_grad(loss, microbatch_size=4, weight=count, **options)
        return (jax.jit(one) if jitted else one)(at, batch)

    with pytest.raises(LossSpecError, match=r"divides by max\(count, 1\)"):
        update(focal)
    wrong = update(focal, check=False)[1]["w"]
    assert float(jnp.abs(wrong - jax.grad(focal)(at, batch)["w"]).max()) > 0.1, "the premise"
    got = update(masked)[1]["w"]  # the loss of a micro-batch without a positive row is 0
    assert float(jnp.abs(got - jax.grad(masked)(at, batch)["w"]).max()) < 1e-12


@BOTH
def test_a_sum_with_weight_decay(jitted: bool) -> None:
    """The decay would be added once per micro-batch; the error must not call the samples coupled."""

    def decay(p: Any) -> Any:
        return 0.01 * sum(jnp.sum(leaf**2) for leaf in p.values())

    def decayed(p: Any, batch: Any) -> Any:
        return errors(p, batch).sum() + decay(p)

    message = r'plus a term that does not depend on the rows.*reduction=\{"data": "sum", "decay": "mean"\}'
    with pytest.raises(LossSpecError, match=message):
        called(decayed, rows(11), jitted=jitted, reduction="sum")

    def two_terms(p: Any, batch: Any) -> Any:
        return {"data": errors(p, batch).sum(), "decay": decay(p)}

    got = called(two_terms, rows(11), jitted=jitted, reduction={"data": "sum", "decay": "mean"})
    assert_same(got, jax.value_and_grad(lambda p: mse(p, rows(11)) + decay(p))(params()))

    def coupled(p: Any, batch: Any) -> Any:
        return errors(p, batch).sum() + (p["v"][0] * batch["x"].mean()) ** 2

    with pytest.raises(CoupledSamplesError):
        called(coupled, rows(11), jitted=jitted, reduction="sum")


@BOTH
def test_a_legacy_key_in_the_state(jitted: bool) -> None:
    """The check cannot replace such a key, so the error must not call dropout coupled."""

    def noisy(p: Any, batch: Any, state: Any) -> Any:
        key, own = jax.random.split(state["rng"])
        kept = jax.random.bernoulli(own, 0.5, batch["x"].shape)
        return mse(p, {"x": batch["x"] * kept, "y": batch["y"]}), {"rng": key}

    legacy = {"rng": jax.random.PRNGKey(0)}
    with pytest.raises(InputError, match=r"argument 2\['rng'\] looks like a legacy random key.*check=False"):
        called(noisy, rows(11), legacy, jitted=jitted, carry_argnum=2)
    (_, after), _ = called(noisy, rows(11), legacy, jitted=jitted, carry_argnum=2, check=False)
    assert not jnp.array_equal(after["rng"], legacy["rng"]), "the premise: the key changes"
    called(noisy, rows(11), {"rng": jax.random.key(0)}, jitted=jitted, carry_argnum=2)
