# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""`jax.value_and_grad` in micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import LossSpecError
from . import arithmetic, loop, terms
from .axes import Axes
from .check import Checked, check_once
from .collectives import refuse_own_reductions
from .differentiated import refuse_what_has_no_gradient
from .loop import Call, PerMicrobatch
from .options import Aux, NonFinite, Options, Positions, Reduction, Weight, checked, named
from .roles import roles_of
from .sharding import AxisName, names, refuse_unbound, summed, varying
from .splitting import Layout, groups, refuse_more_than_there_are, rows_in_order
from .state_in_aux import refuse_state_in_aux
from .stats import Stats, noise_sums


def value_and_grad(
    fun: Callable[..., Any],
    argnums: Positions = 0,
    *,
    microbatch_size: int | None = None,
    steps: int | None = None,
    num_real_microbatches: Any = None,
    weight: Weight = None,
    reduction: Reduction = "mean",
    has_aux: bool = False,
    aux: Aux = "stack",
    batch_argnums: Positions = 1,
    batch_argnames: str | Sequence[str] = (),
    in_axes: Axes = 0,
    unsplit: int | str | Sequence[int | str] = (),
    rng_argnum: int | None = None,
    carry_argnum: int | None = None,
    axis_name: AxisName = None,
    layout: Layout = "strided",
    accumulator_dtype: Any = "auto",
    nonfinite: NonFinite = "propagate",
    noise: bool = False,
    stats: bool = False,
    check: bool = True,
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, but in a loop over micro-batches, with the memory of one micro-batch.

    The loss is ``L = sum (w_i / W) l_i`` for a mean and ``sum l_i / W`` for a sum (see
    `superbatch.normalize`). With a mean, a micro-batch of weight 0 contributes nothing, even if its loss is
    NaN. Call the returned function inside `jax.jit`, so that the loop is compiled once.

    Args:
        fun: ``fun(params, batch, ...) -> loss``, a real scalar: a mean or sum over the batch.
        argnums: positions of the arguments to differentiate, as in `jax.value_and_grad`.
        microbatch_size: rows of a micro-batch; the last one may have fewer, without padding.
        steps: the number of near-equal micro-batches, instead of `microbatch_size`.
        num_real_microbatches: compute only this many micro-batches, from the first on. The rows of the others
            are padding, and their entries in aux are zeros. An int or a traced integer; to differentiate the
            result with `jax.grad`, pass an int. It needs ``layout="contiguous"``.
        weight: the weight of a micro-batch. None: its number of rows. A function: it is called with the
            micro-batch's slices of the split arguments and returns a scalar. ``"returned"``: `fun` returns
            ``(loss, weight)``. For several losses, each divided by its own total weight, pass a mapping from
            names to such weights. Then `fun` returns a mapping from the same names to losses, or to
            ``(loss, weight)`` where the weight is ``"returned"``. With ``weight="returned"``, `fun` may also
            return a mapping from names to ``(loss, weight)``. With several losses, a returned weight that
            depends on the model's output costs a second forward.
        reduction: whether `fun` returns a ``"mean"`` or a ``"sum"`` over the rows or tokens that the weight
            counts. For several losses, one for all or a mapping from names.
        has_aux: `fun` returns ``(loss, aux)``; with ``weight="returned"``, ``((loss, weight), aux)``.
        aux: ``"stack"`` returns aux with a new leading axis, one entry for each micro-batch; ``"concat"`` is
            for arrays with one entry for each row, and returns them in the order of the batch.
        batch_argnums: positions of the arguments to split: trees of arrays with one row for each sample.
            Every micro-batch gets the scalars in them.
        batch_argnames: names of further arguments to split.
        in_axes: the axis of the rows, as in `jax.vmap`: an int for all arguments, or a list or tuple with one
            entry for each argument of batch_argnums, then of batch_argnames. An entry is an int, None
            (unsplit), or a tree of these.
        unsplit: arrays that every micro-batch gets whole, although they are in the batch or have as many rows
            as the batch: a position, a name, or a path in the batch, such as ``"table"``. Any other array
            with as many rows as the batch must be split.
        rng_argnum: the position of a random key, or tree of keys: micro-batch i gets ``fold_in(key, i)``.
            The same is done with every typed key (`jax.random.key`) in other arguments, unless `unsplit`
            names it.
        carry_argnum: the position of a state that each micro-batch passes to the next, such as batch
            statistics. `fun` returns ``(loss, state)``, with has_aux ``(loss, (aux, state))``.
        axis_name: the axes of `jax.shard_map` (or `jax.vmap`) over which the batch is split. Loss and
            gradient are those of the whole batch on all devices, by one reduction after the loop; `fun`
            itself must not reduce. Random keys differ between devices; aux and state are those of each
            device.
        layout: ``"strided"`` assigns the rows ``i, i + k, ...`` to micro-batch i of k, so that sharded rows
            stay on their devices; ``"contiguous"`` assigns blocks of rows.
        accumulator_dtype: the dtype in which gradients are summed: ``"auto"`` for float32 or wider, None for
            their own dtype, or a dtype. They are returned in the dtype of the parameters.
        nonfinite: ``"propagate"`` NaN and infinity; or ``"skip_microbatch"``: leave a micro-batch and its
            weight out if its loss or gradient is not finite.
        noise: measure the noise of the gradient, and return `Stats` with `a2`, `b2`, `q` (see `add_noise`).
        stats: return `Stats`.
        check: check weight, reduction and split, once for each structure of arguments: compare loss and
            gradient of a few rows with weighted sums over parts of these rows. If they differ, the error
            names the remedy. Inside `jax.jit` it uses synthetic values. In most cases it compiles two more
            programs, for 9 rows and for 3. False skips the check.

    Returns:
        A function with the arguments of `fun` that returns ``(value, gradient)``: the value is the loss,
        ``(loss, aux)``, ``(loss, state)`` or ``(loss, (aux, state))``; with `stats` or `noise` ``(value,
        gradient, Stats)``. Where W is 0 the loss is NaN and the gradient zero.

    Raises:
        InputError: options exclude each other; or, when called, an argument is missing or has two roles,
            an array with as many rows as the batch is not split and not in `unsplit`, or a weight is no
            scalar.
        SplitError: when called: arrays differ in length, or there are fewer rows than `steps`.
        LossSpecError: when called: `fun` returns another form, reduction or weight than declared.
        CoupledSamplesError: when called: no weighted sum of the losses of micro-batches is that of the batch.

    Examples:
        >>> def loss(w, batch):
        ...     return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
        >>> batch = {"x": jnp.arange(20.0).reshape(10, 2), "y": jnp.ones(10)}
        >>> value, gradient = jax.jit(value_and_grad(loss, microbatch_size=4))(jnp.ones(2), batch)
        >>> expected, expected_gradient = jax.value_and_grad(loss)(jnp.ones(2), batch)
        >>> bool(jnp.allclose(gradient, expected_gradient)), bool(jnp.allclose(value, expected))
        (True, True)
    """
    options = checked(
        Options(
            argnums=argnums,
            batch_argnums=batch_argnums,
            batch_argnames=named("batch_argnames", batch_argnames, (str,)),
            in_axes=in_axes,
            unsplit=named("unsplit", unsplit, (int, str)),
            rng_argnum=rng_argnum,
            carry_argnum=carry_argnum,
            microbatch_size=microbatch_size,
            steps=steps,
            num_real_microbatches=num_real_microbatches,
            layout=layout,
            weight=weight,
            reduction=reduction,
            has_aux=has_aux,
            aux=aux,
            axis_name=axis_name,
            accumulator_dtype=accumulator_dtype,
            nonfinite=nonfinite,
            noise=noise,
            stats=stats,
            check=check,
        )
    )
    return in_microbatches(fun, options)


def in_microbatches(fun: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """Return the function that `value_and_grad` returns, for checked options."""
    seen: Checked = set()  # structures of arguments with which `fun` was checked

    @functools.wraps(fun)
    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        call = call_of(fun, options, args, kwargs)
        if options.check:
            refuse_own_reductions(call)
            check_once(call, seen)
        return computed(call)

    return value_and_gradient


def call_of(fun: Callable[..., Any], options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the call: the role of each argument, and the division of the batch into micro-batches."""
    refuse_unbound(options.axis_name)
    roles, args, kwargs = roles_of(fun, options, args, kwargs)
    division = groups(roles.samples, microbatch_size=options.microbatch_size, steps=options.steps)
    refuse_more_than_there_are(options.num_real_microbatches, division)
    positions = roles.differentiated
    differentiated = (positions,) if isinstance(positions, int) else positions
    for position in differentiated:
        refuse_what_has_no_gradient(position, args[position])
    # As varying arrays, so that JAX leaves their gradients on the devices until the reduction after the loop.
    ready = tuple(
        varying(jax.tree.map(jnp.asarray, arg), options.axis_name) if position in differentiated else arg
        for position, arg in enumerate(args)
    )
    return Call(fun, options, roles, ready, kwargs, division)


def computed(call: Call) -> Any:
    """Run the loop, reduce over devices once, divide once; return the output of `value_and_grad`."""
    if (plan := terms.plan_of(call)) is not None:
        return computed_by_term(call, plan)
    options = call.options
    sums, carry, by_group = loop.gradients(call, loop.microbatch_body)
    sums, totals = summed((sums, scalars(by_group, call)), options.axis_name)
    weight, loss, samples, dropped, *noise = totals
    gradient = arithmetic.gradient_of(sums, weight, loop.chosen_of(call))
    # The sums are wider than the loss that `fun` returns.
    value = arithmetic.per_weight(loss, weight).astype(by_group[0].loss.dtype)
    output = with_state(value, joined_aux(by_group, call), carry, options)
    if not (options.stats or options.noise):
        return output, gradient
    window = Stats(weight, samples, count_microbatches(call), dropped)
    return output, gradient, with_noise(window, gradient, noise) if options.noise else window


def computed_by_term(call: Call, plan: terms.Plan) -> Any:
    """Return the output of `value_and_grad` for several losses; the plan holds their total weights."""
    sums, carry, by_group = loop.gradients(call, functools.partial(terms.body, plan=plan))
    result = terms.finished(call, plan, sums, by_group)
    output = with_state(result.loss, joined_aux(by_group, call), carry, call.options)
    if not call.options.stats:
        return output, result.gradient
    dropped = jnp.zeros((), result.weight.dtype)  # several losses exclude nonfinite="skip_microbatch"
    scalar = (result.weight, result.samples, count_microbatches(call), dropped)
    return output, result.gradient, Stats(*scalar, losses=result.losses, weights=plan.totals)


def count_microbatches(call: Call) -> Any:
    """Return the number of computed micro-batches on all devices."""
    count, axes = call.real_count, call.options.axis_name
    if call.options.num_real_microbatches is not None:
        return summed(varying(count, axes), axes)  # it may differ between devices
    for name in names(axes):
        count = count * jax.lax.axis_size(name)
    return jnp.asarray(count)


def scalars(by_group: list[PerMicrobatch], call: Call) -> Any:
    """Return the scalar sums over the micro-batches as one vector, for a single reduction over devices.

    Its entries are weight, loss, samples and the number of micro-batches left out; with noise three more.
    """
    options = call.options
    weights = jnp.concatenate([group.weight for group in by_group])
    keep = jnp.concatenate([group.keep for group in by_group])
    losses = jnp.concatenate([group.loss for group in by_group])
    weight = arithmetic.total_weight(weights)
    dtype = jnp.promote_types(weight.dtype, arithmetic.sum_dtype(losses.dtype))
    wide, counts = weights.astype(dtype), jnp.asarray(loop.sizes(call.groups), dtype)

    loss = arithmetic.loss_sum(losses, weights, keep, reduction=options.reduction_of(""), dtype=dtype)
    samples = arithmetic.pairwise_sum(arithmetic.taking_part(counts, keep))
    dropped = jnp.zeros((), dtype)
    if options.nonfinite == "skip_microbatch":
        computed = jnp.arange(call.count) < call.real_count  # padding does not count as left out
        dropped = jnp.sum((~keep & computed).astype(dtype))
    parts = [weight, loss, samples, dropped]
    if options.noise:
        squares = jnp.concatenate([group.square for group in by_group])
        parts += noise_sums(squares, wide, counts)
    return jnp.stack([part.astype(dtype) for part in parts])


def with_noise(window: Stats, gradient: Any, sums: list[Any]) -> Stats:
    """Return the stats with the fields of the noise; `sums` are those of `noise_sums`."""
    # Sums of |w g|^2, w^2 and w^2 / n. Divided by W^2: a2, q and the inverse of the effective samples.
    squares, q, per_sample = (arithmetic.per_weight(part, window.weight**2) for part in sums)
    return Stats(
        window.weight,
        window.samples,
        window.microbatches,
        window.dropped,
        a2=squares,
        b2=arithmetic.square_norm(gradient),
        q=q,
        effective_samples=arithmetic.per_weight(1.0, per_sample),
    )


def joined_aux(by_group: list[PerMicrobatch], call: Call) -> Any:
    """Return the aux of all micro-batches, stacked or concatenated by rows as `aux=` says.

    Raises:
        LossSpecError: aux is a state, or its shapes cannot be stacked or concatenated.
    """
    options = call.options
    parts = [group.aux for group in by_group]
    if options.check and options.has_aux:
        refuse_state_in_aux(parts[0], call)
    if options.aux == "concat":
        for part, group in zip(parts, call.groups, strict=True):
            for leaf in jax.tree.leaves(part):
                if leaf.ndim < 2 or leaf.shape[1] != group.size:
                    raise LossSpecError(
                        f"The aux of a micro-batch of {group.size} rows has the shape {leaf.shape[1:]}, but "
                        'aux="concat" needs arrays with one entry for each row. Use aux="stack".'
                    )
        parts = [rows_in_order(part, options.layout) for part in parts]
    shapes = [[leaf.shape[1:] for leaf in jax.tree.leaves(part)] for part in parts]
    if any(shape != shapes[0] for shape in shapes):
        raise LossSpecError(
            f"Micro-batches of two sizes returned aux of shapes {shapes[0]} and {shapes[-1]}, which cannot "
            'be stacked. Use aux="concat" for arrays with one entry for each row, or return sums.'
        )
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def with_state(value: Any, aux: Any, carry: Any, options: Options) -> Any:
    """Return the value as `jax.value_and_grad` would: the loss, with aux and state if there are any."""
    if options.has_aux and options.carry_argnum is not None:
        return value, (aux, carry)
    if options.carry_argnum is not None:
        return value, carry
    return (value, aux) if options.has_aux else value
