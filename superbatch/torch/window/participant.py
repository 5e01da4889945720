"""Participant of a window: anything that a window may change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Participant(Protocol):
    """Something that a window changes, and restores if it fails.

    The order of calls is ``begin (savepoint [rollback])* [restart ...] (commit | restore)``. A window
    that fails in `begin` calls `restore`.
    """

    def begin(self) -> None:
        """Remember "before the window"."""
        ...

    def savepoint(self) -> None:
        """Remember "before this micro-batch"; copies are made late, or not at all."""
        ...

    def rollback(self) -> bool:
        """Restore the savepoint; return False where that is impossible, so that the window restarts."""
        ...

    def restart(self) -> None:
        """Restore "before the window" for a window that stays open: without a copy, and without a collective.

        Memory has run out, on this rank alone.
        """
        ...

    def restore(self) -> None:
        """Restore "before the window"; may be called twice."""
        ...

    def commit(self) -> None:
        """Keep what the window did, and forget what was remembered; must not fail."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that resumes the window, under keys that no other participant uses."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a whole window, which was validated."""
        ...
