"""Bindings at the beginning of each window, read again only if the identity of a value has changed.

A window that does not inspect everything makes no new search. It compares the sizes of the tables that the
last search has found, and by identity the small tensors, numbers and strings in them. The values are held, so
that no other object can reuse their ids.
"""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Mapping
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from .bindings import SCALARS, UNHELD
from .kept_tensors import can_be_kept, is_array, version
from .reached import Reached, Table

HELD_BYTES = 1 << 16  # bytes of the largest value that is held: statistics and counts, no data
MOST_ENTRIES = 64  # entries of the longest list or dictionary that is held; a longer one is a log or data


class RecordedTable(NamedTuple):
    """Bindings of a table: the values that are held, and a key for the content of each (`content_key`)."""

    table: Table
    values: dict[Any, Any]
    contents: dict[Any, Any]

    def unwritten_values(self) -> dict[Any, Any]:
        """Return the values, with `UNHELD` in place of those that were written to."""
        # A write such as `center.add_(1)` changes the content but not the identity.
        written = {key for key, content in self.contents.items() if content_key(self.values[key]) != content}
        return {key: UNHELD if key in written else value for key, value in self.values.items()}


class BindingsAtBegin:
    """Bindings of the tables that the last search has found, read at the beginning of each window.

    The tables keep values alive, so all are dropped when a module or an object of the search is freed.

    Args:
        found: result of the search; None: no tables.
        known: bindings that are recorded elsewhere, by the id of the table's content and the key.

    Examples:
        >>> scale = {"value": 1.0}
        >>> bindings = BindingsAtBegin(Reached([Table("scale", scale)], [], {}))
        >>> before = bindings.begin()
        >>> scale["value"] = 2.0
        >>> before[0].values, bindings.begin()[0].values
        ({'value': 1.0}, {'value': 2.0})
    """

    def __init__(
        self, found: Reached | None = None, known: Mapping[tuple[int, Any], Any] | None = None
    ) -> None:
        self._owners: list[Any] = []
        self._recorded_elsewhere = {} if known is None else known
        self._set([])
        if found is None:
            return
        tables = [*found.tables, *found.buffer_tables(inside=True)]
        self._set([self._hold(table) for table in tables if _is_recorded(table)])
        # Weak, because the callbacks below must not keep this object alive.
        own = weakref.ref(self)

        def free(_: Any) -> None:
            if (bindings := own()) is not None:
                bindings.free()

        # The tables hold attribute dictionaries, which would outlive a deleted module.
        self._owners = [weakref.ref(owner, free) for owner in (*found.names, *found.objects)]

    def free(self) -> None:
        """Free all tables and values."""
        self._set([])

    def begin(self) -> list[RecordedTable]:
        """Return the tables with their present bindings."""
        if not self._is_same():
            self._set([self._hold(one.table) for one in self._tables if _is_recorded(one.table)])
        return self._tables

    def _set(self, recorded: list[RecordedTable]) -> None:
        self._tables = recorded
        kinds = [(one, _kind(one.table)) for one in recorded]
        self._sized = [one.table.content for one, kind in kinds if kind is not None]
        # Sizes are compared first, because that is cheap and itemgetter does not find an added key.
        self._sizes = list(map(len, self._sized))
        self._read_in_full = [one for one, kind in kinds if kind is None]
        self._lists = [one.table.content for one, kind in kinds if kind is list]
        self._getters: list[tuple[Any, Any]] = []
        compared: list[Any] = []
        for (table, values, _), kind in kinds:
            keys = [key for key, value in values.items() if value is not UNHELD]
            if kind is dict and keys:
                # The first key twice, because itemgetter returns a tuple only for two keys or more.
                self._getters.append((itemgetter(keys[0], *keys), table.content))
                compared += [values[key] for key in (keys[0], *keys)]
        self._compared_values = compared + list(chain.from_iterable(self._lists))

    def _is_same(self) -> bool:
        """Return whether all names are bound to the same objects as before.

        This runs in every window, so it compares in C, without a Python object for each binding.
        """
        if list(map(len, self._sized)) != self._sizes:
            return False
        try:
            now = [get(content) for get, content in self._getters]
        except KeyError:  # a key was deleted since the last window
            return False
        if not all(map(is_, chain.from_iterable((*now, *self._lists)), self._compared_values)):
            return False
        return all(_same(one.table.read(), one.values) for one in self._read_in_full)

    def _hold(self, table: Table) -> RecordedTable:
        identity = id(table.content)
        # Bindings that have changed before are recorded elsewhere.
        values = {
            key: value if _is_small(value) and (identity, key) not in self._recorded_elsewhere else UNHELD
            for key, value in table.read().items()
        }
        contents = {key: content_key(value) for key, value in values.items()}
        return RecordedTable(table, values, {key: one for key, one in contents.items() if one is not None})


def content_key(value: Any) -> Any:
    """Return a value that changes when a tensor or array is written in place; None for other objects.

    Examples:
        >>> import torch
        >>> center = torch.zeros(2)
        >>> before = content_key(center)
        >>> content_key(center.add_(1)) == before
        False
    """
    if isinstance(value, Tensor):
        return value.data_ptr(), version(value)
    if is_array(value):
        # An array has no version counter, so its bytes are hashed; HELD_BYTES limits the cost.
        return zlib.crc32(value.tobytes())
    if isinstance(value, tuple):  # a list has a table of its own
        contents = tuple(map(content_key, value))
        return contents if any(one is not None for one in contents) else None
    return None


def _same(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    each = (now.get(key, UNHELD) is was for key, was in before.items() if was is not UNHELD)
    return len(now) == len(before) and all(each)


def _kind(table: Table) -> Any:
    if table.keys is None and isinstance(table.content, dict):
        return dict
    return list if isinstance(table.content, list | deque) else None


def _is_recorded(table: Table) -> bool:
    """Return whether a table is recorded: it has attributes, or a few small values."""
    if table.own and table.keys is None:
        return isinstance(table.content, dict)  # classes only in windows that inspect everything
    if isinstance(table.content, tuple):
        # The bindings of a tuple cannot change, and its tensors are watched by their version counters.
        return False
    values = table.read()
    if _kind(table) is None:  # usually bound to modules and functions, which rarely changes
        return any(map(_is_small, values.values()))
    return len(table.content) <= MOST_ENTRIES and all(map(_is_small, values.values()))


def _is_small(value: Any) -> bool:
    """Return whether a value may be held between windows: it is small and not a result of a forward."""
    if isinstance(value, SCALARS):
        return True
    if isinstance(value, Tensor):  # for a trained parameter that is replaced, the next window raises
        return can_be_kept(value) and not value.requires_grad and value.nbytes <= HELD_BYTES
    if isinstance(value, list | tuple | deque | set):
        return len(value) <= MOST_ENTRIES and all(map(_is_small, value))
    return is_array(value) and value.nbytes <= HELD_BYTES and not value.dtype.hasobject
