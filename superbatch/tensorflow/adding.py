# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Call of ``add``: check the gradients of a micro-batch, weight them, and add them on this replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from .. import normalize
from ..errors import InputError, WindowError
from . import arithmetic
from .options import Options
from .state import NAMES, State


@dataclass(frozen=True)
class Microbatch:
    """The checked arguments of one call of ``add``.

    Attributes:
        gradients: for each variable, a dense or sparse tensor, or None.
        weight: a Python number, or a float64 scalar whose value is known only when the graph runs.
        loss: a float64 scalar; NaN if none was passed.
        samples: the number of samples, in the same form as `weight`.
    """

    gradients: list[Any]
    weight: Any
    loss: Any
    samples: Any


def check(gradients: Any, weight: Any, loss: Any, samples: Any, options: Options) -> Microbatch:
    """Return the arguments of ``add`` if each is valid.

    Raises:
        InputError: an argument is not valid.
        WindowError: the gradients are values of several replicas.
    """
    count = len(options.variables)
    if not isinstance(gradients, list | tuple) or len(gradients) != count:
        given = (
            f"a list of {len(gradients)}"
            if isinstance(gradients, list | tuple)
            else f"a {type(gradients).__name__}"
        )
        raise InputError(
            f"add() was given {given} as gradients of {count} variables. Pass tape.gradient(loss, variables) "
            "with the variables of the accumulator: one gradient, or None, for each."
        )
    checked = [
        None if gradient is None else _gradient(gradient, variable, options.name_of(index))
        for index, (gradient, variable) in enumerate(zip(gradients, options.variables, strict=True))
    ]
    if weight is None:  # a default of 1 would make every forgotten weight a mean of means
        raise InputError(
            "add() needs weight=, the weight of the micro-batch. Pass weight=len(rows) for a mean over rows, "
            "weight=tf.reduce_sum(mask) for a mean over tokens, or weight=1 if all micro-batches count the "
            "same."
        )
    weight = arithmetic.as_count(weight, "weight")
    samples = weight if samples is None else arithmetic.as_count(samples, "samples")
    return Microbatch(checked, weight, _loss(loss), samples)


def _gradient(gradient: Any, variable: Any, name: str) -> Any:
    if isinstance(gradient, tf.distribute.DistributedValues):
        raise WindowError(
            f"The gradient of {name!r} has a value for each replica, but each replica must add its own. Call "
            "add() in the function that strategy.run runs."
        )
    sparse = isinstance(gradient, tf.IndexedSlices)
    if not sparse:
        try:
            gradient = tf.convert_to_tensor(gradient)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"The gradient of {name!r} is a {type(gradient).__name__}, not a tensor. Pass the result of "
                "tape.gradient."
            ) from error
    shape, wanted = (
        (gradient.values.shape[1:], variable.shape[1:]) if sparse else (gradient.shape, variable.shape)
    )
    if not shape.is_compatible_with(wanted):
        raise InputError(
            f"The gradient of {name!r}{' (a row of it)' if sparse else ''} has the shape {shape}, but the "
            f"variable has {wanted}. Pass the gradients in the order of the variables of the accumulator."
        )
    fits = gradient.dtype.is_floating or gradient.dtype.is_complex
    if not fits or (gradient.dtype.is_complex and not variable.dtype.is_complex):
        raise InputError(
            f"The gradient of {name!r} has the dtype {gradient.dtype.name}, but the variable has "
            f"{variable.dtype.name}. Pass the result of tape.gradient."
        )
    return gradient


def _loss(loss: Any) -> Any:
    """Return the loss as float64; NaN without a loss, as the mean of some losses is not that of the batch."""
    if loss is None:
        return tf.constant(float("nan"), tf.float64)
    try:
        value = tf.convert_to_tensor(loss)
    except (TypeError, ValueError):
        value = tf.constant("")
    if not (value.dtype.is_floating and value.shape.is_compatible_with(())):
        raise InputError(
            f"loss={loss!r} is not one real number. Pass the loss that the tape differentiated, without a "
            "loss scale, or None."
        )
    return tf.cast(value, tf.float64)


def add(state: State, microbatch: Microbatch, options: Options) -> None:
    """Add one micro-batch to the sums; with a mean, one of weight 0 contributes nothing, even if NaN."""
    zero = tf.zeros((), tf.float64)
    # True, False, or a tensor if the weight is known only when the graph runs.
    keep: Any = normalize.takes_part(microbatch.weight, reduction=options.reduction)
    dropped = zero
    with tf.control_dependencies(_requirements(microbatch)):
        if options.nonfinite == "skip_microbatch":
            present = [_values(gradient) for gradient in microbatch.gradients if gradient is not None]
            finite = arithmetic.all_finite(present) if present else tf.constant(value=True)
            dropped = tf.cast(keep & tf.logical_not(finite), tf.float64)
            keep = keep & finite
        squares = zero
        if tf.is_tensor(keep):
            squares = tf.cond(keep, lambda: _contribute(state, microbatch, options), lambda: zero)
        elif keep:
            squares = _contribute(state, microbatch, options)
        _count(state, microbatch, options, _Outcome(keep, dropped, squares))


class _Outcome(NamedTuple):
    """Result of adding the gradients of a micro-batch.

    Attributes:
        keep: whether it takes part; a bool or a tensor.
        dropped: 1 if it was left out as not finite, else 0.
        squares: the squared norm of its weighted gradient; 0 without noise.
    """

    keep: Any
    dropped: Any
    squares: Any


def _requirements(microbatch: Microbatch) -> list[Any]:
    """Return assertions on counts that are known only when the graph runs; if one fails, nothing is added."""
    traced = {"weight": microbatch.weight, "samples": microbatch.samples}
    return [
        tf.debugging.Assert(
            arithmetic.countable(value),
            [f"The {name} below must be finite and not negative. Pass a count.", value],
        )
        for name, value in traced.items()
        if tf.is_tensor(value)
    ]


def _contribute(state: State, microbatch: Microbatch, options: Options) -> Any:
    """Add the weighted gradients to the sums; return the sum of their squares with noise, else 0."""
    factor: Any = normalize.after_forward_scale(microbatch.weight, reduction=options.reduction)
    squares = [tf.zeros((), tf.float64)]
    for gradient, total in zip(microbatch.gradients, state.sums, strict=True):
        if gradient is None:
            continue
        part = tf.cast(_values(gradient), total.dtype)
        if tf.is_tensor(factor) or factor != 1:
            part *= arithmetic.in_dtype(factor, total.dtype)
        if options.noise:
            squares.append(arithmetic.square_sum(_joined(gradient, part)))
        if isinstance(gradient, tf.IndexedSlices):
            # Not `total.scatter_add`, which variables on replicas do not have.
            tf.raw_ops.ResourceScatterAdd(resource=total.handle, indices=gradient.indices, updates=part)
        else:
            total.assign_add(part, read_value=False)
    return tf.add_n(squares)


def _joined(gradient: Any, part: Any) -> Any:
    """Return a gradient with the rows of repeated indices added: the norm is that of the sum."""
    if not isinstance(gradient, tf.IndexedSlices):
        return part
    indices, position = tf.unique(gradient.indices)
    return tf.math.unsorted_segment_sum(part, position, tf.size(indices))


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _count(state: State, microbatch: Microbatch, options: Options, outcome: _Outcome) -> None:
    """Add a micro-batch to the counters: weight, loss and noise only if it takes part, the calls always."""
    weight = arithmetic.in_dtype(microbatch.weight, tf.float64)
    counted = weight
    if tf.is_tensor(microbatch.weight):
        # XLA removes assertions. So an invalid weight becomes NaN, which stops the update.
        counted = tf.where(arithmetic.countable(weight), weight, float("nan"))
    factor = normalize.after_forward_scale(microbatch.weight, reduction=options.reduction)
    taking_part = {
        "weight": counted,
        "loss": arithmetic.in_dtype(factor, tf.float64) * microbatch.loss,
    }
    if options.noise:
        squared = tf.square(weight)
        taking_part |= {"squares": outcome.squares, "weights2": squared}
        taking_part["weights2_per_sample"] = squared / arithmetic.in_dtype(microbatch.samples, tf.float64)
    present = [0.0 if gradient is None else 1.0 for gradient in microbatch.gradients]
    parts = _vector(taking_part, present)
    calls = _vector({"microbatches": 1.0, "dropped": outcome.dropped}, [0.0] * len(present))
    # `where`, not a product with 0: the loss of no tokens is NaN.
    parts = tf.where(outcome.keep, parts, tf.zeros_like(parts))
    state.counts.assign_add(parts + calls, read_value=False)


def _vector(named: dict[str, Any], present: list[float]) -> Any:
    """Return the vector of counters: those of `NAMES` in order, then one for each variable."""
    head = [tf.cast(named.get(name, 0.0), tf.float64) for name in NAMES]
    return tf.concat([tf.stack(head), tf.constant(present, tf.float64)], 0)
