# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Embeddings of a whole batch in the memory of one micro-batch, for a loss over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .arithmetic import sum_dtype
from .parts import part_of
from .roles import count_rows, with_modes
from .splitting import Layout, check_split, groups, rows_in_order


def remat_map(
    fun: Callable[..., Any],
    params: Any,
    batch: Any,
    microbatch_size: int,
    *,
    rng: Any = None,
    layout: Layout = "strided",
) -> Any:
    """Return ``fun(params, batch)``, computed in micro-batches whose activations are recomputed.

    For a contrastive loss, or any other loss over all embeddings of a batch. Memory holds the embeddings, and
    the activations of one micro-batch at a time. The gradient is that of the whole batch: the backward
    computes each micro-batch a second time, with the same random key.

    Args:
        fun: ``fun(params, microbatch)`` (with `rng`: ``fun(params, microbatch, key)``) -> array, or tree of
            arrays, with one entry for each row. No row may depend on another.
        params: the parameters; their gradients are summed in float32 if they have less precision.
        batch: tree of arrays with one row for each sample. A random key in it is folded with the index of the
            micro-batch.
        microbatch_size: rows of a micro-batch; the last one may have fewer, without padding.
        rng: a random key; each micro-batch gets ``fold_in(rng, index)``.
        layout: see `value_and_grad`.

    Returns:
        The result of `fun` for all rows, in the order of the batch.

    Raises:
        InputError: `microbatch_size` is not a positive int.
        SplitError: arrays of the batch differ in length.

    Examples:
        >>> def encode(w, x):
        ...     return jnp.tanh(x @ w)
        >>> def loss(w, x, y):
        ...     logits = remat_map(encode, w, x, 4) @ remat_map(encode, w, y, 4).T
        ...     return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)))
        >>> x, y = jnp.eye(6, 3), jnp.eye(6, 3) + 1
        >>> jax.jit(jax.grad(loss))(jnp.ones((3, 2)), x, y).shape
        (3, 2)

    Source: Gao et al. 2021, https://arxiv.org/abs/2101.06983; here as a checkpointed loop.
    """
    check_split(microbatch_size, None, layout)
    own = jax.tree.map(jnp.result_type, params)
    # JAX sums the gradients over the loop in the dtype of `wide`, and `encode` casts back to `own`.
    wide = jax.tree.map(lambda leaf, dtype: jnp.asarray(leaf, sum_dtype(dtype)), params, own)
    outputs = []
    (argument,) = with_modes([(1, "batch", batch)], {1: 0}, ())
    for group in groups(count_rows([argument]), microbatch_size=microbatch_size):
        cut = part_of(argument, group, layout, None)

        def encode(wide: Any, index: Any, cut: Any = cut, first: int = group.first) -> Any:
            narrow = jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), wide, own)
            key = () if rng is None else (jax.random.fold_in(rng, first + index),)
            return fun(narrow, cut(index), *key)

        if group.count == 1:
            rows = jax.tree.map(lambda leaf: leaf[None], jax.checkpoint(encode)(wide, 0))
        else:
            # Inside a loop XLA does not merge the two forwards, so the barrier against it is not needed.
            again = jax.checkpoint(encode, prevent_cse=False)
            rows = lax.map(lambda index, again=again: again(wide, index), jnp.arange(group.count))
        outputs.append(rows_in_order(rows, layout))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)
