"""Bindings as they all were last inspected, compared after a failure: what was not noted may have moved."""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from .bindings import NOTHING, UNHELD, differs, held, is_content, is_log
from .bound_names import BoundNames
from .kept_tensors import SMALL_BYTES, can_be_kept, is_array
from .reached import LONGEST, Table


class LastLook:
    """Bindings of names at one moment; none is kept alive.

    Examples:
        >>> scale = {"value": 1.0}
        >>> look = LastLook([Table("scale", scale)])
        >>> scale["value"] = 2.0
        >>> [table.name_of(key) for table, key, _ in look.unlike([Table("scale", scale)], BoundNames())]
        ["scale['value']"]
    """

    def __init__(self, tables: Iterable[Table] = ()) -> None:
        # By name, since the search makes new tables; several objects may have one name, so a list in order.
        self._seen: dict[str, list[Any]] = {}
        for table in tables:
            for key, value in table.read().items():
                self._seen.setdefault(table.name_of(key), []).append(_trace(value))

    def unlike(self, tables: Iterable[Table], noted: BoundNames) -> Iterator[tuple[Table, Any, Any]]:
        """Yield the changed bindings, apart from results of a forward: table, key, present value.

        Args:
            tables: found by the same search as those at the look.
            noted: left out, with the content of lists in them.
        """
        places, names = noted.by_place(), noted.names()
        if not self._seen:
            # Before the first look nothing can be compared, and everything would seem new.
            return
        met: dict[str, int] = {}
        for table in tables:
            for key, value in table.read().items():
                name = table.name_of(key)
                # The n-th binding of this name, compared with the n-th at the look.
                number = met[name] = met.get(name, 0) + 1
                seen = self._seen.get(name, ())
                was = seen[number - 1] if number <= len(seen) else NOTHING
                if (id(table.content), key) in places or (key is None and name in names):
                    continue
                if _same(was, _trace(value)) or held(value, first=was is not NOTHING) is UNHELD:
                    continue
                if table.loose and (is_log(was, value) or not (is_content(value) or isinstance(was, float))):
                    continue  # a count or a log, which nothing reads
                yield table, key, value


class _Trace(NamedTuple):
    """An object, and what of its content is compared."""

    reference: weakref.ref[Any]
    content: Any = None


def _trace(value: Any, depth: int = 0) -> Any:
    """Return a trace by which a value is recognised later."""
    if isinstance(value, tuple | list | deque):
        # Depth 2 reaches `banks[0][1]`; deeper content is a table of its own.
        if depth < 2 and len(value) <= LONGEST:
            return tuple(_trace(item, depth + 1) for item in value)
        return type(value)
    if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
        return value
    try:
        reference = weakref.ref(value)
    except TypeError:  # a dictionary: its content is a table of its own
        return type(value)
    if isinstance(value, Tensor):
        # The address shows `tensor.data = other`, which keeps the object.
        return _Trace(reference, value.data_ptr() if can_be_kept(value) else None)
    if is_array(value) and value.nbytes <= SMALL_BYTES and not value.dtype.hasobject:
        return _Trace(reference, zlib.crc32(value.tobytes()))
    return _Trace(reference)


def _same(was: Any, now: Any) -> bool:
    if isinstance(was, _Trace) and isinstance(now, _Trace):
        # A dead reference is None on both sides, hence `is not None`.
        return was.reference() is now.reference() is not None and was.content == now.content
    if isinstance(was, tuple) and isinstance(now, tuple) and len(was) == len(now):
        return all(map(_same, was, now))
    return not differs(was, now)
