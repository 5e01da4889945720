# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Test that a loss returns numbers for single rows: twice as many numbers for twice as many rows.

The shape for one micro-batch does not show this: two numbers for two rows may be one number per class, over
all rows. So the loss is also traced with twice as many rows. Only shapes are computed, which takes little
memory and time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
from keras import ops
from keras.src import backend

from ..errors import LossSpecError

ROWS = 2  # rows to trace with where their number is not known


class Numbers(NamedTuple):
    """The shape of the numbers that a loss returned, and the rows of its predictions; None if not known."""

    shape: tuple[int | None, ...]
    rows: int | None


def numbers(name: str, values: Any, y_pred: Any) -> Numbers:
    """Return the shape of the numbers that a loss returned, and the rows of the predictions.

    Args:
        name: the name of the loss, for the error text.
        values: the numbers that the loss returned.
        y_pred: the predictions, a tensor or a structure of tensors.

    Raises:
        LossSpecError: the count of the numbers is not a multiple of the rows.
    """
    rows, shape = keras.tree.flatten(y_pred)[0].shape[0], tuple(values.shape)
    if shape[0] is None or (rows is not None and shape[0] % max(rows, 1) == 0):
        return Numbers(shape, rows)
    raise _of_all_rows(name, f"{_named(shape)} for {rows or 'any number of'} rows")


def check_twice(name: str, loss: Any, y: Any, y_pred: Any, returned: Numbers) -> None:
    """Raise unless a loss returns twice as many numbers for twice as many rows.

    Args:
        name: the name of the loss, for the error text.
        loss: a `keras.losses.Loss`.
        y: the targets, tensors in the dtype of the loss.
        y_pred: the predictions, in the same form.
        returned: the numbers that the loss returned for them.

    Raises:
        LossSpecError: it returns another count or shape.
    """
    if returned.rows is None:  # in a graph of TensorFlow: trace with `ROWS` rows and with twice as many
        shape = _symbolically(loss, y, y_pred, 1)
        if shape is None:
            return
        returned = Numbers(shape, ROWS)
    shape = _symbolically(loss, y, y_pred, 2)
    if shape is None:  # the loss cannot be traced without values: call it, and let its own errors pass
        shape = tuple(loss.call(_twice(y), _twice(y_pred)).shape)
    check_like(name, Numbers(shape, 2 * returned.rows), returned)


def check_like(name: str, now: Numbers, before: Numbers | None) -> None:
    """Raise if a loss returned another count or shape of numbers per row than before.

    Raises:
        LossSpecError: it did.
    """
    if before is None or None in (now.rows, before.rows, *now.shape[:1], *before.shape[:1]):
        return
    proportional = now.shape[:1] and now.shape[0] * before.rows == before.shape[0] * now.rows
    rest = zip(now.shape[1:], before.shape[1:], strict=False)
    same = len(now.shape) == len(before.shape) and all(None in pair or pair[0] == pair[1] for pair in rest)
    if proportional and same:
        return
    words = " and ".join(f"{_named(each.shape)} for {each.rows} rows" for each in (before, now))
    raise _of_all_rows(name, words)


def _symbolically(loss: Any, y: Any, y_pred: Any, times: int) -> tuple[int | None, ...] | None:
    """Return the shape that a loss returns for a multiple of the rows; None if it cannot be traced."""

    def symbolic(leaf: Any) -> Any:
        shape = tuple(leaf.shape)
        return keras.KerasTensor((times * (shape[0] or ROWS), *shape[1:]), loss.dtype) if shape else leaf

    try:
        spec = backend.compute_output_spec(
            loss.call, *(keras.tree.map_structure(symbolic, part) for part in (y, y_pred))
        )
    except Exception:  # noqa: BLE001  (the user's loss: it may raise anything for a tensor without values)
        return None
    return tuple(spec.shape)


def _twice(data: Any) -> Any:
    return keras.tree.map_structure(
        lambda leaf: ops.concatenate([leaf, leaf]) if len(leaf.shape) else leaf, data
    )


def _named(shape: tuple[int | None, ...]) -> str:
    return f"{shape[0]} numbers" if len(shape) == 1 else f"numbers of shape {shape}"


def _of_all_rows(name: str, words: str) -> LossSpecError:
    return LossSpecError(
        f"The loss {name!r} is no mean over samples: it returns {words}, so each number depends on all rows "
        "of a micro-batch. Return one number for each sample or token, for example with an axis= that "
        "leaves out axis 0."
    )
