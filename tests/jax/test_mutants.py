# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Wrong accumulation: a check of the other tests must reject each mutant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
pytest.importorskip("optax", reason="optax is not installed (extra: jax)")
import jax.numpy as jnp  # noqa: E402

from superbatch.jax import arithmetic, embeddings, gradient, loop, splitting, terms  # noqa: E402
from tests.jax import checks  # noqa: E402

pytestmark = pytest.mark.jax
original_groups, original_gradient_of = splitting.groups, arithmetic.gradient_of
original_share = terms.share


def unweighted(leaves: Any, sums: Any, weight: Any, keep: Any, options: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.where(weight != 0, leaf, 0), leaves)


def unmasked(leaves: Any, sums: Any, weight: Any, keep: Any, options: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * weight, leaves)


def without_tail(samples: int, **options: Any) -> Any:
    return original_groups(samples, **options)[:1]


def by_microbatches(sums: Any, weight: Any, like: Any) -> Any:
    return original_gradient_of(sums, jnp.asarray(3.0), like)


MUTANTS: dict[str, tuple[Any, str, Any, Callable[[], None]]] = {
    "a mean of means": (loop, "contribution", unweighted, checks.tail),
    "0 x NaN": (loop, "contribution", unmasked, checks.tokens),
    "NaN in the loss only": (arithmetic, "taking_part", lambda values, weights: values, checks.tokens),
    "the tail is dropped": (gradient, "groups", without_tail, checks.tail),
    "divided by K": (arithmetic, "gradient_of", by_microbatches, checks.tail),
    "one key for all": (jax.random, "fold_in", lambda key, data: key, checks.random_keys),
    "every term divided by the tokens": (
        terms,
        "share",
        lambda weight, total, reduction: original_share(weight, jnp.asarray(16.0), reduction),
        checks.terms,
    ),
    "0 x NaN in a term without tokens": (
        terms.lax,
        "cond",
        lambda every, together, apart: together(),
        checks.terms,
    ),
    "sums in bfloat16": (
        arithmetic,
        "sum_dtype",
        lambda dtype, choice=None: jnp.dtype(dtype),
        checks.low_precision,
    ),
    "rows of aux in strided order": (
        gradient,
        "rows_in_order",
        lambda stacked, layout: stacked.reshape((-1, *stacked.shape[2:])),
        checks.rows_of_aux,
    ),
    "noise without weights": (arithmetic, "square_norm", lambda tree: jnp.ones(()), checks.noise),
    "embeddings in strided order": (
        embeddings,
        "rows_in_order",
        lambda stacked, layout: stacked.reshape((-1, *stacked.shape[2:])),
        checks.contrastive,
    ),
    "every micro-batch has weight 1": (
        arithmetic,
        "as_weight",
        lambda weight, where: jnp.where(jnp.asarray(weight) != 0, 1, 0),
        checks.stream,
    ),
    "0 x NaN in the next window": (jnp, "zeros_like", lambda leaf: leaf * 0, checks.stream_recovers),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, wrong, check = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, wrong)
    with pytest.raises(AssertionError):
        check()
