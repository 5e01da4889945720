"""Bindings at the beginning of each window, read again only if an identity has changed.

A window that does not inspect everything compares bindings to small tensors, numbers and strings by identity,
and the sizes of tables, without a new search. The values are held, so that no other object can reuse their
ids.
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

HELD_BYTES = 1 << 16  # of the largest value that is held: statistics and counts, no data
MOST_ENTRIES = 64  # of the longest list or dictionary that is held: a longer one is a log or data


class Noted(NamedTuple):
    """Bindings of a table: the values that are held, and marks of their content (see `content_of`)."""

    table: Table
    values: dict[Any, Any]
    contents: dict[Any, Any]

    def unwritten(self) -> dict[Any, Any]:
        """Return the values, with `UNHELD` for those that were written in place."""
        # A write such as `center.add_(1)` changes the content but not the identity.
        written = {key for key, content in self.contents.items() if content_of(self.values[key]) != content}
        return {key: UNHELD if key in written else value for key, value in self.values.items()}


class BeginLook:
    """Bindings of the tables that the last search has found, read at the beginning of each window.

    The tables keep values alive, so all are dropped when a module or an object of the search is freed.

    Args:
        found: result of the search; None: no tables.
        moving: bindings that are recorded elsewhere, by the id of the table's content and the key.

    Examples:
        >>> scale = {"value": 1.0}
        >>> look = BeginLook(Reached([Table("scale", scale)], [], {}))
        >>> before = look.begin()
        >>> scale["value"] = 2.0
        >>> before[0].values, look.begin()[0].values
        ({'value': 1.0}, {'value': 2.0})
    """

    def __init__(
        self, found: Reached | None = None, moving: Mapping[tuple[int, Any], Any] | None = None
    ) -> None:
        self._owners: list[Any] = []
        self._moving = {} if moving is None else moving
        self._set([])
        if found is None:
            return
        tables = [*found.tables, *found.buffer_tables(inside=True)]
        self._set([self._hold(table) for table in tables if _is_noted(table)])
        # Weak, because the callbacks below must not keep this object alive.
        own = weakref.ref(self)

        def release(_: Any) -> None:
            if (look := own()) is not None:
                look.release()

        # The tables hold attribute dictionaries, which would outlive a deleted module.
        self._owners = [weakref.ref(owner, release) for owner in (*found.names, *found.objects)]

    def release(self) -> None:
        """Free all tables and values."""
        self._set([])

    def begin(self) -> list[Noted]:
        """Return the tables with their present bindings."""
        if not self._is_same():
            self._set([self._hold(one.table) for one in self._noted if _is_noted(one.table)])
        return self._noted

    def _set(self, noted: list[Noted]) -> None:
        self._noted = noted
        kinds = [(one, _kind(one.table)) for one in noted]
        self._sized = [one.table.content for one, kind in kinds if kind is not None]
        # Sizes are compared first, because that is cheap and itemgetter does not find an added key.
        self._sizes = list(map(len, self._sized))
        self._others = [one for one, kind in kinds if kind is None]
        self._lists = [one.table.content for one, kind in kinds if kind is list]
        self._getters: list[tuple[Any, Any]] = []
        held: list[Any] = []
        for (table, values, _), kind in kinds:
            keys = [key for key, value in values.items() if value is not UNHELD]
            if kind is dict and keys:
                # The first key twice, because itemgetter returns a tuple only for two keys or more.
                self._getters.append((itemgetter(keys[0], *keys), table.content))
                held += [values[key] for key in (keys[0], *keys)]
        self._held = held + list(chain.from_iterable(self._lists))

    def _is_same(self) -> bool:
        """Return whether the same objects are bound as before, without a new object for each binding."""
        if list(map(len, self._sized)) != self._sizes:
            return False
        try:
            now = [get(content) for get, content in self._getters]
        except KeyError:  # a key was deleted since the last window
            return False
        # By `map`, in C, without a Python frame for each binding.
        if not all(map(is_, chain.from_iterable((*now, *self._lists)), self._held)):
            return False
        return all(_same(one.table.read(), one.values) for one in self._others)

    def _hold(self, table: Table) -> Noted:
        place = id(table.content)
        # Bindings that have changed before are recorded elsewhere.
        values = {
            key: value if _is_small(value) and (place, key) not in self._moving else UNHELD
            for key, value in table.read().items()
        }
        contents = {key: content_of(value) for key, value in values.items()}
        return Noted(table, values, {key: one for key, one in contents.items() if one is not None})


def content_of(value: Any) -> Any:
    """Return a mark that changes when a tensor or array is written in place; None for other values.

    Examples:
        >>> import torch
        >>> center = torch.zeros(2)
        >>> before = content_of(center)
        >>> content_of(center.add_(1)) == before
        False
    """
    if isinstance(value, Tensor):
        return value.data_ptr(), version(value)
    if is_array(value):
        # An array has no version counter, so its bytes are hashed; HELD_BYTES limits the cost.
        return zlib.crc32(value.tobytes())
    if isinstance(value, tuple):  # a list has a table of its own
        contents = tuple(map(content_of, value))
        return contents if any(one is not None for one in contents) else None
    return None


def _same(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    each = (now.get(key, UNHELD) is was for key, was in before.items() if was is not UNHELD)
    return len(now) == len(before) and all(each)


def _kind(table: Table) -> Any:
    if table.keys is None and isinstance(table.content, dict):
        return dict
    return list if isinstance(table.content, list | deque) else None


def _is_noted(table: Table) -> bool:
    """Return whether to record a table: attributes, short lists of small values, or single small values."""
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
