"""Knowledge of the state that forwards were seen to move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .begin_look import BeginLook
from .last_look import LastLook
from .reached import Table
from .watched import Entry, Watched


class Moving(NamedTuple):
    """Something that a forward has moved.

    Attributes:
        name: for messages.
        sure: it is state for certain; otherwise it may be a result, a cache or a count that nobody reads.
    """

    name: str
    sure: bool


@dataclass
class Known:
    """Knowledge of what was seen to move so far; shared by the keepers of an accumulator.

    Attributes:
        windows: that were committed.
        next_look: the window that inspects everything: 1, 4, 16, 64, ...
        checked: the first-window check has seen what a forward moves.
        bindings: that moved; True: each held a tensor before the first window.
        tensors: whose content moved, with their names.
        watched: tensors that were not seen to move.
        generators: of random numbers, held by modules or objects.
        last_look: at everything, at the end of its window.
        begin_look: at the bindings that were found there, as each window begins.
        said: names that the user has been warned of.
    """

    windows: int = 0
    next_look: int = 1
    checked: bool = False
    # By identity of the content: two tables may have equal names, and dictionaries do not hash.
    bindings: dict[tuple[int, Any], tuple[Table, bool]] = field(default_factory=dict)
    tensors: dict[int, Entry] = field(default_factory=dict)
    watched: Watched = field(default_factory=Watched)
    generators: list[Any] = field(default_factory=list)
    # One warning per name and accumulator: one per window would flood the log.
    said: set[str] = field(default_factory=set)
    last_look: LastLook = field(default_factory=LastLook)
    begin_look: BeginLook = field(default_factory=BeginLook)

    def note(self, table: Table, key: Any, *, state: bool) -> None:
        """Note a binding that moved; `state`: it held a tensor before the first window."""
        # One key of the table: restoring all keys would undo what the loop changed between windows.
        only = replace(table, keys=frozenset([key])) if table.can_be_cut else table
        self.bindings.setdefault((id(table.content), key), (only, state))

    def not_said(self, names: Iterable[str]) -> list[str]:
        """Return the names that were not given to this method before."""
        new = [name for name in names if name not in self.said]
        self.said.update(new)
        return new
