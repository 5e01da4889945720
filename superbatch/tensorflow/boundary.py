# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Steps at the end of a window, in the only correct order.

reduce -> divide -> finite check -> clip -> optimizer (which divides by its loss scale) -> set to zero

Norms and thresholds are those without the loss scale. A graph does the same as eager code, but raises errors
by `tf.debugging.Assert`, after the window has been set to zero, so that the next window is not affected.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from ..errors import LossSpecError, NonFiniteError, OptimizerError, WindowError
from . import arithmetic, optimizers, presence
from .options import Options
from .outcome import Applied
from .state import State, Totals, clear, read, strategy_of


def apply(state: State, optimizer: Any, options: Options, patterns: Iterable[presence.Pattern]) -> Applied:
    """Make the update of a window, and begin the next one.

    Args:
        state: the sums of the window.
        optimizer: the optimizer.
        options: the options of the accumulator.
        patterns: the sets of variables that had gradients in the calls of ``add`` so far.

    Raises:
        LossSpecError, NonFiniteError, OptimizerError, WindowError: see `Accumulator.apply`.
    """
    strategy = strategy_of(options.variables[0])
    optimizers.build(optimizer, options.given, strategy)  # variables cannot be made in a branch of a graph
    totals = read(state, options.variables)
    weight = totals.counts["weight"]
    possible = _possible(totals, patterns, len(options.variables))
    if tf.executing_eagerly() and not possible:
        if weight != 0:
            raise _no_gradient()
        applied = _applied(totals, _nan(), options, made=tf.constant(value=False))
        clear(state, strategy)
        return applied
    some = sorted(frozenset().union(*possible))
    gradients = dict(zip(some, arithmetic.per_weight([totals.sums[i] for i in some], weight), strict=True))
    scale = optimizers.scale_of(optimizer)
    norm, finite = arithmetic.finite_norm(list(gradients.values()))
    # Sums contain the loss scale; `max_grad_norm` and the result do not.
    norm = norm if scale is None else norm / arithmetic.in_dtype(scale, norm.dtype)
    gradients = _clipped(gradients, norm, finite, scale, options)
    # A LossScaleOptimizer must see an overflow: it skips the update and lowers its scale.
    overflow_is_seen = optimizers.scales_by_itself(optimizer)
    raising = options.nonfinite != "skip_update" and not overflow_is_seen
    if tf.executing_eagerly() and raising and not finite:
        clear(state, strategy)
        raise _not_finite(totals, some, options)

    def update(pattern: presence.Pattern) -> None:
        # `identity`, so that all gradients are tensors of this branch: Keras raises for a mixture.
        chosen = {i: tf.identity(_as_gradient(gradients[i], i, options)) for i in sorted(pattern)}
        optimizer.apply_gradients([(gradient, options.given[i]) for i, gradient in chosen.items()])

    # Sums without a divisor occur only with reduction="sum": with a mean, sums are 0 if the weight is.
    undivided = (weight == 0) & (norm != 0)
    if tf.executing_eagerly() and undivided:
        clear(state, strategy)
        raise _no_divisor()
    # False in a graph that was traced before a call of `add` with gradients of other variables.
    has_branch = tf.reduce_any([presence.matches(totals.present, pattern) for pattern in possible])
    expected = (weight != 0) & has_branch
    tf.cond(
        expected & (finite | overflow_is_seen),
        lambda: presence.dispatch(totals.present, possible, update),
        lambda: None,
    )
    applied = _applied(totals, norm, options, made=expected & finite, scale=scale)
    cleared = clear(state, strategy)
    if not tf.executing_eagerly():
        with tf.control_dependencies(cleared):
            _require(has_branch | (weight == 0), _unknown_pattern())
            _require(tf.logical_not(undivided), _no_divisor())
            if raising:
                _require(finite | (weight == 0), _not_finite(None, some, options))
    return applied


def means(state: State, options: Options, patterns: Iterable[presence.Pattern]) -> list[Any]:
    """Return the gradient of the window so far; None for a variable that had none."""
    totals = read(state, options.variables)
    weight = totals.counts["weight"]
    if tf.executing_eagerly() and weight == 0:
        raise WindowError(
            "The weight of this window is 0, so it has no mean. Call add() with a weight before mean()."
        )
    possible = _possible(totals, patterns, len(options.variables))
    there = frozenset().union(*possible)
    gradients = arithmetic.per_weight(totals.sums, weight)
    return [
        _as_gradient(one, index, options) if index in there else None for index, one in enumerate(gradients)
    ]


def _possible(totals: Totals, patterns: Iterable[presence.Pattern], count: int) -> list[presence.Pattern]:
    """Return the sets of variables that may have had gradients: one in eager code, every union in a graph."""
    if tf.executing_eagerly():
        there = frozenset(index for index, had in enumerate(totals.present.numpy()) if had)
        return [there] if there else []
    return presence.unions(pattern for pattern in patterns if pattern) or [frozenset(range(count))]


def _clipped(
    gradients: dict[int, Any], norm: Any, finite: Any, scale: Any | None, options: Options
) -> dict[int, Any]:
    """Return the gradients clipped by norm, then by value; gradients that are not finite stay as they are."""
    if options.max_grad_norm is not None:
        limit = tf.constant(options.max_grad_norm, norm.dtype)
        factor = tf.where(finite & (norm > limit), limit / norm, tf.ones_like(norm))
        gradients = {i: gradient * tf.cast(factor, gradient.dtype) for i, gradient in gradients.items()}
    if options.max_grad_value is not None:
        limit = options.max_grad_value * (1.0 if scale is None else scale)  # gradients contain the scale
        for index, gradient in gradients.items():
            most = arithmetic.in_dtype(limit, gradient.dtype)
            gradients[index] = tf.where(finite, tf.clip_by_value(gradient, -most, most), gradient)
    return gradients


def _as_gradient(mean: Any, index: int, options: Options) -> Any:
    return tf.cast(mean, options.variables[index].dtype)


def _applied(totals: Totals, norm: Any, options: Options, *, made: Any, scale: Any | None = None) -> Applied:
    """Return the result of a window; `scale` is the loss scale in its gradients."""
    counts = totals.counts
    weight = counts["weight"]
    (loss,) = arithmetic.per_weight([counts["loss"]], weight)
    empty = weight == 0
    numbers = {
        "made": made,
        "weight": weight,
        "loss": tf.where(empty, _nan(), loss),
        "grad_norm": tf.where(empty, _nan(), norm),
        "microbatches": tf.cast(tf.round(counts["microbatches"]), tf.int64),
        "dropped": tf.cast(tf.round(counts["dropped"]), tf.int64),
    }
    if not options.noise:
        return Applied(**numbers)
    factor = arithmetic.in_dtype(1.0 if scale is None else scale, tf.float64)
    a2, q, per_sample = (
        arithmetic.per_weight(arithmetic.per_weight([counts[name]], weight), weight)[0]
        for name in ("squares", "weights2", "weights2_per_sample")
    )
    return Applied(
        **numbers,
        a2=a2 / factor**2,
        b2=numbers["grad_norm"] ** 2,
        q=q,
        effective_samples=tf.math.reciprocal(per_sample),
    )


def _nan() -> Any:
    return tf.constant(float("nan"), tf.float64)


def _require(condition: Any, error: Exception) -> None:
    tf.debugging.Assert(condition, [str(error)])


def _no_gradient() -> OptimizerError:
    return OptimizerError(
        "No variable has a gradient in this window, so an update would change nothing. Check that the loss "
        "depends on the variables of the accumulator."
    )


def _no_divisor() -> LossSpecError:
    return LossSpecError(
        "The gradient sum of this window is not 0, but its weight is, so the sum cannot be divided; "
        "nothing was updated, and the window was dropped. Pass weights that are not all 0."
    )


def _unknown_pattern() -> WindowError:
    return WindowError(
        "apply() was traced before any add() with gradients for this window's set of variables, so its graph "
        "has no branch for this set; nothing was updated, and the window was dropped. Call each "
        "function that calls add() once before the first call of the function that calls apply()."
    )


def _not_finite(totals: Totals | None, some: list[int], options: Options) -> NonFiniteError:
    where = ""
    if totals is not None:
        bad = [index for index in some if not arithmetic.all_finite([totals.sums[index]])]
        name = options.name_of(bad[0]) if bad else ""
        where = f" (the first variable with a non-finite gradient is {name!r})" if bad else ""
    return NonFiniteError(
        f"The gradient of this window is not finite{where}; nothing was updated, and the window was dropped. "
        'Check its micro-batches, or pass nonfinite="skip_microbatch" to leave such a micro-batch and its '
        'weight out, or nonfinite="skip_update" to drop the window without an error.'
    )
