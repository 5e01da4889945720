"""Whole values that grow with the batch, noted and counted while they are in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..ir.values import Node, Value, going_back
from .growth import mark_growth, values_of
from .log import Log
from .memo import Form
from .store import Held, Store


class Wholes:
    """Counts whole values that are there.

    Args:
        store: whose budget they take.
        log: receives the operator of each.
        parts: micro-batches; of one alone nothing is larger than a micro-batch.
    """

    def __init__(self, store: Store, log: Log, parts: int) -> None:
        self._store, self._log, self._several = store, log, parts > 1

    def hold(self, value: Value, node: Node, read: Sequence[Tensor] = ()) -> None:
        """Count a value that an operation has given, unless it is a view of what was read."""
        if self._several and (value.grows or value.picked):
            self.note(value, (node.where, node.name, node.backward), read)

    def note(self, value: Value, place: tuple[str, str, bool], read: Sequence[Tensor] = ()) -> None:
        """Count a value that is there, by its module, its operator and whether it is on the way back."""
        tensor = value.whole
        if tensor is None or value.held is not None or any(_one_memory(tensor, other) for other in read):
            return
        value.held = Held(self._store, value.nbytes)
        self._log.whole(place, value.nbytes, value.picked)


def mark(form: Form, results: Any, rows: int, store: Store, log: Log) -> None:
    """Mark the results of an operation that are whole and grow with the batch.

    Args:
        form: the operation.
        results: what it gave.
        rows: of a micro-batch.
        store: counts those that were computed at once.
        log: receives them.

    Raises:
        CoupledSamplesError: with ``on_gather="error"``.
    """
    if rows >= form.samples:  # one micro-batch, and all of it whole
        return
    values = values_of(results)
    if mark_growth(form, results, rows):
        log.whole_needed(str(form.func), sum(value.nbytes for value in values))
    for value in values:
        if value.whole is not None and (value.grows or value.picked):
            Wholes(store, log, 2).note(value, (log.where, str(form.func), going_back()))


def _one_memory(tensor: Tensor, other: Tensor) -> bool:
    return tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
