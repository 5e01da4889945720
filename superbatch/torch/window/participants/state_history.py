"""Record of the state that forwards have changed so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .bindings_at_begin import BindingsAtBegin
from .last_inspection import LastInspection
from .reached import Table
from .watched import Entry, WatchedTensors


class ChangedState(NamedTuple):
    """A value that a forward has changed.

    Attributes:
        name: name for messages.
        sure: True if it is certainly state. It may otherwise be a result, a cache or a count that no forward
            reads.
    """

    name: str
    sure: bool


@dataclass
class StateHistory:
    """Record of the state that has changed so far; the keepers of an accumulator share it.

    Attributes:
        windows: number of windows that were committed.
        next_inspection: number of the next window that inspects everything: 1, 4, 16, 64, ...
        checked: True once the first-window check has found the state that a forward changes.
        bindings: bindings that have changed, each as (table, `state` of `record`).
        tensors: tensors whose content has changed, with their names.
        watched: tensors that have not changed so far.
        generators: random generators that modules or objects hold.
        last_inspection: traces of everything at the end of the last window that inspected everything.
        bindings_at_begin: reads the bindings that this inspection has found, at the beginning of each window.
        warned_of: names of state that the user has been warned of.
    """

    windows: int = 0
    next_inspection: int = 1
    checked: bool = False
    # By the id of the content, because two tables may share a name and dictionaries cannot be hashed.
    bindings: dict[tuple[int, Any], tuple[Table, bool]] = field(default_factory=dict)
    tensors: dict[int, Entry] = field(default_factory=dict)
    watched: WatchedTensors = field(default_factory=WatchedTensors)
    generators: list[Any] = field(default_factory=list)
    # One warning per name, because one per window would flood the log.
    warned_of: set[str] = field(default_factory=set)
    last_inspection: LastInspection = field(default_factory=LastInspection)
    bindings_at_begin: BindingsAtBegin = field(default_factory=BindingsAtBegin)

    def record(self, table: Table, key: Any, *, state: bool) -> None:
        """Record a binding that has changed.

        Args:
            table: the table of the binding.
            key: its key in the table.
            state: whether it held a tensor or a list before it changed, so that it is no result of a forward.
        """
        # Only this key: restoring other keys would undo changes that the user's loop makes between windows.
        only = replace(table, keys=frozenset([key])) if table.can_be_cut else table
        self.bindings.setdefault((id(table.content), key), (only, state))

    def not_warned_of(self, names: Iterable[str]) -> list[str]:
        """Return the names that were not passed to this method before."""
        new = [name for name in names if name not in self.warned_of]
        self.warned_of.update(new)
        return new
