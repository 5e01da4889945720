# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Steps at the end of a window, in the only correct order.

reduce -> normalise -> unscale -> finite check -> clip -> optimizer -> set to zero

A graph does the same as eager code. An error that only the running graph can find is a `tf.debugging.Assert`,
after the window was given up, so that the next window begins clean.
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
    """Make the update of a window, and begin the next one."""
    strategy = strategy_of(options.variables[0])
    optimizers.build(optimizer, options.given, strategy)
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
    norm = norm if scale is None else norm / arithmetic.in_dtype(scale, norm.dtype)
    gradients = _clipped(gradients, norm, finite, scale, options)
    overflow_is_seen = optimizers.scales_by_itself(optimizer)
    raising = options.nonfinite != "skip_update" and not overflow_is_seen
    if tf.executing_eagerly() and raising and not finite:
        clear(state, strategy)
        raise _not_finite(totals, some, options)

    def update(pattern: presence.Pattern) -> None:
        # In a branch of a graph all gradients have to be made there, or none: Keras refuses a mixture.
        found = {i: tf.identity(_as_gradient(gradients[i], i, options)) for i in sorted(pattern)}
        optimizer.apply_gradients([(gradient, options.given[i]) for i, gradient in found.items()])

    # With a mean the sums are 0 where the weight is.
    undivided = (weight == 0) & (norm != 0)
    if tf.executing_eagerly() and undivided:
        clear(state, strategy)
        raise _no_divisor()
    known = tf.reduce_any([presence.matches(totals.present, pattern) for pattern in possible])
    expected = (weight != 0) & known
    tf.cond(
        expected & (finite | overflow_is_seen),
        lambda: presence.dispatch(totals.present, possible, update),
        lambda: None,
    )
    applied = _applied(totals, norm, options, made=expected & finite, scale=scale)
    cleared = clear(state, strategy)
    if not tf.executing_eagerly():
        with tf.control_dependencies(cleared):
            _require(known | (weight == 0), _unknown_pattern())
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
            "In this window nothing has weight, so it has no mean. Call add() before, with weight."
        )
    possible = _possible(totals, patterns, len(options.variables))
    there = frozenset().union(*possible)
    found = arithmetic.per_weight(totals.sums, weight)
    return [_as_gradient(one, index, options) if index in there else None for index, one in enumerate(found)]


def _possible(totals: Totals, patterns: Iterable[presence.Pattern], count: int) -> list[presence.Pattern]:
    """The sets of variables that can have had a gradient: the one there is, or what a graph must expect."""
    if tf.executing_eagerly():
        there = frozenset(index for index, had in enumerate(totals.present.numpy()) if had)
        return [there] if there else []
    return presence.unions(pattern for pattern in patterns if pattern) or [frozenset(range(count))]


def _clipped(
    gradients: dict[int, Any], norm: Any, finite: Any, scale: Any | None, options: Options
) -> dict[int, Any]:
    """Clip by norm as `tf.clip_by_global_norm` does, then by value; an infinity stays one."""
    if options.max_grad_norm is not None:
        limit = tf.constant(options.max_grad_norm, norm.dtype)
        factor = tf.where(finite & (norm > limit), limit / norm, tf.ones_like(norm))
        gradients = {i: gradient * tf.cast(factor, gradient.dtype) for i, gradient in gradients.items()}
    if options.max_grad_value is not None:
        limit = options.max_grad_value * (1.0 if scale is None else scale)
        for index, gradient in gradients.items():
            most = arithmetic.in_dtype(limit, gradient.dtype)
            gradients[index] = tf.where(finite, tf.clip_by_value(gradient, -most, most), gradient)
    return gradients


def _as_gradient(mean: Any, index: int, options: Options) -> Any:
    return tf.cast(mean, options.variables[index].dtype)


def _applied(totals: Totals, norm: Any, options: Options, *, made: Any, scale: Any | None = None) -> Applied:
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
        "The losses of this window gave no gradient to any variable, so an update would change nothing. "
        "Check that the loss depends on the variables that the accumulator was made with."
    )


def _no_divisor() -> LossSpecError:
    return LossSpecError(
        "The losses of this window are sums that are not 0, but its weight is 0, so they cannot be divided; "
        "nothing was updated, and the window was given up. Pass weights that are not all 0."
    )


def _unknown_pattern() -> WindowError:
    return WindowError(
        "The window has gradients of other variables than any call of add() had when apply() was traced, so "
        "the graph of apply() has no branch for them; nothing was updated, and the window was given up. "
        "Call each function that adds before the first call of the one that applies."
    )


def _not_finite(totals: Totals | None, some: list[int], options: Options) -> NonFiniteError:
    where = ""
    if totals is not None:
        bad = [index for index in some if not arithmetic.all_finite([totals.sums[index]])]
        where = f" (the first variable with such a gradient is {options.name_of(bad[0])!r})" if bad else ""
    return NonFiniteError(
        f"A micro-batch of this window has a gradient that is not finite, so the mean is not finite{where}; "
        "nothing was updated, and the window was given up. "
        'Check its micro-batches; nonfinite="skip_microbatch" leaves such a one (and its weight) out, '
        'nonfinite="skip_update" gives up the whole update.'
    )
