"""Traces of all bindings at the last inspection; after a failure they show which state has no copy."""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from .bindings import NOTHING, UNHELD, differs, is_content, is_log, value_or_unheld
from .kept_tensors import SMALL_BYTES, can_be_kept, is_array
from .reached import LONGEST, Table
from .recorded_bindings import RecordedBindings


class LastInspection:
    """Traces of bindings at one moment, which keep no value alive.

    Examples:
        >>> scale = {"value": 1.0}
        >>> inspection = LastInspection([Table("scale", scale)])
        >>> scale["value"] = 2.0
        >>> changed = inspection.changed([Table("scale", scale)], RecordedBindings())
        >>> [table.name_of(key) for table, key, _ in changed]
        ["scale['value']"]
    """

    def __init__(self, tables: Iterable[Table] = ()) -> None:
        # By name, because each search makes new tables. Several objects may share a name, hence the lists.
        self._traces: dict[str, list[Any]] = {}
        for table in tables:
            for key, value in table.read().items():
                self._traces.setdefault(table.name_of(key), []).append(_trace(value))

    def changed(
        self, tables: Iterable[Table], recorded: RecordedBindings
    ) -> Iterator[tuple[Table, Any, Any]]:
        """Yield the changed bindings, except results of a forward, as (table, key, present value).

        Args:
            tables: the tables of a new search from the same models and functions.
            recorded: bindings to leave out, with the content of lists in them.
        """
        left_out, names = recorded.by_table_and_key(), recorded.names()
        if not self._traces:
            # Before the first inspection there is nothing to compare with.
            return
        counts: dict[str, int] = {}
        for table in tables:
            for key, value in table.read().items():
                name = table.name_of(key)
                # The n-th binding of this name is compared with the n-th at the inspection.
                number = counts[name] = counts.get(name, 0) + 1
                traces = self._traces.get(name, ())
                was = traces[number - 1] if number <= len(traces) else NOTHING
                if (id(table.content), key) in left_out or (key is None and name in names):
                    continue
                if _same(was, _trace(value)) or value_or_unheld(value, first=was is not NOTHING) is UNHELD:
                    continue
                if table.of_loss_fn and (
                    is_log(was, value) or not (is_content(value) or isinstance(was, float))
                ):
                    continue  # a count or a log, which no forward reads
                yield table, key, value


class _Trace(NamedTuple):
    """A weak reference to an object, and the part of its content that is compared."""

    reference: weakref.ref[Any]
    content: Any = None


def _trace(value: Any, depth: int = 0) -> Any:
    """Return a trace by which a value is recognised later."""
    if isinstance(value, tuple | list | deque):
        # Two levels, as in `banks[0][1]`; deeper content has a table of its own.
        if depth < 2 and len(value) <= LONGEST:
            return tuple(_trace(item, depth + 1) for item in value)
        return type(value)
    if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
        return value
    try:
        reference = weakref.ref(value)
    except TypeError:  # e.g. a dictionary, whose content has a table of its own
        return type(value)
    if isinstance(value, Tensor):
        # With its address, because `tensor.data = other` does not change the object.
        return _Trace(reference, value.data_ptr() if can_be_kept(value) else None)
    if is_array(value) and value.nbytes <= SMALL_BYTES and not value.dtype.hasobject:
        return _Trace(reference, zlib.crc32(value.tobytes()))
    return _Trace(reference)


def _same(was: Any, now: Any) -> bool:
    if isinstance(was, _Trace) and isinstance(now, _Trace):
        # `is not None`, because two dead references would be equal.
        return was.reference() is now.reference() is not None and was.content == now.content
    if isinstance(was, tuple) and isinstance(now, tuple) and len(was) == len(now):
        return all(map(_same, was, now))
    return not differs(was, now)
