# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Check of the first batch: a few of its rows are evaluated at once and in parts, before it is trained on.

A row must have the same prediction and the same loss beside any other rows. Otherwise a layer or a loss
couples the samples, or a loss has another divisor than the declared one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import keras

from ..errors import SuperbatchError
from . import findings, probe, splitting
from .comparison import Comparison, rows_of
from .options import Options
from .probe import Mapping

ROWS = 8  # most rows of the first comparison
TURNS = 4  # comparisons of other rows each, half of them at other weights
# Of errors of torch and TensorFlow; JAX reads NaN in place of a row that is not there.
OUT_OF_RANGE = ("index out of range", "out of bounds", "is not in [0,", "outside the valid range")
TRUE_SIZE = 12  # most rows of a micro-batch of the second: pairs, triples and fours of rows fit in


class First(NamedTuple):
    """The first batch of a training, taken before Keras' function of it runs.

    Attributes:
        data: the batch, as Keras hands it to a train step.
        mapping: the present values of the model's variables.
        arguments: of Keras' function; they have the batch again.
    """

    data: Any
    mapping: Mapping
    arguments: tuple[Any, ...]


def checked(model: Any, options: Options, step: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return Keras' function of a batch, preceded by the check of the first batch of two rows or more.

    Args:
        model: the accumulating model.
        options: of `accumulate`.
        step: the module of the backend.
        function: as `make_train_function` of Keras made it.
    """
    waiting, trained = options.check, False

    def checking(*arguments: Any) -> Any:
        nonlocal waiting, trained
        given = arguments if step.TAKES_STATE else ()
        try:
            if waiting:
                first = step.peek(model, arguments)
                if first is not None:
                    arguments = first.arguments
                    waiting = not check(model, options, step, first)
                del first  # it holds the batch
            result = function(*arguments)
        except SuperbatchError:
            if step.TAKES_STATE:
                step.restore(model, given[0])
            raise
        except Exception as error:
            if not trained and hasattr(error, "add_note"):  # from Python 3.11
                error.add_note(_note(options))
            raise
        trained = True
        return result

    return checking


def _note(options: Options) -> str:
    """Return what is added to an error of Keras in the first batch."""
    return (
        f"accumulate calls the model and its losses with at most {options.microbatch_size} rows of the "
        "batch. If they need all rows, as with the adjacency matrix of a graph, train with whole batches."
    )


def check(model: Any, options: Options, step: Any, first: First) -> bool:
    """Compare a few rows at once and in parts; return False if there is no second row.

    Raises:
        CoupledSamplesError: a layer or a loss couples the rows.
        InputError: a forward changes variables of layers, or predicts NaN.
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
    rows, size = int(splitting.leaves(batch)[0].shape[0]), options.microbatch_size
    # Two places of the weights and other rows each time: what a few rows show may agree by chance, such as a
    # share of labels or a count of large values, which are the same in two parts of six rows once in three.
    places = [probe.shifted(mapping), mapping] * (TURNS // 2)
    found = []
    for turn, place in enumerate(places):
        found.append(_comparison(model, options, place, mapping, (batch, *_spread(rows, size, step, turn))))
        if found[-1] is None or not found[-1].agrees():
            break
    else:
        return
    # In a declared weight true micro-batches may happen to count the same, so that only these rows show it.
    if not any(each is not None and each.differs_in_declared() for each in found):
        # A loss of neighbours is exact where micro-batches hold all of them: their true size and order count.
        size = max(1, min(size, TRUE_SIZE, rows // 2))
        length = min(rows, 3 * size)
        found = []
        for turn, place in enumerate(places):
            start = turn * ((rows - length) // size) // (TURNS - 1) * size
            true = (batch, [*range(start, start + length)], [[*part] for part in step.cut(length, size)])
            found.append(_comparison(model, options, place, mapping, true))
    for comparison in found:
        if comparison is not None and not comparison.agrees() and comparison.repeats():
            comparison.refuse()


def _spread(rows: int, size: int, step: Any, turn: int) -> tuple[list[int], list[list[int]]]:
    """Return rows from all over the batch, others in each turn, and two unequal parts of them.

    The mean, a sum and a mean of means differ then. Neighbours stay together where micro-batches keep them.
    """
    together = 2 if size % 2 == 0 and rows >= 2 * ROWS and 1 in step.cut(4, 2)[0] else 1
    count, groups = min(ROWS, size + together, rows) // together, rows // together
    places = [(number * TURNS + turn) * groups // (count * TURNS) for number in range(count)]
    # Of a batch of few rows all are taken in each turn, and the first part has others.
    places = places[turn % count :] + places[: turn % count]
    chosen = [place * together + number for place in places for number in range(together)]
    head = together * max(1, (3 * count + 1) // 5)
    return chosen, [[*range(head)], [*range(head, len(chosen))]]


def _comparison(
    model: Any,
    options: Options,
    first: Mapping,
    otherwise: Mapping,
    rows: tuple[Any, list[int], list[list[int]]],
) -> Comparison | None:
    """Return the comparison of rows at once and in parts; None where the model cannot be evaluated so.

    Args:
        model: the accumulating model.
        options: of `accumulate`.
        first: values of its variables.
        otherwise: values for where the loss is no number with the first.
        rows: the batch, the rows of it, and the parts of these.

    Raises:
        InputError: the model predicts NaN for these rows, or reads others by their number.
    """
    batch, chosen, parts = rows
    for values in (first, otherwise):
        found = Comparison(model, options, values, rows_of(batch, chosen), parts)
        try:
            found.measure()
        except SuperbatchError:
            raise
        except Exception as error:  # a model that does not take these rows
            # XLA reads another row in place of one that is not there, so that training would not raise.
            if any(words in str(error) for words in OUT_OF_RANGE):
                raise findings.rows_out_of_range(len(chosen)) from error
            return None  # training raises an error of its own
        if found.is_finite():
            return found
    if found.predicts_nan():
        raise findings.no_predictions(len(chosen))
    return None
