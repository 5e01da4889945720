"""Participant of a window: anything that a window may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


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


def no_savepoint(method: F) -> F:
    """Mark the `savepoint` of a participant that remembers nothing before a micro-batch.

    Examples:
        >>> class Nothing:
        ...     @no_savepoint
        ...     def savepoint(self): ...
        >>> has_savepoint(Nothing)
        False
    """
    setattr(method, _MARK, True)
    return method


@cache
def has_savepoint(kind: type[Participant]) -> bool:
    """Return whether a kind of participant remembers anything before a micro-batch."""
    return not hasattr(kind.savepoint, _MARK)


_MARK = "remembers_nothing"
