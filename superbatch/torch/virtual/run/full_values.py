"""Full values that grow with the batch: logged once, and counted while they are in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..ir.values import Node, Value, going_back
from .growth import mark_growth, values_of
from .log import Log
from .memo import Form
from .store import CountedBytes, Store


class FullValues:
    """Count of the full values in memory.

    Args:
        store: the store whose budget they take.
        log: receives the operator of each.
        parts: number of micro-batches; with one, no full value is larger than a micro-batch.
    """

    def __init__(self, store: Store, log: Log, parts: int) -> None:
        self._store, self._log, self._several = store, log, parts > 1

    def hold(self, value: Value, node: Node, read: Sequence[Tensor] = ()) -> None:
        """Count a result of an operation, unless it is a view of an input."""
        if self._several and (value.grows or value.picked):
            self.note(value, (node.where, node.name, node.backward), read)

    def note(self, value: Value, place: tuple[str, str, bool], read: Sequence[Tensor] = ()) -> None:
        """Count a materialized value; `place` is its module, its operator, and True in a backward."""
        tensor = value.full
        # A view of an input has no memory of its own: the input was counted.
        if tensor is None or value.held is not None or any(_share_memory(tensor, other) for other in read):
            return
        value.held = CountedBytes(self._store, value.nbytes)
        self._log.full_value(place, value.nbytes, value.picked)


def mark(form: Form, results: Any, rows: int, store: Store, log: Log) -> None:
    """Mark the results of an operation that are full and grow with the batch.

    Args:
        form: the operation.
        results: its results.
        rows: rows of a micro-batch.
        store: counts results that were computed immediately.
        log: receives these results.

    Raises:
        CoupledSamplesError: with ``on_gather="error"``.
    """
    if rows >= form.samples:  # a single micro-batch: a full value is no larger
        return
    values = values_of(results)
    if mark_growth(form, results, rows):
        log.full_value_needed(str(form.func), sum(value.nbytes for value in values))
    for value in values:
        if value.full is not None and (value.grows or value.picked):
            FullValues(store, log, 2).note(value, (log.where, str(form.func), going_back()))


def _share_memory(tensor: Tensor, other: Tensor) -> bool:
    # The StorageImpl and not data_ptr(): views at different offsets share it.
    return tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
