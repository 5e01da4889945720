# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""An Optax optimizer that updates once per window, for micro-batches that come one at a time."""

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
    """The state of `multi_steps`; every counter is an array of its own, so that the state can be donated.

    Optax's names can be read, too: `mini_step`, `gradient_step`, `inner_opt_state`, `acc_grads`.

    Attributes:
        microbatches: of the window in flight.
        updates: that were made.
        weight: ``W`` of the window in flight, the divisor of its sums (1 for a total); see `weight_rest`.
        weight_rest: what rounding took from `weight`.
        sums: of the gradients of the window in flight.
        inner: the state of the optimizer.
        updated: whether the last call made an update.
        skipped: micro-batches (``"skip_microbatch"``, `should_skip_update_fn`) or windows
            (``"skip_update"``) that were left out.
        skip_state: what `should_skip_update_fn` returned last.
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
        """Micro-batches of the window in flight: `microbatches`."""
        return self.microbatches

    @property
    def gradient_step(self) -> Any:
        """Updates that were made: `updates`."""
        return self.updates

    @property
    def inner_opt_state(self) -> Any:
        """State of the optimizer: `inner`."""
        return self.inner

    @property
    def acc_grads(self) -> Any:
        """Gradient of the window in flight so far: `sums` divided by `weight`."""
        return arithmetic.gradient_of(self.sums, self.weight + self.weight_rest, self.sums)


class _Window(NamedTuple):
    """Input of the boundary: the window of one call with its micro-batch added."""

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

    ``update(gradients, state, params, weight=w, flush=last)`` adds ``w_i g_i`` (``g_i`` for a sum), and at
    the end of a window calls the optimizer once with the sums over ``W``; in between its updates are zeros,
    and the optimizer is not evaluated. Within one jitted update `value_and_grad` needs less memory.

    Args:
        optimizer: any Optax transformation.
        every: micro-batches per window, also a traced integer; or a function of the number of updates made.
        reduction: what the gradients are of: a ``"mean"`` over the micro-batch, a ``"sum"`` over what the
            weight counts, or a ``"total"``, which nothing divides.
        accumulator_dtype: gradients are summed in ``"auto"``: float32 or wider; None: their own dtype; or
            this dtype.
        nonfinite: ``"propagate"``: the optimizer sees NaN, and the next window begins clean;
            ``"skip_microbatch"`` leaves the micro-batch and its weight out; ``"skip_update"`` gives up
            the window.
        should_skip_update_fn: a function of gradients, updates made and parameters ``-> (skip, state)``,
            such as `optax.skip_not_finite`. A micro-batch that it rejects is as if it had never been.

    Returns:
        A transformation whose ``update`` takes two more arguments: `weight`, of the micro-batch (1 by
        default; 0 contributes nothing, NaN or not), and `flush`: end the window now, a tail. A window of
        weight 0 makes no update. More arguments go to the optimizer. The function `flush` ends a window
        without a micro-batch.

    Raises:
        InputError: an option has an unknown value; or, when called, `should_skip_update_fn` returns no
            boolean.

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
    """Tell whether the value is a scalar array of integers, which may be traced."""
    return isinstance(every, jax.Array) and every.shape == () and jnp.issubdtype(every.dtype, jnp.integer)


def _init(plan: _Plan, params: Any) -> MultiStepsState:
    def zeros(leaf: Any) -> Any:
        dtype = arithmetic.sum_dtype(jnp.result_type(leaf), plan.accumulator_dtype)
        return jnp.zeros(jnp.shape(leaf), dtype)

    counters = [jnp.zeros((), jnp.int32) for _ in range(3)]
    weights = [jnp.zeros((), jnp.result_type(float)) for _ in range(2)]
    # As in Optax, the function is asked once about zeros: its state must have its form from the start.
    skip_state = _asked(plan, jax.tree.map(jnp.zeros_like, params), counters[1], params)[1]
    return MultiStepsState(
        microbatches=counters[0],
        updates=counters[1],
        weight=weights[0],
        weight_rest=weights[1],
        sums=jax.tree.map(zeros, params),
        inner=plan.inner.init(params),
        updated=jnp.zeros((), bool),
        skipped=counters[2],
        # Its arrays may be one and the same, which cannot be donated twice.
        skip_state=jax.tree.map(jnp.copy, skip_state),
    )


def _asked(plan: _Plan, updates: Any, count: Any, params: Any) -> tuple[Any, Any]:
    """Return what `should_skip_update_fn` says about a micro-batch, and its state.

    Raises:
        InputError: it returns something else.
    """
    if plan.should_skip is None:
        return jnp.zeros((), bool), ()
    answer = plan.should_skip(updates, count, params)
    if isinstance(answer, tuple) and len(answer) == 2:
        skip = jnp.asarray(answer[0])
        if (skip.dtype, skip.shape) == (jnp.bool_, ()):
            return skip, answer[1]
        found = f"({skip.dtype} of shape {skip.shape}, state)"
    else:
        found = type(answer).__name__
    raise InputError(
        f"should_skip_update_fn returned {found}. Return (skip, state), where skip is one boolean, as "
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
    skip, skip_state = _asked(plan, updates, state.updates, params)
    window = _added(plan, state, updates, arithmetic.as_weight(weight, "weight"), skip)
    steps = plan.every(state.updates) if callable(plan.every) else plan.every
    # A rejected micro-batch does not end a window; a flush does, with what came before.
    due = ((window.microbatches >= steps) & ~skip) | jnp.asarray(flush, bool)
    total = window.weight + window.weight_rest
    # `!= 0` and not `> 0`: a weight of NaN must reach the optimizer.
    make, skipped = due & (total != 0), window.skipped
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
    # A new window begins with zeros, not with 0 x sums, which would keep a NaN.
    begun = jax.tree.map(lambda leaf: jnp.where(due, jnp.zeros_like(leaf), leaf), window)
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
    """Return the new state of an optimizer in the dtypes of the old one, which wider gradients would widen.

    Examples:
        >>> in_dtypes_of(jnp.bfloat16(1), jnp.float32(2)).dtype.name
        'bfloat16'
    """
    if jax.tree.structure(old) != jax.tree.structure(new):
        return new  # `lax.cond` raises an error that names the difference

    def one(before: Any, after: Any) -> Any:
        dtype = jnp.result_type(before)
        return after if jnp.result_type(after) == dtype else jnp.asarray(after).astype(dtype)

    return jax.tree.map(one, old, new)


def _added(plan: _Plan, state: MultiStepsState, updates: Any, weight: Any, skip: Any) -> _Window:
    """The window in flight with one more micro-batch, unless it is to be skipped."""
    keep = arithmetic.takes_part(weight, plan.reduction)
    skipped, keep = state.skipped + (skip & keep), keep & ~skip
    weight = jnp.where(skip, jnp.zeros_like(weight), weight)
    if plan.nonfinite == "skip_microbatch":
        finite = arithmetic.all_finite(updates)
        skipped, keep = skipped + (~finite & keep), keep & finite
        weight = jnp.where(finite, weight, jnp.zeros_like(weight))

    def add(total: Any, leaf: Any) -> Any:
        part = leaf.astype(total.dtype)
        if plan.reduction == "mean":
            part = part * weight.astype(jnp.finfo(total.dtype).dtype)
        return total + jnp.where(keep, part, jnp.zeros_like(part))

    sums = jax.tree.map(add, state.sums, updates)
    counted = jnp.where(weight < 0, jnp.nan, weight.astype(state.weight.dtype))
    if plan.reduction == "total":
        # The divisor is 1 once something has come; NaN stays NaN.
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
    """End the window in flight without another micro-batch: the tail that a loader leaves behind.

    Args:
        optimizer: from `multi_steps`.
        state: its state.
        params: the parameters.

    Returns:
        The updates (zeros where nothing waits) and the new state.

    Examples:
        >>> optimizer = multi_steps(optax.sgd(1.0), every=4)
        >>> state = optimizer.init(jnp.zeros(1))
        >>> _, state = optimizer.update(jnp.ones(1), state, jnp.zeros(1), weight=8)
        >>> flush(optimizer, state, jnp.zeros(1))[0].tolist()
        [-1.0]
    """
    nothing = jax.tree.map(jnp.zeros_like, params)
    return optimizer.update(nothing, state, params, weight=0, flush=True)
