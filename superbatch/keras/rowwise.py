# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Test that a loss computes its numbers for each row: their count is proportional to that of the rows.

One micro-batch does not show this: two numbers for two rows may be one number per class over all rows. So
the loss is traced with twice as many rows, for which it must return twice as many numbers. Only shapes are
computed, which takes little memory and time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
from keras import ops
from keras.src import backend

from ..errors import LossSpecError

ROWS = 2  # where their number is not known


class Numbers(NamedTuple):
    """Count of the numbers that a loss returned, and of its rows of predictions; None where not known."""

    shape: tuple[int | None, ...]
    rows: int | None


def numbers(name: str, values: Any, y_pred: Any) -> Numbers:
    """Return the count of the numbers that a loss has, and of their rows.

    Args:
        name: of the loss.
        values: what the loss has returned.
        y_pred: the predictions, a tensor or tensors.

    Raises:
        LossSpecError: the number of values is not a multiple of the predictions' rows.
    """
    rows, shape = keras.tree.flatten(y_pred)[0].shape[0], tuple(values.shape)
    if shape[0] is None or (rows is not None and shape[0] % max(rows, 1) == 0):
        return Numbers(shape, rows)
    raise _of_all_rows(name, f"{_named(shape)} for {rows or 'any number of'} rows")


def check_twice(name: str, loss: Any, y: Any, y_pred: Any, found: Numbers) -> None:
    """Refuse a loss that does not have twice the numbers for twice the rows.

    Args:
        name: of the loss.
        loss: a `keras.losses.Loss`.
        y: the targets, tensors in the dtype of the loss.
        y_pred: the predictions, as the targets.
        found: what it has for these.

    Raises:
        LossSpecError: it is such a loss.
    """
    if found.rows is None:  # on TensorFlow; two rows are like any
        shape = _symbolically(loss, y, y_pred, 1)
        if shape is None:
            return
        found = Numbers(shape, ROWS)
    shape = _symbolically(loss, y, y_pred, 2)
    if shape is None:  # a loss that needs numbers gets them; what it raises then is its own
        shape = tuple(loss.call(_twice(y), _twice(y_pred)).shape)
    check_like(name, Numbers(shape, 2 * found.rows), found)


def check_like(name: str, found: Numbers, before: Numbers | None) -> None:
    """Refuse a loss that has other numbers of each row than it had before.

    Raises:
        LossSpecError: it has.
    """
    if before is None or None in (found.rows, before.rows, *found.shape[:1], *before.shape[:1]):
        return
    more = found.shape[:1] and found.shape[0] * before.rows == before.shape[0] * found.rows
    rest = zip(found.shape[1:], before.shape[1:], strict=False)
    same = len(found.shape) == len(before.shape) and all(None in pair or pair[0] == pair[1] for pair in rest)
    if more and same:
        return
    words = " and ".join(f"{_named(each.shape)} for {each.rows} rows" for each in (before, found))
    raise _of_all_rows(name, words)


def _symbolically(loss: Any, y: Any, y_pred: Any, times: int) -> tuple[int | None, ...] | None:
    """Return the shape of a loss with a multiple of the rows, without numbers; None if tracing fails."""

    def form(leaf: Any) -> Any:
        shape = tuple(leaf.shape)
        return keras.KerasTensor((times * (shape[0] or ROWS), *shape[1:]), loss.dtype) if shape else leaf

    try:
        found = backend.compute_output_spec(
            loss.call, *(keras.tree.map_structure(form, part) for part in (y, y_pred))
        )
    except Exception:  # noqa: BLE001  (whatever a loss has against tensors without numbers)
        return None
    return tuple(found.shape)


def _twice(data: Any) -> Any:
    return keras.tree.map_structure(
        lambda leaf: ops.concatenate([leaf, leaf]) if len(leaf.shape) else leaf, data
    )


def _named(shape: tuple[int | None, ...]) -> str:
    return f"{shape[0]} numbers" if len(shape) == 1 else f"numbers of shape {shape}"


def _of_all_rows(name: str, words: str) -> LossSpecError:
    return LossSpecError(
        f"The loss {name!r} is no mean over samples: it returns {words}, and each number is made of all rows "
        "of a micro-batch. Return one number for each sample or token, for example with an axis= that "
        "leaves out axis 0."
    )
