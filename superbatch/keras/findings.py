# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Errors of the check of the first batch."""

from __future__ import annotations

from typing import Any

from ..errors import CoupledSamplesError, InputError, LossSpecError
from .terms import Term

CLOSE = 1e-3  # relative difference of two losses that are the same but for rounding
MIXING = ("MixUp", "CutMix")  # augmentations of keras.layers that blend each row with another one
WAY_OUT = "or call accumulate(..., check=False) to train with a different update than the whole batch's."


def coupled_layer(model: Any, layer: Any | None, rows: list[int]) -> CoupledSamplesError:
    """Return the error for a layer whose rows depend on the other rows."""
    source = f"the model {model.name!r}" if layer is None else f"{type(layer).__name__} {layer.name!r}"
    if type(layer).__name__ in MIXING:
        return CoupledSamplesError(
            f"The output of {source} for a row depends on the other rows of the batch: it mixes rows, and a "
            "micro-batch has other rows to mix. Take the layer out of the model and apply it to whole "
            f"batches in the data pipeline, as in dataset.batch(n).map(layer), {WAY_OUT}"
        )
    return CoupledSamplesError(
        f"The output of {source} for a row depends on the other rows of the batch: it differs between "
        f"{sum(rows)} rows at once and micro-batches of {_listed(rows)}. Compute it from each row alone "
        f"(for a normalisation: LayerNormalization, GroupNormalization), train with whole batches, {WAY_OUT}"
    )


def wrong_term(
    term: Term, whole: float, parts: list[float], rows: list[int]
) -> CoupledSamplesError | LossSpecError:
    """Return the error for a loss of the batch that is not the weighted mean of those of micro-batches.

    Args:
        term: the term of the rows at once.
        whole: the loss of the rows at once.
        parts: the loss of each micro-batch.
        rows: the number of rows of each micro-batch.
    """
    values = f"it is {whole:.6g} for {sum(rows)} rows at once, and {_numbers(parts)} for micro-batches of "
    values += _listed(rows)
    by_rows = sum(value * count for value, count in zip(parts, rows, strict=True)) / sum(rows)
    if term.name == "add_loss":
        remedy = (
            "It is a sum over rows: divide it by the number of rows, keras.ops.shape(x)[0], "
            if _close(sum(parts), whole)
            else "Add a mean over rows, pass a mean over tokens or other weights as a loss to compile(), "
        )
        return LossSpecError(
            f"add_loss is not a mean over the rows of the batch: {values}. {remedy}{WAY_OUT}"
        )
    if not term.stated:
        return CoupledSamplesError(
            f"The loss {term.name!r} of a row depends on the other rows of the batch: {values}. Use a loss "
            f"that is computed from each row alone, train with whole batches, {WAY_OUT}"
        )
    if _close(sum(parts), whole):
        remedy = (
            'It is a sum: return one number for each sample from a loss with reduction="sum", without '
            "loss_weight, "
        )
    elif _close(by_rows, whole):
        remedy = (
            "It is a mean over rows: pass loss_weight=lambda x, y, sample_weight: keras.ops.shape(y)[0], "
        )
    else:
        remedy = (
            "Return from loss_weight the number that the loss is divided by, or, if there is none, one loss "
            "for each sample, "
        )
    return LossSpecError(f"The loss {term.name!r} is not divided by loss_weight: {values}. {remedy}{WAY_OUT}")


def moved_state(paths: list[str], rows: list[int]) -> InputError:
    """Return the error for variables of layers that each forward changes."""
    return InputError(
        f"Each forward in training changes {', '.join(repr(path) for path in paths[:3])}: {sum(rows)} rows "
        f"at once leave another value than micro-batches of {_listed(rows)}. Freeze the layer, update the "
        f"variable in a callback after each batch, or train with whole batches, {WAY_OUT}"
    )


def rows_out_of_range(rows: int) -> InputError:
    """Return the error for a model or a loss that reads rows by their index in the batch."""
    return InputError(
        f"The model or a loss reads rows of the batch by index, and an index is out of range for {rows} rows "
        "of the first batch. With edges of a graph, or labels that are row indices, train with whole batches."
    )


def no_predictions(rows: int) -> InputError:
    """Return the error for a model that predicts NaN for a few rows of the batch."""
    return InputError(
        f"The model predicts NaN for {rows} rows of the first batch. Train with whole batches if it reads "
        "other rows by their index, as a graph network does, because a micro-batch does not have these rows; "
        f"otherwise check the data, {WAY_OUT}"
    )


def wrong_total(whole: float, apart: float, rows: list[int]) -> LossSpecError:
    """Return the error for a total loss of Keras that is not the sum of the terms."""
    return LossSpecError(
        f"Keras computes the loss {whole:.6g} for {sum(rows)} rows at once, but the terms of micro-batches "
        f"of {_listed(rows)} give {apart:.6g}. Report this model as a bug of superbatch, {WAY_OUT}"
    )


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= CLOSE * max(abs(a), abs(b))


def _listed(rows: list[int]) -> str:
    """Return the sizes of micro-batches as text, such as "5 and 3 rows"."""
    *most, last = [str(count) for count in rows]
    return f"{', '.join(most)} and {last} rows" if most else f"{last} rows"


def _numbers(values: list[float]) -> str:
    *most, last = [f"{value:.6g}" for value in values]
    return f"{', '.join(most)} and {last}" if most else last
