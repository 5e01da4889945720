"""Participant of a window: anything that a window may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Participant(Protocol):
    """Something that a window changes, and restores if it fails.

    The order of calls is ``begin [load_state_dict] (savepoint [rollback] | restart)* (commit | restore)``. A
    window that fails in `begin` calls `restore`. Not restored by participants: optimizers (`BeforeStep`) and
    torch's modes (`Modes`).

    A participant of the user's is also restored after forwards that are no part of a window, such as those of
    the check, by `begin` and `restore` or `savepoint` and `rollback`, unless it has `ignores_checks = True`.
    """

    def begin(self) -> None:
        """Remember "before the window"."""
        ...

    def savepoint(self) -> None:
        """Remember "before this micro-batch". Avoid copies: `rollback` may return False."""
        ...

    def rollback(self) -> bool:
        """Restore the savepoint; return False where that is impossible, so that the window restarts."""
        ...

    def restart(self) -> None:
        """Restore "before the window" for a window that stays open; the copies of `begin` stay valid.

        Allocate no tensors and call no collectives: memory has run out, perhaps on this rank only.
        """
        ...

    def restore(self) -> None:
        """Restore "before the window"; may be called again, after an error here or in another participant."""
        ...

    def commit(self) -> None:
        """Keep what the window did, and free what was remembered; may be called again, as `restore`.

        The update is made by then: an error here is raised once everything else is kept too.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that resumes the window, under keys that no other participant uses."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume; `state` is the merged, validated mapping of all participants. May be called again."""
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
    # On the function: `has_savepoint` reads it from the class, without an instance.
    setattr(method, _MARK, True)
    return method


# Cached per class: asked for every participant of every window.
@cache
def has_savepoint(kind: type[Participant]) -> bool:
    """Return whether a kind of participant remembers anything before a micro-batch."""
    return not hasattr(kind.savepoint, _MARK)


_MARK = "remembers_nothing"
