"""Bindings of names at one moment: what has been bound anew since, and how it is undone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .bindings import NOTHING, UNHELD, differs, held, is_content, is_log, is_plain
from .reached import Table


class BoundNames:
    """Bindings of tables as they were when each was noted.

    Attributes:
        used: anything was noted.

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
        # Two lists: the value of a recalled binding may be unknown (UNHELD), that of a noted one is certain.
        self._noted: list[tuple[Table, dict[Any, Any]]] = []
        self._recalled: list[tuple[Table, dict[Any, Any]]] = []

    def note(self, table: Table, *, first: bool) -> dict[Any, Any]:
        """Record the bindings of a table, and return them.

        Args:
            table: to be noted.
            first: all of it was there before the first window, so that nothing in it is a result.
        """
        values, self.used = table.read(), True
        # `held` leaves out results of the forward: holding those would keep a whole graph in memory.
        self._noted.append((table, {key: held(value, first=first) for key, value in values.items()}))
        return values

    def recall(self, noted: Iterable[tuple[Table, dict[Any, Any]]]) -> None:
        """Note what was bound in further tables before, `UNHELD` where it is not known."""
        places, self.used = self.by_place(), True
        for table, values in noted:
            # A binding that was noted too has its certain value there, which must win.
            new = {k: UNHELD if (id(table.content), k) in places else was for k, was in values.items()}
            self._recalled.append((table, new))

    def rebound(self, *, loose: bool, results: bool = False) -> Iterator[tuple[Table, Any, Any, Any]]:
        """Yield the bindings that are no longer as they were: table, key, what was bound, what is.

        Args:
            loose: also ints that the loss function counts outside of modules: they are state only where a
                tensor or a float beside them is (the pointer of a queue), otherwise a count of calls.
            results: also what holds a result of the forward now.
        """
        for table, before in (*self._noted, *self._recalled):
            now = table.read()
            # Keys of both: a key may be new (was NOTHING) or deleted (value NOTHING). dict keeps their order.
            for key in dict.fromkeys((*before, *now)):
                was, value = before.get(key, NOTHING), now.get(key, NOTHING)
                if was is UNHELD or not differs(was, value):
                    continue
                # e.g. `self.last_features = h`: a result of this forward, not state that the next one reads.
                if not results and held(value, first=True) is UNHELD:
                    continue
                if table.loose and is_log(was, value):
                    continue
                # e.g. a global `calls += 1` beside the loss function: nothing reads it, so a warning would be
                # noise.
                counted = table.loose and not (is_content(was) or is_content(value))
                if counted and not (loose and is_plain(was) and is_plain(value)):
                    continue
                yield table, key, was, value

    def any_loose(self) -> bool:
        """Return whether a tensor or float outside of modules was bound anew."""
        return any(table.loose for table, *_ in self.rebound(loose=False))

    def restore(self, *, loose: bool) -> None:
        """Bind everything as it was, results of the forward too."""
        # A list: writing changes the tables that the generator reads.
        for table, key, before, _ in list(self.rebound(loose=loose, results=True)):
            # The window has created the attribute: deleting it lets `hasattr(self, "cache")` answer as
            # before.
            if before is NOTHING:
                table.unbind(key)
            else:
                table.write(key, before)

    def by_place(self) -> dict[tuple[int, Any], Any]:
        """Return the earlier values, by the identity of the table's content and the key."""
        places = {
            (id(table.content), key): was for table, values in self._noted for key, was in values.items()
        }
        for table, values in self._recalled:
            known = ((key, was) for key, was in values.items() if was is not UNHELD)
            places |= {(id(table.content), key): was for key, was in known}
        return places

    def names(self) -> set[str]:
        """Return the names of all bindings that were noted."""
        return {table.name_of(key) for table, values in self._noted for key in values}

    def assume(self, table: Table, saved: Mapping[str, Any]) -> None:
        """Note for a table what was bound in it before a saved window, by the names of bindings."""
        now = table.read()
        wanted: dict[Any, Any] = {}
        for key in now:
            if table.name_of(key) in saved:
                # An empty list in the saved state means "not bound"; [value] means bound to that value.
                wanted[key] = next(iter(saved[table.name_of(key)]), NOTHING)
        if wanted:
            self.used = True
            # The saved bindings replace what this process noted: it noted them in the middle of the window.
            self._noted = [(t, b) for t, b in self._noted if t.content is not table.content]
            before = {key: held(value, first=True) for key, value in now.items()} | wanted
            self._noted.append((table, {k: v for k, v in before.items() if v is not NOTHING}))
