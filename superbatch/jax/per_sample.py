# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Sum of clipped gradients of single samples; memory holds those of one micro-batch at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..errors import InputError
from . import arithmetic, loop
from .differentiated import refuse_what_has_no_gradient
from .loop import Body
from .options import Options, Positions, as_tuple, checked, named
from .outcome import Form, read
from .parts import fold_in
from .roles import Mode, Roles, is_array, is_key, roles_of
from .sharding import axes_of_type, key_of_device, varying
from .splitting import Group, cutter, groups, rows_in_order

LAYOUT = "strided"  # sharded rows stay on their devices


class PerSample(NamedTuple):
    """Results of `per_sample_value_and_grad`: arrays with one entry for each sample, in order.

    Attributes:
        loss: the loss of each sample alone.
        norm: the norm of each gradient after `transform` and before clipping.
        aux: the aux of each sample; None without ``has_aux``.
    """

    loss: Any
    norm: Any
    aux: Any = None


@dataclass(frozen=True)
class _Leaves:
    """Flattened arguments of one call.

    Args:
        structure: the tree structure of arguments and keyword arguments.
        values: the leaves.
        modes: for each leaf, how a sample gets it.
        axes: the axes of `jax.shard_map` over which the rows are split.
    """

    structure: Any
    values: list[Any]
    modes: list[Mode]
    axes: tuple[str, ...]

    @property
    def rows(self) -> list[Any]:
        """The leaves that have a row for each sample."""
        return [jnp.asarray(v) for v, mode in zip(self.values, self.modes, strict=True) if mode == "rows"]

    def of_sample(self, rows: Sequence[Any], number: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for one sample: a batch of one row, and random keys of its own."""
        given = iter(rows)
        leaves = []
        for value, mode in zip(self.values, self.modes, strict=True):
            if mode == "rows":
                leaves.append(next(given)[None])  # the loss expects a batch, so one row
            elif mode == "key":
                leaves.append(fold_in(key_of_device(value, self.axes), number))
            else:
                leaves.append(value)
        return self.structure.unflatten(leaves)


def per_sample_value_and_grad(
    fun: Callable[..., Any],
    argnums: Positions = 0,
    *,
    microbatch_size: int,
    max_grad_norm: Any = None,
    transform: Callable[[Any], Any] | None = None,
    has_aux: bool = False,
    batch_argnums: Positions = 1,
    unsplit: int | str | Sequence[int | str] = (),
) -> Callable[..., Any]:
    """Sum the gradients of single samples, each clipped by its norm, as for differential privacy.

    Compute ``sum_n g_n min(1, C / |g_n|)`` with the gradient ``g_n`` of ``fun(params, batch of sample n)``.
    The result is that of `jax.vmap` over the whole batch, with the gradients of `microbatch_size` samples in
    memory. The sum is not divided, and no noise is added: the caller does both.

    Args:
        fun: ``fun(params, batch, ...) -> loss``, as for `value_and_grad`; it is given batches of one row.
        argnums: positions of the arguments to differentiate.
        microbatch_size: the number of samples whose gradients are in memory at a time.
        max_grad_norm: ``C``, the largest norm over all leaves together; it may be traced. None: no clipping.
        transform: a function to apply to the gradient of each sample before clipping and summing, such as
            one that scales each layer, or that squares.
        has_aux: `fun` returns ``(loss, aux)``.
        batch_argnums: positions of the arguments to split, see `value_and_grad`. Every typed random key in
            other arguments is folded with the index of the sample, so that results do not depend on
            `microbatch_size`.
        unsplit: arrays that every sample gets whole although they have as many rows as the batch.

    Returns:
        A function with the arguments of `fun` that returns ``(PerSample, sum)``. The sum is in float32 or
        wider. Inside `jax.shard_map` it is the sum of one device: reduce it with `jax.lax.psum`.

    Raises:
        InputError: an option has an unknown value; or, when called, as for `value_and_grad`.
        SplitError: when called: arrays differ in length.
        LossSpecError: when called: `fun` does not return a real scalar.

    Examples:
        >>> def loss(w, batch):
        ...     return jnp.mean(batch["x"] @ w)
        >>> batch = {"x": jnp.array([[3.0, 4.0], [0.0, 0.5], [6.0, 8.0]])}
        >>> clipped = jax.jit(per_sample_value_and_grad(loss, microbatch_size=2, max_grad_norm=1.0))
        >>> each, total = clipped(jnp.zeros(2), batch)
        >>> each.norm.tolist(), [round(float(one), 3) for one in total]
        ([5.0, 0.5, 10.0], [1.2, 2.1])

    Source: Abadi et al. 2016, https://arxiv.org/abs/1607.00133.
    """
    options = _options(argnums, batch_argnums, unsplit, microbatch_size, has_aux=has_aux)
    if isinstance(max_grad_norm, int | float) and not max_grad_norm > 0:
        raise InputError(f"max_grad_norm={max_grad_norm!r} is not positive. Pass a number above 0, or None.")

    @functools.wraps(fun)
    def summed(*args: Any, **kwargs: Any) -> tuple[PerSample, Any]:
        roles, positional, by_name = roles_of(fun, options, args, kwargs)
        for position in as_tuple(roles.differentiated):
            refuse_what_has_no_gradient(position, positional[position])
        leaves = _flat(roles, positional, by_name)

        def sample(rows: Sequence[Any], number: Any) -> tuple[PerSample, Any]:
            (value, aux), gradient = _one(fun, roles, has_aux, *leaves.of_sample(rows, number))
            part = gradient if transform is None else transform(gradient)
            norm = jnp.sqrt(arithmetic.square_norm(part))
            return PerSample(value, norm, aux), _clipped(part, norm, max_grad_norm)

        return _over_batch(roles, leaves, microbatch_size, sample)

    return summed


def _options(
    argnums: Positions, batch_argnums: Positions, unsplit: Any, microbatch_size: int, *, has_aux: bool
) -> Options:
    return checked(
        Options(
            argnums=argnums,
            batch_argnums=batch_argnums,
            batch_argnames=(),
            in_axes=0,
            unsplit=named("unsplit", unsplit, (int, str)),
            rng_argnum=None,
            carry_argnum=None,
            microbatch_size=microbatch_size,
            steps=None,
            num_real_microbatches=None,
            layout=LAYOUT,
            weight=None,
            reduction="sum",
            has_aux=has_aux,
            aux="concat",
            axis_name=None,
            accumulator_dtype="auto",
            nonfinite="propagate",
            noise=False,
            stats=False,
            check=False,  # a batch of one row cannot couple rows
        )
    )


def _flat(roles: Roles, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Leaves:
    """Return the flattened arguments of a call."""
    modes_at = {argument.where: argument.modes for argument in roles.others}
    differentiated = as_tuple(roles.differentiated)
    places = [*enumerate(args), *sorted(kwargs.items())]  # as JAX flattens a dict
    modes: list[Mode] = [
        mode
        for where, argument in places
        for mode in modes_at.get(where, ("same",) * len(jax.tree.leaves(argument)))
    ]
    leaves = jax.tree.leaves((args, kwargs))
    axes = {
        axis for leaf, mode in zip(leaves, modes, strict=True) if mode == "rows" for axis in _varies(leaf)
    }
    axes = tuple(sorted(axes))
    # Mark the parameters as varying. Otherwise JAX would sum their gradients over devices before clipping.
    args = tuple(
        varying(arg, axes) if position in differentiated else arg for position, arg in enumerate(args)
    )
    values, structure = jax.tree.flatten((args, kwargs))
    return _Leaves(structure, values, modes, axes)


def _varies(leaf: Any) -> frozenset[str]:
    """Return the axes of `jax.shard_map` over which an array varies, by its type."""
    if not is_array(leaf) or is_key(leaf):
        return frozenset()
    return frozenset(axes_of_type(leaf))


def _one(
    fun: Callable[..., Any], roles: Roles, has_aux: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return ``((loss, aux), gradient)`` of one sample."""

    def loss(*positional: Any) -> tuple[Any, Any]:
        outcome = read(fun(*positional, **kwargs), Form(returned=False, has_aux=has_aux, has_carry=False))
        return outcome.loss, outcome.aux

    return jax.value_and_grad(loss, roles.differentiated, has_aux=True)(*args)


def _clipped(gradient: Any, norm: Any, most: Any) -> Any:
    """Return a gradient in the dtypes of the sum, scaled down to the norm `most`.

    The factor of a NaN gradient is 1, so the NaN reaches the sum.
    """
    factor = None if most is None else jnp.where(norm > most, most / norm, jnp.ones_like(norm))
    return jax.tree.map(
        lambda leaf: arithmetic.weighted(leaf, arithmetic.sum_dtype(leaf.dtype), factor), gradient
    )


def _like_a_row(leaf: Any) -> Any:
    """Return an array with the shape and dtype of one row, under `jax.eval_shape`."""
    # Not `leaf[0]`: JAX cannot index a single row of rows that are sharded over an explicit mesh.
    return leaf[0] if is_key(leaf) else leaf.max(0)


def _spread_like(numbers: Any, rows: Any) -> Any:
    """Return the numbers with the sharding of the rows, which `jax.vmap` needs on an explicit mesh."""
    mesh, spec = jax.typeof(rows).sharding.mesh, jax.typeof(rows).sharding.spec
    if not spec or spec[0] is None:
        return numbers
    return jax.sharding.reshard(numbers, jax.sharding.NamedSharding(mesh, jax.P(spec[0])))


def _over_batch(
    roles: Roles, leaves: _Leaves, microbatch_size: int, sample: Callable[..., Any]
) -> tuple[PerSample, Any]:
    """Return the results of all samples, in order, and the sum of the gradients."""
    # Indices of the samples, split like the rows: random keys are folded with the index of the sample.
    numbers = _spread_like(jnp.arange(roles.samples), leaves.rows[0])
    divided = groups(roles.samples, microbatch_size=microbatch_size)
    # The shapes of the gradient of one sample, which `transform` may have changed.
    first = jax.eval_shape(sample, [jax.eval_shape(_like_a_row, leaf) for leaf in leaves.rows], 0)[1]
    zeros = varying(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first), leaves.axes)

    def body_of(group: Group) -> Body:
        arrays = [*leaves.rows, numbers]
        cut = cutter(arrays, group, LAYOUT, [0] * len(arrays))

        def body(sums: Any, index: Any) -> tuple[Any, PerSample]:
            *rows, of_rows = cut(index)
            each, parts = jax.vmap(sample)(rows, of_rows)
            # A sum of scaled gradients, not a dot product with the factors: GPUs and TPUs round its inputs.
            return jax.tree.map(lambda total, part: total + part.sum(0), sums, parts), each

        return body

    total, by_group = loop.run(divided, body_of, zeros)
    ordered = [rows_in_order(group, LAYOUT) for group in by_group]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *ordered), total
