# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Variables that hold the sums of a window, so that eager code, graphs and checkpoints share them.

Under a strategy with several replicas each replica adds to sums of its own (ON_READ), without a message to
the others; they are added up once, at the boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import tensorflow as tf

from ..errors import WindowError
from . import arithmetic

# Counters are float64: exact to 2**53, and what a restored checkpoint deals out to replicas can be halved.
NAMES = ("weight", "microbatches", "dropped", "loss", "squares", "weights2", "weights2_per_sample")
HEAD = len(NAMES)  # after these: for each variable, in how many micro-batches that count it had a gradient


class Totals(NamedTuple):
    """A window over all replicas: sums of gradients, and the counters by name.

    Attributes:
        sums: one tensor per variable.
        counts: float64 scalars by the names of `NAMES`.
        present: float64, one per variable: micro-batches with weight in which it had a gradient.
    """

    sums: list[Any]
    counts: dict[str, Any]
    present: Any


class State(tf.Module):
    """The variables of an accumulator: what a checkpoint of it holds."""

    def __init__(self, variables: Sequence[Any], choice: arithmetic.DTypeChoice) -> None:
        super().__init__(name="superbatch")
        self.sums = [_sum_variable(v, v.shape, arithmetic.sum_dtype(v.dtype, choice)) for v in variables]
        self.counts = _sum_variable(variables[0], [HEAD + len(variables)], tf.float64)


def _sum_variable(variable: Any, shape: Any, dtype: Any) -> Any:
    """Zeros beside a variable, on each of its replicas."""
    strategy = strategy_of(variable)
    with ExitStack() as place:
        if strategy is None:
            place.enter_context(tf.device(variable.device))
        else:
            place.enter_context(strategy.scope())
            place.enter_context(strategy.extended.colocate_vars_with(variable))
        return tf.Variable(
            lambda: tf.zeros(shape, dtype),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
            name="sum",
        )


def strategy_of(variable: Any) -> Any | None:
    """Return the `tf.distribute.Strategy` that a variable is spread by; None for a plain one.

    Examples:
        >>> strategy_of(tf.Variable(1.0)) is None
        True
    """
    return getattr(variable, "distribute_strategy", None)


def check_adding(strategy: Any | None) -> None:
    """Check that the replica whose sum is meant can be told.

    Raises:
        WindowError: it cannot.
    """
    if strategy is None:
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise WindowError(
                "add() was called in a replica, and the variables of the accumulator are not spread over "
                "replicas: all would add to one sum, and each would wait for the others. Create the model "
                "within strategy.scope(), and the accumulator from its variables."
            )
    elif not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context():
        raise WindowError(
            "add() was called outside of strategy.run, and the variables are on "
            f"{strategy.num_replicas_in_sync} replicas, each of which adds to its own sum. Call add() in the "
            "function that strategy.run runs."
        )


def check_outside(what: str) -> None:
    """Check that the sums of all replicas can be read, and an optimizer of Keras be run under a condition.

    Raises:
        WindowError: a replica, or the scope of its strategy, has not been left.
    """
    if tf.distribute.has_strategy():
        raise WindowError(
            f"{what} was called inside of strategy.run or strategy.scope(), where an optimizer reduces "
            f"gradients once more and cannot update under a condition. Call {what} after strategy.run, "
            "outside of both; a tf.function around the two is fine."
        )


def read(state: State, variables: Sequence[Any]) -> Totals:
    """Return the sums of all replicas: one reduction for everything of one dtype, or none at all."""
    strategy = strategy_of(variables[0])
    held = [*state.sums, state.counts]
    if strategy is None:
        *sums, counts = [variable.read_value() for variable in held]
    else:
        *sums, counts = _reduced(strategy, held, [*variables, variables[0]])
    return Totals(sums, dict(zip(NAMES, tf.unstack(counts[:HEAD]), strict=True)), counts[HEAD:])


def _reduced(strategy: Any, held: Sequence[Any], places: Sequence[Any]) -> list[Any]:
    """The sums over replicas, on the first device of their variables."""
    found: dict[int, Any] = {}
    for dtype in sorted({variable.dtype.name for variable in held}):
        # TensorFlow packs what it is given into one tensor, whatever the dtypes are.
        indices = [index for index, variable in enumerate(held) if variable.dtype.name == dtype]
        with strategy.scope():
            reduced = strategy.extended.batch_reduce_to(
                tf.distribute.ReduceOp.SUM, [(held[index], places[index]) for index in indices]
            )
        local = [strategy.experimental_local_results(value)[0] for value in reduced]
        found |= dict(zip(indices, local, strict=True))
    return [found[index] for index in range(len(held))]


def clear(state: State, strategy: Any | None) -> list[Any]:
    """Set everything to zero - not to 0 x itself, which keeps a NaN for ever - and return the operations."""
    with strategy.scope() if strategy else nullcontext():
        done = [
            variable.assign(tf.zeros(variable.shape, variable.dtype), read_value=False)
            for variable in [*state.sums, state.counts]
        ]
    return [operation for operation in done if operation is not None]
