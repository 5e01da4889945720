"""Record of bindings at one moment, which finds changed bindings and restores them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .bindings import NOTHING, UNHELD, differs, is_content, is_log, is_plain, value_or_unheld
from .reached import Table


class RecordedBindings:
    """Bindings of tables, each as it was when the table was recorded.

    Attributes:
        used: True once anything was recorded.

    Examples:
        >>> scale = {"value": 1.0}
        >>> names = RecordedBindings()
        >>> _ = names.record(Table("scale", scale), first=True)
        >>> scale["value"] = 2.0
        >>> [(key, was, now) for _, key, was, now in names.changed(counts=False)]
        [('value', 1.0, 2.0)]
        >>> names.restore(counts=False)
        >>> scale
        {'value': 1.0}
    """

    def __init__(self) -> None:
        self.used = False
        # Two lists, because the value of an earlier binding may be unknown (UNHELD).
        self._recorded: list[tuple[Table, dict[Any, Any]]] = []
        self._earlier: list[tuple[Table, dict[Any, Any]]] = []

    def record(self, table: Table, *, first: bool) -> dict[Any, Any]:
        """Record the bindings of a table, and return them.

        Args:
            table: the table.
            first: its values existed before the first window, so none of them is a result of a forward.
        """
        values, self.used = table.read(), True
        # `value_or_unheld` leaves out results of a forward, which would keep a whole graph in memory.
        recorded = {key: value_or_unheld(value, first=first) for key, value in values.items()}
        self._recorded.append((table, recorded))
        return values

    def record_earlier(self, recorded: Iterable[tuple[Table, dict[Any, Any]]]) -> None:
        """Record bindings at an earlier moment.

        Args:
            recorded: tables with their bindings then; `UNHELD` for an unknown value.
        """
        known, self.used = self.by_table_and_key(), True
        for table, values in recorded:
            # UNHELD for a binding that `record` has recorded, whose value is certain.
            new = {k: UNHELD if (id(table.content), k) in known else was for k, was in values.items()}
            self._earlier.append((table, new))

    def changed(self, *, counts: bool, results: bool = False) -> Iterator[tuple[Table, Any, Any, Any]]:
        """Yield the bindings that have changed, as (table, key, earlier value, present value).

        Args:
            counts: include ints that the loss function changes outside of modules. They are state only if a
                tensor or float changes too (as the pointer of a queue does); otherwise they count calls.
            results: include bindings that now hold a result of a forward.
        """
        for table, before in (*self._recorded, *self._earlier):
            now = table.read()
            # The keys of both, because a key may be new or deleted; a dict keeps their order.
            for key in dict.fromkeys((*before, *now)):
                was, value = before.get(key, NOTHING), now.get(key, NOTHING)
                if was is UNHELD or not differs(was, value):
                    continue
                # E.g. `self.last_features = h`, a result that the next forward does not read.
                if not results and value_or_unheld(value, first=True) is UNHELD:
                    continue
                if table.of_loss_fn and is_log(was, value):
                    continue
                # E.g. a global `calls += 1`, which no forward reads.
                counted = table.of_loss_fn and not (is_content(was) or is_content(value))
                if counted and not (counts and is_plain(was) and is_plain(value)):
                    continue
                yield table, key, was, value

    def any_of_loss_fn(self) -> bool:
        """Return whether a binding of a tensor or float outside of modules has changed."""
        return any(table.of_loss_fn for table, *_ in self.changed(counts=False))

    def restore(self, *, counts: bool) -> None:
        """Restore all bindings, including those that now hold results of a forward.

        Args:
            counts: as for `changed`.
        """
        # A list, because writing changes the tables that the generator reads.
        for table, key, before, _ in list(self.changed(counts=counts, results=True)):
            # A new attribute is deleted, so that `hasattr(self, "cache")` is False again.
            if before is NOTHING:
                table.unbind(key)
            else:
                table.write(key, before)

    def by_table_and_key(self) -> dict[tuple[int, Any], Any]:
        """Return the earlier values, by the id of the table's content and the key."""
        values_before = {
            (id(table.content), key): was for table, values in self._recorded for key, was in values.items()
        }
        for table, values in self._earlier:
            known = ((key, was) for key, was in values.items() if was is not UNHELD)
            values_before |= {(id(table.content), key): was for key, was in known}
        return values_before

    def names(self) -> set[str]:
        """Return the names of all bindings that `record` has recorded."""
        return {table.name_of(key) for table, values in self._recorded for key in values}

    def record_saved(self, table: Table, saved: Mapping[str, Any]) -> None:
        """Record the bindings of a table before a saved window.

        Args:
            table: a table of the model, or of the loss function, in the middle of the saved window.
            saved: name of a binding -> [its value], or [] if the name was not bound.
        """
        now = table.read()
        restored: dict[Any, Any] = {}
        for key in now:
            if table.name_of(key) in saved:
                restored[key] = next(iter(saved[table.name_of(key)]), NOTHING)
        if restored:
            self.used = True
            # In place of the present bindings, which are those in the middle of the saved window.
            self._recorded = [(t, b) for t, b in self._recorded if t.content is not table.content]
            before = {key: value_or_unheld(value, first=True) for key, value in now.items()} | restored
            self._recorded.append((table, {k: v for k, v in before.items() if v is not NOTHING}))
