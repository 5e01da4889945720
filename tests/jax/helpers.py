# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""A small model, its losses, and the comparison with the whole batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BOUND = 1e-12


def params(dtype: Any = np.float64) -> Any:
    draw = np.random.default_rng(0).normal
    return {
        "w": jnp.asarray(draw(size=(3, 5)), dtype),
        "b": jnp.asarray(draw(size=5), dtype),
        "v": jnp.asarray(draw(size=5), dtype),
    }


def rows(samples: int) -> Any:
    draw = np.random.default_rng(samples).normal
    return {"x": jnp.asarray(draw(size=(samples, 3))), "y": jnp.asarray(draw(size=samples))}


def texts(lengths: list[int], most: int = 4) -> Any:
    """Return one text per row, with the given numbers of tokens."""
    draw = np.random.default_rng(1).normal
    mask = np.arange(most)[None] < np.array(lengths)[:, None]
    return {
        "x": jnp.asarray(draw(size=(len(lengths), most, 3))),
        "y": jnp.asarray(draw(size=(len(lengths), most))),
        "mask": jnp.asarray(mask, np.float64),
    }


def errors(p: Any, batch: Any) -> Any:
    return (jnp.tanh(batch["x"] @ p["w"] + p["b"]) @ p["v"] - batch["y"]) ** 2


def mse(p: Any, batch: Any) -> Any:
    return jnp.mean(errors(p, batch))


def token_sum(p: Any, batch: Any) -> Any:
    return jnp.sum(errors(p, batch) * batch["mask"])


def token_mean(p: Any, batch: Any) -> Any:
    """Mean over tokens; without tokens 0 / 0 = NaN."""
    return token_sum(p, batch) / jnp.sum(batch["mask"])


def count_tokens(batch: Any) -> Any:
    return jnp.sum(batch["mask"])


def assert_same(got: Any, expected: Any, bound: float = BOUND) -> None:
    """Assert that each leaf of `got` equals that of `expected`, relative to the leaf's largest element."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    offenders = []
    pairs = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(got), strict=True)
    for (path, right), left in pairs:
        assert left.dtype == right.dtype, f"{path}: {left.dtype} for {right.dtype}"
        largest = float(jnp.max(jnp.abs(right)))
        assert largest > 0, f"the premise: {path} is not zero"
        error = float(jnp.max(jnp.abs(left - right))) / largest
        if not error <= bound:  # true for NaN too
            offenders.append(f"{jax.tree_util.keystr(path)}: {error:.2e}")
    assert not offenders, offenders
