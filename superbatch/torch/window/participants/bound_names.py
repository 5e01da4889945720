"""Bindings at one moment, to find and undo changes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .bindings import NOTHING, UNHELD, differs, held, is_content, is_log, is_plain
from .reached import Table


class BoundNames:
    """Bindings of tables, each as it was when the table was recorded.

    Attributes:
        used: True once anything was recorded.

    Examples:
        >>> scale = {"value": 1.0}
        >>> names = BoundNames()
        >>> _ = names.note(Table("scale", scale), first=True)
        >>> scale["value"] = 2.0
        >>> [(key, was, now) for _, key, was, now in names.rebound(loose=False)]
        [('value', 1.0, 2.0)]
        >>> names.restore(loose=False)
        >>> scale
        {'value': 1.0}
    """

    def __init__(self) -> None:
        self.used = False
        # Two lists, because the value of a recalled binding may be unknown (UNHELD).
        self._noted: list[tuple[Table, dict[Any, Any]]] = []
        self._recalled: list[tuple[Table, dict[Any, Any]]] = []

    def note(self, table: Table, *, first: bool) -> dict[Any, Any]:
        """Record the bindings of a table, and return them.

        Args:
            table: the table.
            first: its values existed before the first window, so none of them is a result of a forward.
        """
        values, self.used = table.read(), True
        # `held` leaves out results of a forward, which would keep a whole graph in memory.
        self._noted.append((table, {key: held(value, first=first) for key, value in values.items()}))
        return values

    def recall(self, noted: Iterable[tuple[Table, dict[Any, Any]]]) -> None:
        """Record earlier bindings of further tables, with `UNHELD` for unknown values."""
        places, self.used = self.by_place(), True
        for table, values in noted:
            # UNHELD for a binding that `note` has recorded, whose value is certain.
            new = {k: UNHELD if (id(table.content), k) in places else was for k, was in values.items()}
            self._recalled.append((table, new))

    def rebound(self, *, loose: bool, results: bool = False) -> Iterator[tuple[Table, Any, Any, Any]]:
        """Yield the bindings that have changed, as (table, key, earlier value, present value).

        Args:
            loose: also ints that the loss function changes outside of modules. They are state only beside a
                tensor or a float that changes (the pointer of a queue); otherwise they count calls.
            results: also bindings that now hold a result of a forward.
        """
        for table, before in (*self._noted, *self._recalled):
            now = table.read()
            # The keys of both, because a key may be new or deleted; a dict keeps their order.
            for key in dict.fromkeys((*before, *now)):
                was, value = before.get(key, NOTHING), now.get(key, NOTHING)
                if was is UNHELD or not differs(was, value):
                    continue
                # E.g. `self.last_features = h`, a result that the next forward does not read.
                if not results and held(value, first=True) is UNHELD:
                    continue
                if table.loose and is_log(was, value):
                    continue
                # E.g. a global `calls += 1`, which no forward reads.
                counted = table.loose and not (is_content(was) or is_content(value))
                if counted and not (loose and is_plain(was) and is_plain(value)):
                    continue
                yield table, key, was, value

    def any_loose(self) -> bool:
        """Return whether a binding of a tensor or float outside of modules has changed."""
        return any(table.loose for table, *_ in self.rebound(loose=False))

    def restore(self, *, loose: bool) -> None:
        """Restore all bindings, also those that hold results of a forward now."""
        # A list, because writing changes the tables that the generator reads.
        for table, key, before, _ in list(self.rebound(loose=loose, results=True)):
            # A new attribute is deleted, so that `hasattr(self, "cache")` is False again.
            if before is NOTHING:
                table.unbind(key)
            else:
                table.write(key, before)

    def by_place(self) -> dict[tuple[int, Any], Any]:
        """Return the earlier values, by the id of the table's content and the key."""
        places = {
            (id(table.content), key): was for table, values in self._noted for key, was in values.items()
        }
        for table, values in self._recalled:
            known = ((key, was) for key, was in values.items() if was is not UNHELD)
            places |= {(id(table.content), key): was for key, was in known}
        return places

    def names(self) -> set[str]:
        """Return the names of all bindings that `note` has recorded."""
        return {table.name_of(key) for table, values in self._noted for key in values}

    def assume(self, table: Table, saved: Mapping[str, Any]) -> None:
        """Record the bindings of a table before a saved window, given by name."""
        now = table.read()
        wanted: dict[Any, Any] = {}
        for key in now:
            if table.name_of(key) in saved:
                # An empty list in the saved state means "not bound"; [value] means bound to that value.
                wanted[key] = next(iter(saved[table.name_of(key)]), NOTHING)
        if wanted:
            self.used = True
            # These replace the present bindings, which are those in the middle of the saved window.
            self._noted = [(t, b) for t, b in self._noted if t.content is not table.content]
            before = {key: held(value, first=True) for key, value in now.items()} | wanted
            self._noted.append((table, {k: v for k, v in before.items() if v is not NOTHING}))
