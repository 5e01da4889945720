# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Check of a declared weight: the loss of a few rows at once against that of two parts of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from ..errors import CoupledSamplesError, InputError, LossSpecError
from . import arithmetic
from .options import Options

ROWS = 8  # two unequal parts of these show a sum, a mean of means and most masks
BOUND = 1e-3  # relative, where the rounding of float32 is not


class Part(NamedTuple):
    """Evaluation of some rows.

    Attributes:
        rows: their number.
        weight: what is declared of them.
        values: the loss and the gradient of each variable.
    """

    rows: int
    weight: float
    values: list[Any]

    @property
    def loss(self) -> float:
        """Return the loss as a number."""
        return float(tf.math.real(self.values[0]))


def check_loss(
    loss: Callable[..., Any], batch: tuple[Any, ...], weight: Callable[..., Any], options: Options
) -> None:
    """Compare a loss at once and in parts; see `Accumulator.check_loss`."""
    if not tf.executing_eagerly():
        raise InputError(
            "check_loss() in a tf.function has no numbers to compare. Call it once outside, before training."
        )
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    rows = len(leaves[0]) if leaves else 0
    if rows < 2:
        raise InputError(
            f"check_loss() with {rows} rows cannot split them. Pass a batch of two rows or more."
        )
    count = min(ROWS, rows)
    spread = [number * rows // count for number in range(count)]
    head = (3 * count + 4) // 5
    whole, *parts = [
        _evaluated(loss, _rows_of(batch, some), weight, len(some), options)
        for some in (spread, spread[:head], spread[head:])
    ]
    if not _same(whole.values, _evaluated(loss, _rows_of(batch, spread), weight, count, options).values):
        raise InputError(
            "The loss of the same rows differs from call to call: it draws random numbers. Pass check_loss() "
            "a loss without dropout, model(x, training=False)."
        )
    _judge(whole, parts, options)


def _judge(whole: Part, parts: list[Part], options: Options) -> None:
    total = sum(part.weight for part in parts)
    if abs(total - whole.weight) > BOUND * max(abs(total), abs(whole.weight)):
        raise LossSpecError(
            f"The weight is {whole.weight:.6g} for {whole.rows} rows at once and {total:.6g} for two parts "
            "of them. Return a count or a sum over rows, not a mean."
        )
    weights, counts = [part.weight for part in parts], [part.rows for part in parts]
    means = _weighted(parts, [weight / (total or 1.0) for weight in weights])
    by_rows = _weighted(parts, [count / whole.rows for count in counts])
    sums = _weighted(parts, [1.0 for _ in parts])
    if _same(whole.values, sums if options.reduction == "sum" else means):
        return
    found = f"it is {whole.loss:.6g} for {whole.rows} rows at once, and " + " and ".join(
        f"{part.loss:.6g} for {part.rows} rows" for part in parts
    )
    if _same(whole.values, sums):
        raise LossSpecError(
            f'The loss is a sum, and the accumulator was made with reduction="mean": {found}. Make it with '
            'reduction="sum".'
        )
    if _same(whole.values, by_rows):
        raise LossSpecError(
            f"The loss is a mean over rows, and the accumulator has reduction={options.reduction!r} and "
            f'another weight: {found}. Make it with reduction="mean" and pass weight=len(rows).'
        )
    if options.reduction == "mean" and all(part.weight == part.rows for part in parts):
        raise LossSpecError(
            f"The loss is no mean over rows: {found}. For a mean over tokens pass their number, "
            "weight=tf.reduce_sum(mask). If the loss or a layer couples the rows (contrastive losses, "
            "BatchNormalization), train with whole batches."
        )
    raise CoupledSamplesError(
        f"The losses of micro-batches do not give that of the batch with this weight: {found}. Pass as "
        "weight what the loss is divided by. If the loss or a layer couples the rows (contrastive losses, "
        "BatchNormalization), train with whole batches."
    )


def _rows_of(batch: tuple[Any, ...], some: list[int]) -> tuple[Any, ...]:
    return tf.nest.map_structure(lambda leaf: None if leaf is None else tf.gather(leaf, some), batch)


def _evaluated(
    loss: Callable[..., Any], batch: tuple[Any, ...], weight: Callable[..., Any], rows: int, options: Options
) -> Part:
    counted = float(arithmetic.as_count(weight(*batch), "weight"))
    with tf.GradientTape() as tape:
        value = loss(*batch)
    # The gradient shows a branch that is switched off in the loss.
    gradients = tape.gradient(
        value, list(options.variables), unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    found = [tf.cast(tf.convert_to_tensor(each), tf.complex128) for each in [value, *gradients]]
    takes_part = counted or options.reduction == "sum"  # 0 / 0 of no token has weight 0
    return Part(rows, counted, found if takes_part else [tf.zeros_like(each) for each in found])


def _weighted(parts: list[Part], weights: list[float]) -> list[Any]:
    columns = zip(*(part.values for part in parts), strict=True)
    return [sum(each * weight for each, weight in zip(column, weights, strict=True)) for column in columns]


def _same(a: list[Any], b: list[Any]) -> bool:
    """Return True if two losses and their gradients, variable by variable, differ by rounding only."""
    sizes = [max(_largest(one), _largest(other)) for one, other in zip(a, b, strict=True)]
    # A gradient that is 0 but for rounding is compared with the largest of all.
    least = 1e-5 * max(sizes[1:], default=0.0)
    bounds = [BOUND * sizes[0], *(BOUND * size + least for size in sizes[1:])]
    pairs = zip(a, b, bounds, strict=True)
    return all(_largest(one - other) <= bound + 1e-15 for one, other, bound in pairs)


def _largest(values: Any) -> float:
    return float(tf.reduce_max(tf.abs(values))) if tf.size(values) else 0.0
