# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""One micro-batch: its gradients checked, weighted, and added to the sums; no replica waits for another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
        gradients: one dense or sparse tensor, or None, per variable.
        weight: a Python number, or a float64 scalar that is known when the graph runs.
        loss: a float64 scalar, NaN if it was not given.
        samples: as `weight`.
    """

    gradients: list[Any]
    weight: Any
    loss: Any
    samples: Any


def check(gradients: Any, weight: Any, loss: Any, samples: Any, options: Options) -> Microbatch:
    """Return the arguments of ``add`` if each is valid; nothing was added yet.

    Raises:
        InputError: one is not valid.
        WindowError: the gradients are those of all replicas.
    """
    count = len(options.variables)
    if not isinstance(gradients, list | tuple) or len(gradients) != count:
        given = (
            f"{len(gradients)}" if isinstance(gradients, list | tuple) else f"a {type(gradients).__name__}"
        )
        raise InputError(
            f"add() was given {given} as gradients of {count} variables. Pass tape.gradient(loss, variables) "
            "with the variables that the accumulator was made with: one gradient, or None, for each."
        )
    checked = [
        None if gradient is None else _gradient(gradient, variable, options.name_of(index))
        for index, (gradient, variable) in enumerate(zip(gradients, options.variables, strict=True))
    ]
    if weight is None:  # a default of 1 would make every forgotten weight a mean of means
        raise InputError(
            "add() without weight= does not know how much the micro-batch counts. Pass weight=len(rows) for "
            "a mean over rows, weight=tf.reduce_sum(mask) for a mean over tokens, or weight=1 where all "
            "micro-batches count the same."
        )
    weight = arithmetic.as_count(weight, "weight")
    samples = weight if samples is None else arithmetic.as_count(samples, "samples")
    return Microbatch(checked, weight, _loss(loss), samples)


def _gradient(gradient: Any, variable: Any, name: str) -> Any:
    if isinstance(gradient, tf.distribute.DistributedValues):
        raise WindowError(
            f"The gradients of {name!r} are those of all replicas, and each replica adds its own. Call add() "
            "in the function that strategy.run runs."
        )
    sparse = isinstance(gradient, tf.IndexedSlices)
    if not sparse:
        try:
            gradient = tf.convert_to_tensor(gradient)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"The gradient of {name!r} of type {type(gradient).__name__} is no tensor. Pass what "
                "tape.gradient returns."
            ) from error
    shape, wanted = (
        (gradient.values.shape[1:], variable.shape[1:]) if sparse else (gradient.shape, variable.shape)
    )
    if not shape.is_compatible_with(wanted):
        raise InputError(
            f"The gradient of {name!r}{' (a row of it)' if sparse else ''} has the shape {shape}, and the "
            f"variable {wanted}. Pass gradients in the order of the variables that the accumulator was made "
            "with."
        )
    fits = gradient.dtype.is_floating or gradient.dtype.is_complex
    if not fits or (gradient.dtype.is_complex and not variable.dtype.is_complex):
        raise InputError(
            f"The gradient of {name!r} is of dtype {gradient.dtype.name}, and the variable of dtype "
            f"{variable.dtype.name}. Pass what tape.gradient returns."
        )
    return gradient


def _loss(loss: Any) -> Any:
    """NaN for no loss: the mean of some losses is no loss of the batch."""
    if loss is None:
        return tf.constant(float("nan"), tf.float64)
    try:
        value = tf.convert_to_tensor(loss)
    except (TypeError, ValueError):
        value = tf.constant("")
    if not (value.dtype.is_floating and value.shape.is_compatible_with(())):
        raise InputError(
            f"loss={loss!r} is not one real number. Pass what the tape differentiated, without a loss scale, "
            "or None."
        )
    return tf.cast(value, tf.float64)


def add(state: State, microbatch: Microbatch, options: Options) -> None:
    """Add one micro-batch; with a mean one of weight 0 contributes nothing, NaN or not."""
    weight, zero = microbatch.weight, tf.zeros((), tf.float64)
    keep, dropped = weight != 0 if options.reduction == "mean" else True, zero
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
        told = {"keep": keep, "dropped": dropped, "squares": squares}
        _count(state, microbatch, options, told)


def _requirements(microbatch: Microbatch) -> list[Any]:
    """Return the requirements on a count when the graph runs; where one is not met, nothing is added."""
    traced = {"weight": microbatch.weight, "samples": microbatch.samples}
    return [
        tf.debugging.Assert(
            arithmetic.countable(value),
            [f"The {name} below must be finite and not negative. Pass a count.", value],
        )
        for name, value in traced.items()
        if tf.is_tensor(value)
    ]


def _factor(weight: Any, options: Options) -> Any:
    """Return the factor of the gradient and the loss of a micro-batch that counts."""
    if not tf.is_tensor(weight):
        return normalize.after_forward_scale(weight, reduction=options.reduction)
    return weight if options.reduction == "mean" else 1


def _contribute(state: State, microbatch: Microbatch, options: Options) -> Any:
    """Add the gradients; return the sum of their squares where noise is measured, else 0."""
    factor = _factor(microbatch.weight, options)
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
            # Repeated indices add up; the sum is dense. (`scatter_add` of a variable on replicas is missing.)
            tf.raw_ops.ResourceScatterAdd(resource=total.handle, indices=gradient.indices, updates=part)
        else:
            total.assign_add(part, read_value=False)
    return tf.add_n(squares)


def _joined(gradient: Any, part: Any) -> Any:
    """Rows of repeated indices as the one row that they are."""
    if not isinstance(gradient, tf.IndexedSlices):
        return part
    indices, place = tf.unique(gradient.indices)
    return tf.math.unsorted_segment_sum(part, place, tf.size(indices))


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _count(state: State, microbatch: Microbatch, options: Options, told: dict[str, Any]) -> None:
    """Add to the counters, those of what took part and those of calls."""
    weight = arithmetic.in_dtype(microbatch.weight, tf.float64)
    counted = weight
    if tf.is_tensor(
        microbatch.weight
    ):  # XLA leaves assertions out: then a bad weight is seen at the boundary
        counted = tf.where(arithmetic.countable(weight), weight, float("nan"))
    taking_part = {
        "weight": counted,
        "loss": arithmetic.in_dtype(_factor(microbatch.weight, options), tf.float64) * microbatch.loss,
    }
    if options.noise:
        squared = tf.square(weight)
        taking_part |= {"squares": told["squares"], "weights2": squared}
        taking_part["weights2_per_sample"] = squared / arithmetic.in_dtype(microbatch.samples, tf.float64)
    present = [0.0 if gradient is None else 1.0 for gradient in microbatch.gradients]
    parts = _vector(taking_part, present)
    calls = _vector({"microbatches": 1.0, "dropped": told["dropped"]}, [0.0] * len(present))
    # Not a product with 0: the loss of nothing is NaN.
    parts = tf.where(told["keep"], parts, tf.zeros_like(parts))
    state.counts.assign_add(parts + calls, read_value=False)


def _vector(named: dict[str, Any], present: list[float]) -> Any:
    """The counters in their order."""
    head = [tf.cast(named.get(name, 0.0), tf.float64) for name in NAMES]
    return tf.concat([tf.stack(head), tf.constant(present, tf.float64)], 0)
