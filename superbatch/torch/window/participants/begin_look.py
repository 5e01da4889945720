"""Bindings of names as a window begins, read again only where an identity has changed.

A window that is not looked at compares what is bound to small tensors, numbers and texts by identity, and
the sizes of tables: no walk over all that can be reached. They are held, so that no other object has their
identity.
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

HELD_BYTES = 1 << 16  # of one value: statistics and counts, no data
MOST_ENTRIES = 64  # of a list or dictionary: a longer one is a log or data


class Noted(NamedTuple):
    """Bindings of a table: what is held of them, and what tells that it was not written since."""

    table: Table
    values: dict[Any, Any]
    contents: dict[Any, Any]

    def unwritten(self) -> dict[Any, Any]:
        """Return the values, `UNHELD` in place of those that were written in place."""
        # `is` cannot see a write such as `center.add_(1)`: the same tensor, another content.
        written = {key for key, content in self.contents.items() if content_of(self.values[key]) != content}
        return {key: UNHELD if key in written else value for key, value in self.values.items()}


class BeginLook:
    """Bindings of the tables that the last search has found, read at the beginning of each window.

    A table keeps what is bound in it alive: when a module or an object of the search dies, all are dropped.

    Args:
        found: by the search; None: nothing.
        moving: bindings that are noted elsewhere, by the identity of the table's content and the key.

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
        # Weak: the callback of a dead owner must not keep this look alive.
        own = weakref.ref(self)

        def release(_: Any) -> None:
            if (look := own()) is not None:
                look.release()

        # The tables hold attribute dictionaries, not their owners, so they would outlive a deleted module.
        self._owners = [weakref.ref(owner, release) for owner in (*found.names, *found.objects)]

    def release(self) -> None:
        """Drop all tables and values."""
        self._set([])

    def begin(self) -> list[Noted]:
        """Return the tables, and what is held of the bindings in each."""
        if not self._is_same():
            self._set([self._hold(one.table) for one in self._noted if _is_noted(one.table)])
        return self._noted

    def _set(self, noted: list[Noted]) -> None:
        self._noted = noted
        kinds = [(one, _kind(one.table)) for one in noted]
        self._sized = [one.table.content for one, kind in kinds if kind is not None]
        # Sizes first: the cheapest test, and itemgetter alone does not see an added key.
        self._sizes = list(map(len, self._sized))
        self._others = [one for one, kind in kinds if kind is None]
        self._lists = [one.table.content for one, kind in kinds if kind is list]
        self._getters: list[tuple[Any, Any]] = []
        held: list[Any] = []
        for (table, values, _), kind in kinds:
            keys = [key for key, value in values.items() if value is not UNHELD]
            if kind is dict and keys:
                # The first key twice: itemgetter of two keys returns a tuple, of one key the bare value.
                self._getters.append((itemgetter(keys[0], *keys), table.content))
                held += [values[key] for key in (keys[0], *keys)]
        self._held = held + list(chain.from_iterable(self._lists))

    def _is_same(self) -> bool:
        """Return whether the same objects are bound as at the last look, without one of its own for each."""
        if list(map(len, self._sized)) != self._sizes:
            return False
        try:
            now = [get(content) for get, content in self._getters]
        # A key was deleted since the last window.
        except KeyError:
            return False
        # In C: one `is` per binding, with no Python frame for each.
        if not all(map(is_, chain.from_iterable((*now, *self._lists)), self._held)):
            return False
        return all(_same(one.table.read(), one.values) for one in self._others)

    def _hold(self, table: Table) -> Noted:
        place = id(table.content)
        # Moved bindings are copied anyway: holding one would keep the result of a forward.
        values = {
            key: value if _is_small(value) and (place, key) not in self._moving else UNHELD
            for key, value in table.read().items()
        }
        contents = {key: content_of(value) for key, value in values.items()}
        return Noted(table, values, {key: one for key, one in contents.items() if one is not None})


def content_of(value: Any) -> Any:
    """Return what tells that a tensor or array was not written in place since; None for other values.

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
        # An array has no version counter, so its bytes are hashed; HELD_BYTES bounds the cost.
        return zlib.crc32(value.tobytes())
    if isinstance(value, tuple):  # a list is a table of its own
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
    """Return whether a table is noted: attributes, short lists of small values, and single ones."""
    if table.own and table.keys is None:
        return isinstance(table.content, dict)  # classes are looked at in few windows
    if isinstance(table.content, tuple):
        # A tuple cannot be bound anew, and tensors in it are watched by their own counters.
        return False
    values = table.read()
    if _kind(table) is None:  # mostly modules and functions, whose names are hardly bound anew
        return any(map(_is_small, values.values()))
    return len(table.content) <= MOST_ENTRIES and all(map(_is_small, values.values()))


def _is_small(value: Any) -> bool:
    """Return whether a value may be held between windows: it is small, and no result of a forward."""
    if isinstance(value, SCALARS):
        return True
    if isinstance(value, Tensor):  # a trained one that is replaced is refused at the next window
        return can_be_kept(value) and not value.requires_grad and value.nbytes <= HELD_BYTES
    if isinstance(value, list | tuple | deque | set):
        return len(value) <= MOST_ENTRIES and all(map(_is_small, value))
    return is_array(value) and value.nbytes <= HELD_BYTES and not value.dtype.hasobject
