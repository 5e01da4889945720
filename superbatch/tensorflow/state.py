# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Sums of a window as TensorFlow variables, which eager code, graphs and checkpoints share.

Under a strategy with several replicas each replica adds to its own copy (ON_READ) without communication. The
copies are summed once, at the end of the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import tensorflow as tf

from ..errors import WindowError
from . import arithmetic

# Counters are float64: exact to 2**53. Not ints, as a restored checkpoint divides them among replicas.
NAMES = ("weight", "microbatches", "dropped", "loss", "squares", "weights2", "weights2_per_sample")
# After them, for each variable, the number of micro-batches with weight in which it had a gradient.
HEAD = len(NAMES)


class Totals(NamedTuple):
    """Sums of a window over all replicas.

    Attributes:
        sums: the summed gradients, one tensor for each variable.
        counts: the counters, float64 scalars by the names of `NAMES`.
        present: float64: for each variable, the number of micro-batches with weight in which it had a
            gradient.
    """

    sums: list[Any]
    counts: dict[str, Any]
    present: Any


class State(tf.Module):
    """Variables of an accumulator, which a checkpoint saves: the sums of gradients, and the counters."""

    def __init__(self, variables: Sequence[Any], choice: arithmetic.DTypeChoice) -> None:
        super().__init__(name="superbatch")
        self.sums = [_sum_variable(v, v.shape, arithmetic.sum_dtype(v.dtype, choice)) for v in variables]
        self.counts = _sum_variable(variables[0], [HEAD + len(variables)], tf.float64)


def _sum_variable(variable: Any, shape: Any, dtype: Any) -> Any:
    """Return a variable of zeros on the device of another one, with a copy for each of its replicas."""
    strategy = strategy_of(variable)
    with ExitStack() as stack:
        if strategy is None:  # on the device of the variable, so that adding a gradient moves no data
            stack.enter_context(tf.device(variable.device))
        else:
            stack.enter_context(strategy.scope())
            stack.enter_context(strategy.extended.colocate_vars_with(variable))
        return tf.Variable(
            lambda: tf.zeros(shape, dtype),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
            name="sum",
        )


def strategy_of(variable: Any) -> Any | None:
    """Return the `tf.distribute.Strategy` of a variable on replicas; None for a plain variable.

    Examples:
        >>> strategy_of(tf.Variable(1.0)) is None
        True
    """
    return getattr(variable, "distribute_strategy", None)


def check_adding(strategy: Any | None) -> None:
    """Raise unless ``add`` is called in the right context: in a replica if the variables are on replicas.

    Raises:
        WindowError: it is called in a replica, but the variables are not on replicas, or the other way round.
    """
    if strategy is None:
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise WindowError(
                "add() was called in a replica, but the variables of the accumulator are not on replicas, so "
                "all replicas would add to one sum. Create the model within strategy.scope(), and the "
                "accumulator from its variables."
            )
    elif not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context():
        raise WindowError(
            "add() was called outside of strategy.run, but the variables are on "
            f"{strategy.num_replicas_in_sync} replicas, each with its own sum. Call add() in the "
            "function that strategy.run runs."
        )


def check_outside(what: str) -> None:
    """Raise if a method that reads all replicas is called inside of a strategy.

    Inside, the sums of other replicas cannot be read, and an optimizer of Keras cannot run under a condition.

    Raises:
        WindowError: it is called in a replica, or in the scope of a strategy.
    """
    if tf.distribute.has_strategy():
        raise WindowError(
            f"{what} was called inside of strategy.run or strategy.scope(), where an optimizer would reduce "
            f"gradients once more. Call {what} after strategy.run, outside of both; a tf.function around the "
            "two is fine."
        )


def read(state: State, variables: Sequence[Any]) -> Totals:
    """Return the sums over all replicas, by one reduction for each dtype; without replicas by none."""
    strategy = strategy_of(variables[0])
    held = [*state.sums, state.counts]
    if strategy is None:
        *sums, counts = [variable.read_value() for variable in held]
    else:
        *sums, counts = _reduced(strategy, held, [*variables, variables[0]])
    return Totals(sums, dict(zip(NAMES, tf.unstack(counts[:HEAD]), strict=True)), counts[HEAD:])


def _reduced(strategy: Any, held: Sequence[Any], places: Sequence[Any]) -> list[Any]:
    """Return the sums over replicas, each on the first device of its variable."""
    sums: dict[int, Any] = {}
    for dtype in sorted({variable.dtype.name for variable in held}):
        # By dtype, as TensorFlow packs all values of a call into one tensor.
        indices = [index for index, variable in enumerate(held) if variable.dtype.name == dtype]
        with strategy.scope():
            reduced = strategy.extended.batch_reduce_to(
                tf.distribute.ReduceOp.SUM, [(held[index], places[index]) for index in indices]
            )
        local = [strategy.experimental_local_results(value)[0] for value in reduced]
        sums |= dict(zip(indices, local, strict=True))
    return [sums[index] for index in range(len(held))]


def clear(state: State, strategy: Any | None) -> list[Any]:
    """Set all sums to zero, and return the operations that do it in a graph."""
    # Zeros, not a product with 0, which would keep a NaN.
    with strategy.scope() if strategy else nullcontext():
        done = [
            variable.assign(tf.zeros(variable.shape, variable.dtype), read_value=False)
            for variable in [*state.sums, state.counts]
        ]
    return [operation for operation in done if operation is not None]
