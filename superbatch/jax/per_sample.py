# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Gradients of single samples, clipped and summed, with those of one micro-batch in memory at a time."""

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
from .sharding import key_of_device, varying
from .splitting import Group, cutter, groups, rows_in_order

LAYOUT = "strided"  # sharded rows stay where they are


class PerSample(NamedTuple):
    """Results of `per_sample_value_and_grad` by sample: arrays with one entry for each, in order.

    Attributes:
        loss: of the sample alone.
        norm: of its gradient (of what `transform` made of it), before it is clipped.
        aux: with ``has_aux``.
    """

    loss: Any
    norm: Any
    aux: Any = None


@dataclass(frozen=True)
class _Leaves:
    """Arguments of one call, flat.

    Args:
        structure: of arguments and keyword arguments.
        values: the leaves.
        modes: how a sample gets each of them.
        axes: the mesh axes over which the rows are spread.
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
        found = []
        for value, mode in zip(self.values, self.modes, strict=True):
            if mode == "rows":
                found.append(next(given)[None])  # a loss over a batch is given a batch
            elif mode == "key":
                found.append(fold_in(key_of_device(value, self.axes), number))
            else:
                found.append(value)
        return self.structure.unflatten(found)


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
    """Sum the gradients of single samples, each clipped by its norm, as differential privacy needs.

    ``sum_n g_n min(1, C / |g_n|)`` with the gradient ``g_n`` of ``fun(params, batch of the sample n)``, as
    `jax.vmap` over the whole batch gives it, with the gradients of `microbatch_size` samples in memory.
    Nothing is divided and no noise is added: both are the caller's.

    Args:
        fun: ``fun(params, batch, ...) -> loss``, as for `value_and_grad`; it is given batches of one row.
        argnums: the positions that are differentiated.
        microbatch_size: samples whose gradients are in memory together; the rest is a tail.
        max_grad_norm: ``C``, over all leaves together; None: nothing is clipped. It may be traced.
        transform: a function that is applied to the gradient of each sample before it is clipped and
            summed: a scaling by layer, a square.
        has_aux: `fun` returns ``(loss, aux)``.
        batch_argnums: the positions that are split, see `value_and_grad`. Every typed random key in other
            arguments is folded with the number of the sample, so that results do not depend on
            `microbatch_size`.
        unsplit: what every sample gets whole though it has as many rows as the batch.

    Returns:
        A function with the arguments of `fun` that returns ``(PerSample, sum)``. The sum is in float32 or
        wider. Inside `jax.shard_map` it is the device's own: add with `jax.lax.psum`.

    Raises:
        InputError: an option has an unknown value; or, when called, as for `value_and_grad`.
        SplitError: when called: arrays differ in length.
        LossSpecError: when called: `fun` returns no scalar.

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
        raise InputError(f"max_grad_norm={max_grad_norm!r} is no norm. Pass a number above 0, or None.")

    @functools.wraps(fun)
    def summed(*args: Any, **kwargs: Any) -> tuple[PerSample, Any]:
        roles, positional, by_name = roles_of(fun, options, args, kwargs)
        for place in as_tuple(roles.differentiated):
            refuse_what_has_no_gradient(place, positional[place])
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
            check=False,  # a batch of one row couples nothing
        )
    )


def _flat(roles: Roles, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Leaves:
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
    # With respect to a parameter that is the same on all devices JAX adds gradients over them: before a clip.
    args = tuple(varying(arg, axes) if place in differentiated else arg for place, arg in enumerate(args))
    values, structure = jax.tree.flatten((args, kwargs))
    return _Leaves(structure, values, modes, axes)


def _varies(leaf: Any) -> frozenset[str]:
    """The axes of `jax.shard_map` over which an array is known to differ."""
    if not is_array(leaf) or is_key(leaf):
        return frozenset()
    type_of = jax.typeof(leaf)
    return type_of.mat.varying if hasattr(type_of, "mat") else type_of.vma


def _one(
    fun: Callable[..., Any], roles: Roles, has_aux: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Loss, aux and gradient of one sample."""

    def loss(*positional: Any) -> tuple[Any, Any]:
        outcome = read(fun(*positional, **kwargs), Form(returned=False, has_aux=has_aux, has_carry=False))
        return outcome.loss, outcome.aux

    return jax.value_and_grad(loss, roles.differentiated, has_aux=True)(*args)


def _clipped(gradient: Any, norm: Any, most: Any) -> Any:
    """A gradient in the dtypes of the sum, scaled down to the norm. NaN stays NaN, and so reaches the sum."""
    factor = jnp.ones_like(norm) if most is None else jnp.where(norm > most, most / norm, jnp.ones_like(norm))

    def one(leaf: Any) -> Any:
        wide = leaf.astype(arithmetic.sum_dtype(leaf.dtype))
        return wide * factor.astype(jnp.finfo(wide.dtype).dtype)

    return jax.tree.map(one, gradient)


def _like_a_row(leaf: Any) -> Any:
    # Not `leaf[0]`: of rows that are spread over an explicit mesh JAX takes no single one.
    return leaf[0] if is_key(leaf) else leaf.max(0)


def _spread_like(numbers: Any, rows: Any) -> Any:
    """The numbers on the devices of the rows: on an explicit mesh `jax.vmap` takes no others beside them."""
    mesh, spec = jax.typeof(rows).sharding.mesh, jax.typeof(rows).sharding.spec
    if not spec or spec[0] is None:
        return numbers
    return jax.sharding.reshard(numbers, jax.sharding.NamedSharding(mesh, jax.P(spec[0])))


def _over_batch(
    roles: Roles, leaves: _Leaves, microbatch_size: int, sample: Callable[..., Any]
) -> tuple[PerSample, Any]:
    """Return the results of all samples, in order, and the sum of the gradients."""
    # Cut as the rows are: a sample's key does not depend on the split.
    numbers = _spread_like(jnp.arange(roles.samples), leaves.rows[0])
    divided = groups(roles.samples, microbatch_size=microbatch_size)
    first = jax.eval_shape(sample, [jax.eval_shape(_like_a_row, leaf) for leaf in leaves.rows], 0)[1]
    zeros = varying(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first), leaves.axes)

    def body_of(group: Group) -> Body:
        arrays = [*leaves.rows, numbers]
        cut = cutter(arrays, group, LAYOUT, [0] * len(arrays))

        def body(sums: Any, index: Any) -> tuple[Any, PerSample]:
            *rows, of_rows = cut(index)
            each, parts = jax.vmap(sample)(rows, of_rows)
            # A sum, not a dot product with the factors: accelerators round the inputs of those.
            return jax.tree.map(lambda total, part: total + part.sum(0), sums, parts), each

        return body

    total, found = loop.run(divided, body_of, zeros)
    ordered = [rows_in_order(group, LAYOUT) for group in found]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *ordered), total
