# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Check of the first batch: before training, evaluate a few of its rows at once and in parts.

The prediction and the loss of a row must not depend on the other rows. Otherwise a layer or a loss couples
the samples, or a loss has another divisor than the declared one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import keras

from ..batch.spread import spread_rows
from ..errors import SuperbatchError
from . import findings, probe, splitting
from .comparison import Comparison, rows_of
from .options import Options
from .probe import Mapping

ROWS = 8  # most rows of a comparison; they come from all over the batch
TURNS = 4  # comparisons, each of other rows; half of them at shifted weights
TRUE_SIZE = 12  # most rows of a micro-batch in a comparison of neighbours: a multiple of 2, 3 and 4
# Words of torch's and TensorFlow's errors. JAX raises none: it reads NaN for an index out of range.
OUT_OF_RANGE = ("index out of range", "out of bounds", "is not in [0,", "outside the valid range")


class First(NamedTuple):
    """The first batch, taken from the arguments of Keras' train function before that runs.

    Attributes:
        data: the batch, in the form in which a train step gets it.
        mapping: the model's variables with their present values.
        arguments: arguments for the train function that yield the batch once more.
    """

    data: Any
    mapping: Mapping
    arguments: tuple[Any, ...]


def checked(model: Any, options: Options, step: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return Keras' train function, preceded by the check of the first batch of two rows or more.

    Args:
        model: the accumulating model.
        options: the arguments of `accumulate`.
        step: the module of the backend, such as `step_jax`.
        function: the train function, as Keras' `make_train_function` made it.
    """
    unchecked, trained = options.check, False

    def checking(*arguments: Any) -> Any:
        nonlocal unchecked, trained
        # Only where needed: a reference to the arguments would keep the batch in memory.
        given = arguments if step.TAKES_STATE else ()
        try:
            if unchecked:
                first = step.peek(model, arguments)
                if first is not None:
                    arguments = first.arguments
                    unchecked = not check(model, options, step, first)
                del first  # it holds the batch
            result = function(*arguments)
        except SuperbatchError:
            if step.TAKES_STATE:
                step.restore(model, given[0])
            raise
        except Exception as error:  # any error of the user's model or loss; raised again below
            if not trained and hasattr(error, "add_note"):  # from Python 3.11
                error.add_note(_note(options))
            raise
        trained = True
        return result

    return checking


def _note(options: Options) -> str:
    """Return the note for an error of the model or a loss in the first batch."""
    return (
        f"accumulate calls the model and its losses with at most {options.microbatch_size} rows of the "
        "batch. If they need all rows, as with the adjacency matrix of a graph, train with whole batches."
    )


def check(model: Any, options: Options, step: Any, first: First) -> bool:
    """Compare a few rows at once and in parts; return False if there is no second row.

    Raises:
        CoupledSamplesError: a layer or a loss couples the rows.
        InputError: a forward changes variables of layers, predicts NaN, or reads rows by their index.
        LossSpecError: a loss has another divisor than the declared one.
    """
    batch = keras.utils.unpack_x_y_sample_weight(first.data)
    rows = int(splitting.leaves(batch)[0].shape[0])
    if rows < 2:
        return False
    with ExitStack() as conditions:
        conditions.enter_context(step.untouched(model))
        conditions.enter_context(probe.constant_draws())
        if options.batchnorm == "per_microbatch":
            conditions.enter_context(probe.accepted_batchnorms(model))
        _compare(model, options, step, first.mapping, batch)
    return True


def _compare(model: Any, options: Options, step: Any, mapping: Mapping, batch: Any) -> None:
    """Compare rows from all over the batch; if they differ, compare micro-batches of the true size."""
    rows, size = int(splitting.leaves(batch)[0].shape[0]), options.microbatch_size
    # Other rows each time, and two settings of the weights: a wrong divisor may be right for a few rows by
    # chance. For example, a label has the same share in two parts of six rows in one of three cases.
    settings = [probe.shifted(mapping), mapping] * (TURNS // 2)
    comparisons = []
    for turn, values in enumerate(settings):
        spread = (batch, *_spread(rows, size, step, turn))
        comparisons.append(_comparison(model, options, values, mapping, spread))
        if comparisons[-1] is None or not comparisons[-1].agrees():
            break
    else:
        return
    # A wrong declared weight is an error now: micro-batches of the true size may hide it by equal counts.
    if not any(each is not None and each.differs_in_declared() for each in comparisons):
        # A loss over pairs of neighbours is exact if no pair is cut. So only micro-batches of the true size,
        # with rows in the true order, decide whether the rows are coupled.
        size = max(1, min(size, TRUE_SIZE, rows // 2))
        length = min(rows, 3 * size)
        comparisons = []
        for turn, values in enumerate(settings):
            start = turn * ((rows - length) // size) // (TURNS - 1) * size
            true = (batch, [*range(start, start + length)], [[*part] for part in step.cut(length, size)])
            comparisons.append(_comparison(model, options, values, mapping, true))
    for comparison in comparisons:
        if comparison is not None and not comparison.agrees() and comparison.repeats():
            comparison.refuse()


def _spread(rows: int, size: int, step: Any, turn: int) -> tuple[list[int], list[list[int]]]:
    """Return rows from all over the batch, others in each turn, and two parts of them.

    The parts are unequal, so that a mean, a sum and a mean of means differ. Pairs of neighbours stay together
    if micro-batches keep them together.
    """
    together = 2 if size % 2 == 0 and rows >= 2 * ROWS and 1 in step.cut(4, 2)[0] else 1
    count, groups = min(ROWS, size + together, rows) // together, rows // together
    starts = spread_rows(groups, count, turn, TURNS)
    chosen = [start * together + number for start in starts for number in range(together)]
    head = together * max(1, (3 * count + 1) // 5)
    return chosen, [[*range(head)], [*range(head, len(chosen))]]


def _comparison(
    model: Any,
    options: Options,
    first: Mapping,
    otherwise: Mapping,
    rows: tuple[Any, list[int], list[list[int]]],
) -> Comparison | None:
    """Return the comparison of rows at once and in parts; None if the model cannot be evaluated on them.

    Args:
        model: the accumulating model.
        options: the arguments of `accumulate`.
        first: the model's variables with the values to try first.
        otherwise: the variables with other values, to try if the loss is not finite with `first`.
        rows: the batch; the numbers of the rows to take; for each part, the positions of its rows among them.

    Raises:
        InputError: the model predicts NaN for these rows, or reads other rows by their index.
    """
    batch, chosen, parts = rows
    for values in (first, otherwise):
        comparison = Comparison(model, options, values, rows_of(batch, chosen), parts)
        try:
            comparison.measure()
        except SuperbatchError:
            raise
        except Exception as error:  # any error of the user's model or loss on so few rows
            # Training may not raise: under XLA an index out of range is clamped, and another row is read.
            if any(words in str(error) for words in OUT_OF_RANGE):
                raise findings.rows_out_of_range(len(chosen)) from error
            return None  # training raises the model's own error
        if comparison.is_finite():
            return comparison
    if comparison.predicts_nan():
        raise findings.no_predictions(len(chosen))
    return None
