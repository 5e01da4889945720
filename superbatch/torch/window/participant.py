"""Protocol of a window's participants: one object for each kind of state that the window may change.

Every participant can restore two states: that before the window (`restart`, `restore`), and that before the
current micro-batch (`rollback`). After the optimizer step only `commit` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Participant(Protocol):
    """State that a window changes, and restores if the window fails.

    The order of calls is ``begin [load_state_dict] (savepoint [rollback] | restart)* (commit | restore)``. If
    `begin` raises, `restore` is called. Participants do not restore optimizers (`BeforeStep` does) or torch's
    modes (`Modes` does).

    Some forwards belong to no window, such as those of the loss check. Around them your participant gets
    `begin` and `restore`, or inside a window `savepoint` and `rollback`. Set `ignores_checks = True` on it if
    it must not be called there.
    """

    def begin(self) -> None:
        """Record the state before the window."""
        ...

    def savepoint(self) -> None:
        """Record the state before a micro-batch. Copy nothing large: `rollback` may return False instead."""
        ...

    def rollback(self) -> bool:
        """Restore the savepoint and return True; return False if that is impossible: the window restarts."""
        ...

    def restart(self) -> None:
        """Restore the state before the window, and keep the record of `begin`, because the window runs again.

        Allocate no tensors and call no collectives: memory has run out, perhaps on this rank only.
        """
        ...

    def restore(self) -> None:
        """Restore the state before the window. Called again if this or another participant raises."""
        ...

    def commit(self) -> None:
        """Keep the window's changes, and free the copies. Like `restore`, it may be called a second time.

        The update is already made. An error here is raised after all other participants have committed.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that resumes the window, under keys that no other participant uses."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the mapping of all participants; a user's gets its own state. May be called twice."""
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
    # An attribute of the function, so that `has_savepoint` needs only the class.
    setattr(method, _MARK, True)
    return method


# Cached per class, because it is called for every participant of every window.
@cache
def has_savepoint(kind: type[Participant]) -> bool:
    """Return whether the `savepoint` of a class of participants remembers anything."""
    return not hasattr(kind.savepoint, _MARK)


_MARK = "remembers_nothing"
