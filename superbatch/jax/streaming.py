# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Optax transformation that updates once per window, for micro-batches that arrive one at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .. import normalize
from ..errors import InputError
from ..schedule import check_steps
from . import arithmetic

NonFinite = Literal["propagate", "skip_microbatch", "skip_update"]
ShouldSkip = Callable[[Any, Any, Any], tuple[Any, Any]]


class MultiStepsState(NamedTuple):
    """State of `multi_steps`. No two fields share an array, so that the state can be donated.

    Optax's names are properties: `mini_step`, `gradient_step`, `inner_opt_state`, `acc_grads`.

    Attributes:
        microbatches: the number of micro-batches in the open window.
        updates: the number of updates made.
        weight: ``W`` of the open window, the divisor of its sums (1 for a total), without `weight_rest`.
        weight_rest: the rounding error of `weight`, to be added to it.
        sums: the summed gradients of the open window.
        inner: the state of the wrapped optimizer.
        updated: whether the last call made an update.
        skipped: the number of micro-batches (``"skip_microbatch"``, `should_skip_update_fn`) or windows
            (``"skip_update"``) that were left out.
        skip_state: the state that `should_skip_update_fn` returned last.
    """

    microbatches: Any
    updates: Any
    weight: Any
    weight_rest: Any
    sums: Any
    inner: Any
    updated: Any
    skipped: Any
    skip_state: Any = ()

    @property
    def mini_step(self) -> Any:
        """Number of micro-batches in the open window: `microbatches`."""
        return self.microbatches

    @property
    def gradient_step(self) -> Any:
        """Number of updates made: `updates`."""
        return self.updates

    @property
    def inner_opt_state(self) -> Any:
        """State of the wrapped optimizer: `inner`."""
        return self.inner

    @property
    def acc_grads(self) -> Any:
        """Gradient of the open window so far: `sums` divided by `weight`."""
        return arithmetic.gradient_of(self.sums, self.weight + self.weight_rest, self.sums)


class _Window(NamedTuple):
    """The open window after the micro-batch of this call was added; fields as in `MultiStepsState`."""

    microbatches: Any
    weight: Any
    weight_rest: Any
    sums: Any
    skipped: Any


def multi_steps(
    optimizer: Any,
    every: int | Any | Callable[[Any], Any],
    *,
    reduction: normalize.Reduction = "mean",
    accumulator_dtype: Any = "auto",
    nonfinite: NonFinite = "propagate",
    should_skip_update_fn: ShouldSkip | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an Optax optimizer so that every k micro-batches make one exact update.

    ``update(gradients, state, params, weight=w, flush=last)`` adds ``w_i g_i`` (``g_i`` for a sum) to the
    window. At the end of the window it calls the optimizer once, with the sums divided by ``W``. Before that
    it returns zeros and does not call the optimizer. If all micro-batches of an update are at hand in one
    jitted function, `value_and_grad` needs less memory.

    Args:
        optimizer: any Optax transformation.
        every: micro-batches per window: an int, a traced integer, or a function of the number of updates
            made.
        reduction: whether the loss of a micro-batch is a ``"mean"`` or a ``"sum"`` over the rows or tokens
            that the weight counts, or a ``"total"``, which is not divided.
        accumulator_dtype: the dtype in which gradients are summed: ``"auto"`` for float32 or wider, None for
            their own dtype, or a dtype.
        nonfinite: ``"propagate"``: the optimizer gets the NaN, but the next window does not;
            ``"skip_microbatch"``: leave the micro-batch and its weight out; ``"skip_update"``: drop the
            window.
        should_skip_update_fn: a function ``(gradients, updates made, parameters) -> (skip, state)``, such as
            `optax.skip_not_finite`. A rejected micro-batch is ignored, and does not count.

    Returns:
        A transformation whose ``update`` takes two more arguments. `weight` is the weight of the micro-batch
        (default: 1). With ``reduction="mean"``, a micro-batch of weight 0 contributes nothing, even if its
        gradient is NaN. ``flush=True`` ends the window with this micro-batch, for a shorter last window. A
        window of weight 0 makes no update. Further arguments are passed to the optimizer. To end a window
        without a micro-batch, call the function `flush`.

    Raises:
        InputError: an option has an unknown value; or, when called, `should_skip_update_fn` does not return
            a boolean and a state.

    Examples:
        >>> optimizer = multi_steps(optax.sgd(1.0), every=2)
        >>> params = jnp.zeros(1)
        >>> state = optimizer.init(params)
        >>> for gradient, tokens in ((1.0, 1), (2.0, 3)):
        ...     updates, state = optimizer.update(jnp.full(1, gradient), state, params, weight=tokens)
        >>> updates.tolist(), int(state.updates)
        ([-1.75], 1)
    """
    normalize.check_reduction(reduction)
    arithmetic.check_sum_dtype(accumulator_dtype)
    if not (callable(every) or _is_count(every)):
        check_steps(every, "every")
    if nonfinite not in ("propagate", "skip_microbatch", "skip_update"):
        choices = "'propagate', 'skip_microbatch' or 'skip_update'"
        raise InputError(f"nonfinite={nonfinite!r} is unknown. Pass {choices}.")
    inner = optax.with_extra_args_support(optimizer)
    plan = _Plan(inner, every, reduction, accumulator_dtype, nonfinite, should_skip_update_fn)
    return optax.GradientTransformationExtraArgs(partial(_init, plan), partial(_update, plan))


class _Plan(NamedTuple):
    """The checked arguments of `multi_steps`."""

    inner: optax.GradientTransformationExtraArgs
    every: int | Any | Callable[[Any], Any]
    reduction: normalize.Reduction
    accumulator_dtype: Any
    nonfinite: NonFinite
    should_skip: ShouldSkip | None


def _is_count(every: Any) -> bool:
    """Return True for a scalar array of integers, which may be traced."""
    return isinstance(every, jax.Array) and every.shape == () and jnp.issubdtype(every.dtype, jnp.integer)


def _init(plan: _Plan, params: Any) -> MultiStepsState:
    """Return the state before the first micro-batch."""

    def zeros(leaf: Any) -> Any:
        dtype = arithmetic.sum_dtype(jnp.result_type(leaf), plan.accumulator_dtype)
        return jnp.zeros(jnp.shape(leaf), dtype)

    # An array for each field: a state with a shared array cannot be donated.
    counters = [jnp.zeros((), jnp.int32) for _ in range(3)]
    weights = [jnp.zeros((), jnp.result_type(float)) for _ in range(2)]
    # As in Optax, one call with zeros: the state needs the structure of the function's state from the start.
    skip_state = _skip_of(plan, jax.tree.map(jnp.zeros_like, params), counters[1], params)[1]
    return MultiStepsState(
        microbatches=counters[0],
        updates=counters[1],
        weight=weights[0],
        weight_rest=weights[1],
        sums=jax.tree.map(zeros, params),
        inner=plan.inner.init(params),
        updated=jnp.zeros((), bool),
        skipped=counters[2],
        # Copies: the function may use one array twice, and an array cannot be donated twice.
        skip_state=jax.tree.map(jnp.copy, skip_state),
    )


def _skip_of(plan: _Plan, updates: Any, count: Any, params: Any) -> tuple[Any, Any]:
    """Call `should_skip_update_fn`; return whether to skip the micro-batch, and the function's state.

    Raises:
        InputError: it does not return a boolean and a state.
    """
    if plan.should_skip is None:
        return jnp.zeros((), bool), ()
    answer = plan.should_skip(updates, count, params)
    if isinstance(answer, tuple) and len(answer) == 2:
        skip = jnp.asarray(answer[0])
        if (skip.dtype, skip.shape) == (jnp.bool_, ()):
            return skip, answer[1]
        returned = f"({skip.dtype} of shape {skip.shape}, state)"
    else:
        returned = type(answer).__name__
    raise InputError(
        f"should_skip_update_fn returned {returned}. Return (skip, state), where skip is one boolean, as "
        "optax.skip_not_finite does."
    )


def _update(
    plan: _Plan,
    updates: Any,
    state: Any,
    params: Any = None,
    *,
    weight: Any = 1,
    flush: Any = False,
    **extra: Any,
) -> tuple[Any, MultiStepsState]:
    """Add a micro-batch, and make the update if it ends a window; see `multi_steps`."""
    skip, skip_state = _skip_of(plan, updates, state.updates, params)
    window = _added(plan, state, updates, arithmetic.as_weight(weight, "weight"), skip)
    steps = plan.every(state.updates) if callable(plan.every) else plan.every
    # A rejected micro-batch ends no window, but `flush` does: the earlier micro-batches make the update.
    ends = ((window.microbatches >= steps) & ~skip) | jnp.asarray(flush, bool)
    total = window.weight + window.weight_rest
    # `!= 0`, not `> 0`: a weight of NaN must reach the optimizer.
    make, skipped = ends & (total != 0), window.skipped
    if plan.nonfinite == "skip_update":
        finite = arithmetic.all_finite((window.sums, total))
        make, skipped = make & finite, skipped + (make & ~finite)

    def apply(inner_state: Any) -> tuple[Any, Any]:
        mean = arithmetic.gradient_of(window.sums, total, updates)
        made, new = plan.inner.update(mean, inner_state, params, **extra)
        return made, in_dtypes_of(inner_state, new)

    def wait(inner_state: Any) -> tuple[Any, Any]:
        shapes, _ = jax.eval_shape(apply, inner_state)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), inner_state

    made, inner_state = lax.cond(make, apply, wait, state.inner)
    # `where`, not a product with 0, which would carry a NaN into the next window.
    begun = jax.tree.map(lambda leaf: jnp.where(ends, jnp.zeros_like(leaf), leaf), window)
    return made, MultiStepsState(
        microbatches=begun.microbatches,
        updates=state.updates + make,
        weight=begun.weight,
        weight_rest=begun.weight_rest,
        sums=begun.sums,
        inner=inner_state,
        updated=make,
        skipped=skipped,
        skip_state=in_dtypes_of(state.skip_state, skip_state),
    )


def in_dtypes_of(old: Any, new: Any) -> Any:
    """Return the new state of an optimizer in the dtypes of the old one.

    Gradients in a wider dtype than the parameters would otherwise widen the state.

    Examples:
        >>> in_dtypes_of(jnp.bfloat16(1), jnp.float32(2)).dtype.name
        'bfloat16'
    """
    if jax.tree.structure(old) != jax.tree.structure(new):
        return new  # `lax.cond` then raises an error that names the difference

    def one(before: Any, after: Any) -> Any:
        dtype = jnp.result_type(before)
        return after if jnp.result_type(after) == dtype else jnp.asarray(after).astype(dtype)

    return jax.tree.map(one, old, new)


def _added(plan: _Plan, state: MultiStepsState, updates: Any, weight: Any, skip: Any) -> _Window:
    """Return the open window with one more micro-batch, unless that is to be skipped."""
    keep = arithmetic.takes_part(weight, plan.reduction)
    skipped, keep = state.skipped + (skip & keep), keep & ~skip
    weight = jnp.where(skip, jnp.zeros_like(weight), weight)
    if plan.nonfinite == "skip_microbatch":
        finite = arithmetic.all_finite(updates)
        skipped, keep = skipped + (~finite & keep), keep & finite
        weight = jnp.where(finite, weight, jnp.zeros_like(weight))

    factor = weight if plan.reduction == "mean" else None
    sums = jax.tree.map(
        lambda total, leaf: total + arithmetic.weighted(leaf, total.dtype, factor, keep), state.sums, updates
    )
    counted = jnp.where(weight < 0, jnp.nan, weight.astype(state.weight.dtype))
    if plan.reduction == "total":
        # A total is not divided: its divisor is 1 as soon as a micro-batch has weight. NaN stays NaN.
        first = (state.weight == 0) & (counted != 0)
        counted = jnp.where(jnp.isnan(counted), counted, first.astype(counted.dtype))
    total, rest = arithmetic.add_compensated(state.weight, state.weight_rest, counted)
    return _Window(state.microbatches + ~skip, total, rest, sums, skipped)


def has_updated(state: MultiStepsState) -> Any:
    """Return whether the last call of `multi_steps` made an update, as a boolean array.

    Examples:
        >>> optimizer = multi_steps(optax.sgd(1.0), every=1)
        >>> state = optimizer.init(jnp.zeros(1))
        >>> _, after = optimizer.update(jnp.ones(1), state, jnp.zeros(1))
        >>> bool(has_updated(state)), bool(has_updated(after))
        (False, True)
    """
    return state.updated


def flush(
    optimizer: optax.GradientTransformationExtraArgs, state: MultiStepsState, params: Any
) -> tuple[Any, Any]:
    """Make the update of an incomplete window, for example at the end of an epoch.

    Args:
        optimizer: the transformation from `multi_steps`.
        state: its state.
        params: the parameters.

    Returns:
        The updates (zeros if no micro-batch with weight is in the window) and the new state.

    Examples:
        >>> optimizer = multi_steps(optax.sgd(1.0), every=4)
        >>> state = optimizer.init(jnp.zeros(1))
        >>> _, state = optimizer.update(jnp.ones(1), state, jnp.zeros(1), weight=8)
        >>> flush(optimizer, state, jnp.zeros(1))[0].tolist()
        [-1.0]
    """
    nothing = jax.tree.map(jnp.zeros_like, params)
    return optimizer.update(nothing, state, params, weight=0, flush=True)
