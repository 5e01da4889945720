"""Count of the full values in memory that grow with the batch, and their log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..ir.values import Node, Value, in_backward
from .growth import mark_growth, values_of
from .log import Log
from .memo import KeyedCall
from .store import CountedBytes, Store


class FullValues:
    """Count of the full values in memory; with one micro-batch, these are no larger and are not counted."""

    def __init__(self, store: Store, log: Log, microbatches: int) -> None:
        self._store, self._log, self._several = store, log, microbatches > 1

    def count_result(self, value: Value, node: Node, read: Sequence[Tensor] = ()) -> None:
        """Count a result of an operation that grows with the batch, unless it is a view of an input."""
        if self._several and (value.grows or value.picked):
            self.count(value, (node.where, node.name, node.backward), read)

    def count(self, value: Value, origin: tuple[str, str, bool], read: Sequence[Tensor] = ()) -> None:
        """Count a materialized value; `origin` has its module, its operator, and True for a backward."""
        tensor = value.full
        # A view of an input has no memory of its own.
        if (
            tensor is None
            or value.counted_bytes is not None
            or any(_share_memory(tensor, other) for other in read)
        ):
            return
        value.counted_bytes = CountedBytes(self._store, value.nbytes)
        self._log.log_full_value(origin, value.nbytes, value.picked)


def mark(keyed: KeyedCall, results: Any, rows: int, store: Store, log: Log) -> None:
    """Mark the results that are full and grow with the batch; count and log those that are computed already.

    Raises:
        CoupledSamplesError: with ``on_gather="error"``.
    """
    if rows >= keyed.samples:  # one micro-batch: full values are no larger
        return
    values = values_of(results)
    if mark_growth(keyed, results, rows):
        log.operator_gathers(str(keyed.func), sum(value.nbytes for value in values))
    for value in values:
        if value.full is not None and (value.grows or value.picked):
            FullValues(store, log, 2).count(value, (log.where, str(keyed.func), in_backward()))


def _share_memory(tensor: Tensor, other: Tensor) -> bool:
    # Not data_ptr(), which differs between views of the same storage.
    return tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
