# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Check of a weight: compare the loss of a few rows with the weighted losses of two parts of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from .. import normalize
from ..batch.spread import spread_rows
from ..errors import CoupledSamplesError, InputError, LossSpecError, SplitError, SuperbatchError
from . import arithmetic
from .options import Options

ROWS = 8  # two unequal parts of these rows show a sum, a mean of means and most masks
TURNS = 3  # comparisons, each of other rows: a wrong weight may be right for a few rows by chance
SHORT = {tf.float16: 0.01, tf.bfloat16: 0.06}  # 3 to 4 times the rounding of a network of three layers
BOUND = 1e-3  # relative difference that float32 does not reach by rounding


class Part(NamedTuple):
    """Evaluation of a set of rows.

    Attributes:
        rows: the number of rows.
        weight: their declared weight.
        values: the loss, then the gradient of each variable, as complex128; zeros if they take no part.
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
    """Compare the loss of a few rows at once and in parts, see `Accumulator.check_loss`."""
    if not tf.executing_eagerly():
        raise InputError(
            "check_loss() in a tf.function has no numbers to compare. Call it once outside, before training."
        )
    leaves = [leaf for leaf in tf.nest.flatten(batch) if _has_rows(leaf)]
    rows = int(leaves[0].shape[0]) if leaves else 0
    if rows < 2:
        raise InputError(
            f"check_loss() with {rows} rows cannot split them. Pass a batch of two rows or more."
        )
    bound = BOUND
    for turn in range(TURNS):
        spread = spread_rows(rows, min(ROWS, rows), turn, TURNS)
        try:
            _compare(loss, batch, weight, options, spread, bound)
        except SuperbatchError:
            # In a short dtype the difference may be rounding. Look for such dtypes only now: a trace is slow.
            bound = _bound_of(loss, _rows_of(batch, spread))
            if bound == BOUND:
                raise
            _compare(loss, batch, weight, options, spread, bound)


def _compare(
    loss: Callable[..., Any],
    batch: tuple[Any, ...],
    weight: Callable[..., Any],
    options: Options,
    spread: list[int],
    bound: float,
) -> None:
    """Compare these rows at once and in two parts.

    Raises:
        SuperbatchError: they differ by more than `bound`.
    """
    count = len(spread)
    head = (3 * count + 4) // 5  # unequal parts, such as 5 and 3 rows: a mean of means differs from the mean
    whole, *parts = [
        _evaluated(loss, _rows_of(batch, some), weight, len(some), options)
        for some in (spread, spread[:head], spread[head:])
    ]
    again = _evaluated(loss, _rows_of(batch, spread), weight, count, options)
    if not _same(whole.values, again.values, bound):
        raise InputError(
            "The loss of the same rows differs from call to call, so it draws random numbers. Pass a loss "
            "without dropout: model(x, training=False)."
        )
    _judge(whole, parts, options, bound)


def _judge(whole: Part, parts: list[Part], options: Options, bound: float) -> None:
    """Raise unless the weighted losses and gradients of the parts are those of the whole.

    Raises:
        CoupledSamplesError: they differ, with every reduction and weight that is tried.
        LossSpecError: they are equal with another reduction or weight, or the weights do not add up.
    """
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
    if _same(whole.values, sums if options.reduction == "sum" else means, bound):
        return
    described = f"the loss is {whole.loss:.6g} for {whole.rows} rows at once, and " + " and ".join(
        f"{part.loss:.6g} for {part.rows} rows" for part in parts
    )
    if _same(whole.values, sums, bound):
        raise LossSpecError(
            f'The loss is a sum, but the accumulator has reduction="mean": {described}. Make it with '
            'reduction="sum".'
        )
    if _same(whole.values, by_rows, bound):
        raise LossSpecError(
            f"The loss is a mean over rows, but the accumulator has reduction={options.reduction!r} and "
            f'another weight: {described}. Make it with reduction="mean" and pass weight=len(rows).'
        )
    if options.reduction == "mean" and all(part.weight == part.rows for part in parts):
        raise LossSpecError(
            f"The loss is not a mean over rows: {described}. For a mean over tokens pass their number, "
            "weight=tf.reduce_sum(mask); if the loss or a layer couples the rows (contrastive losses, "
            "BatchNormalization), train with whole batches."
        )
    if options.reduction == "sum":
        raise CoupledSamplesError(
            f"The losses of micro-batches do not add up to that of the batch: {described}. Leave out terms "
            "that are no sum over rows, as a regularizer in model.losses, which would count once for each "
            "micro-batch; if the loss or a layer couples the rows (contrastive losses, BatchNormalization), "
            "train with whole batches."
        )
    raise CoupledSamplesError(
        f"The loss of the batch is not the mean of micro-batch losses with this weight: {described}. "
        "Pass the divisor of the loss as weight, or, if the loss or a layer couples the rows (contrastive "
        "losses, BatchNormalization), train with whole batches."
    )


def _rows_of(batch: tuple[Any, ...], some: list[int]) -> tuple[Any, ...]:
    return tf.nest.map_structure(lambda leaf: tf.gather(leaf, some) if _has_rows(leaf) else leaf, batch)


def _has_rows(leaf: Any) -> bool:
    """Return True if a leaf of a batch has rows; scalars and None are passed as they are.

    Raises:
        SplitError: the leaf is a sparse tensor.
    """
    if isinstance(leaf, tf.SparseTensor):
        raise SplitError(
            f"check_loss() cannot split a SparseTensor of shape {leaf.shape}. Pass "
            "tf.sparse.to_dense(tensor)."
        )
    return len(getattr(leaf, "shape", ())) > 0


def _evaluated(
    loss: Callable[..., Any], batch: tuple[Any, ...], weight: Callable[..., Any], rows: int, options: Options
) -> Part:
    """Evaluate loss, gradients and weight of some rows.

    Raises:
        LossSpecError: the loss is not a scalar.
    """
    counted = float(arithmetic.as_count(weight(*batch), "weight"))
    with tf.GradientTape() as tape:
        value = tf.convert_to_tensor(loss(*batch))
    if value.shape.rank:
        # The tape would differentiate the sum of the elements, which grows with the rows of a micro-batch.
        raise LossSpecError(
            f"The loss of {rows} rows has the shape {tuple(value.shape)}, and tape.gradient would "
            "differentiate its sum. Return tf.reduce_mean(loss), or tf.reduce_sum(loss) for an accumulator "
            'with reduction="sum".'
        )
    # Gradients too: a branch with a gate of 0 does not change the loss.
    gradients = tape.gradient(
        value, list(options.variables), unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    values = [tf.cast(tf.convert_to_tensor(each), tf.complex128) for each in [value, *gradients]]
    takes_part = normalize.takes_part(counted, reduction=options.reduction)  # the mean of no tokens is NaN
    return Part(rows, counted, values if takes_part else [tf.zeros_like(each) for each in values])


def _weighted(parts: list[Part], weights: list[float]) -> list[Any]:
    """Return the weighted sums of losses and gradients over the parts."""
    columns = zip(*(part.values for part in parts), strict=True)
    return [sum(each * weight for each, weight in zip(column, weights, strict=True)) for column in columns]


def _same(a: list[Any], b: list[Any], bound: float) -> bool:
    """Return True if two losses and their gradients, variable by variable, differ by rounding only."""
    sizes = [max(_largest(one), _largest(other)) for one, other in zip(a, b, strict=True)]
    # The gradient of a variable may be 0 but for rounding; its bound follows from the largest gradient.
    least = 1e-5 * max(sizes[1:], default=0.0)
    bounds = [bound * sizes[0], *(bound * size + least for size in sizes[1:])]
    pairs = zip(a, b, bounds, strict=True)
    return all(_largest(one - other) <= most + 1e-15 for one, other, most in pairs)


def _bound_of(loss: Callable[..., Any], batch: tuple[Any, ...]) -> float:
    """Return the largest relative difference that is rounding, by the shortest dtype in the loss."""
    try:
        graph = tf.function(loss, autograph=False).get_concrete_function(*batch).graph.as_graph_def()
    except Exception:  # noqa: BLE001  (the user's loss: it may raise anything if it needs values)
        return BOUND
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    dtypes = {
        dtype for node in nodes for each in node.attr.values() for dtype in (each.type, *each.list.type)
    }
    return max((bound for dtype, bound in SHORT.items() if dtype.as_datatype_enum in dtypes), default=BOUND)


def _largest(values: Any) -> float:
    return float(tf.reduce_max(tf.abs(values))) if tf.size(values) else 0.0
