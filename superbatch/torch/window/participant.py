"""Protocol of the participants of a window: the objects that a window may change and must restore."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Participant(Protocol):
    """State that a window changes, and restores if the window fails.

    The order of calls is ``begin [load_state_dict] (savepoint [rollback] | restart)* (commit | restore)``. A
    window that fails in `begin` calls `restore`. Participants do not restore optimizers (`BeforeStep` does)
    or torch's modes (`Modes` does).

    Forwards outside of a window, such as those of the check, run between `begin` and `restore` or between
    `savepoint` and `rollback` of a participant of yours. Set `ignores_checks = True` on it to avoid that.
    """

    def begin(self) -> None:
        """Remember "before the window"."""
        ...

    def savepoint(self) -> None:
        """Remember "before this micro-batch". Avoid copies: `rollback` may return False."""
        ...

    def rollback(self) -> bool:
        """Restore the savepoint; return False if that is impossible, and the window restarts."""
        ...

    def restart(self) -> None:
        """Restore "before the window", but keep what `begin` remembered: the window stays open.

        Allocate no tensors and call no collectives: memory has run out, perhaps on this rank only.
        """
        ...

    def restore(self) -> None:
        """Restore "before the window"; called again after an error here or in another participant."""
        ...

    def commit(self) -> None:
        """Keep the window's changes and free what was remembered; may be called again, as `restore`.

        The update is already made. An error here is raised after all other participants have committed.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that resumes the window, under keys that no other participant uses."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the merged, validated mapping of all participants; may be called again."""
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
    # A mark on the function, so that `has_savepoint` needs only the class.
    setattr(method, _MARK, True)
    return method


# Cached per class, because it is called for every participant of every window.
@cache
def has_savepoint(kind: type[Participant]) -> bool:
    """Return whether the `savepoint` of a class of participants remembers anything."""
    return not hasattr(kind.savepoint, _MARK)


_MARK = "remembers_nothing"
