"""Warnings of state that a discarded window may have moved and that was not restored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ...warn import warn
from .reached import Table


def warn_of_lost(names: Sequence[str]) -> None:
    """Warn of state that the window has moved for the first time.

    Args:
        names: of the state; none is no warning.

    Examples:
        >>> warn_of_lost([])
    """
    # Cannot be restored, since its old content exists nowhere: the user has to load it.
    if names:
        warn(
            f"the state {_listed(names)} moved for the first time in a window that was discarded, and "
            "was not restored: it had not been copied. Load it again, as from a checkpoint."
        )


def may_be_state(unlike: Iterable[tuple[Table, Any, Any]], restored: Collection[str]) -> list[str]:
    """Return names of what may be state and is in nothing that was restored.

    Args:
        unlike: the last look: table, key, what is bound. Functions are no state.
        restored: names of bindings.

    Examples:
        >>> may_be_state([(Table("model", {}, own=True), "forward", print)], [])
        []
    """
    found = [
        table.name_of(key)
        for table, key, value in unlike
        if (isinstance(value, nn.Module) or not callable(value)) and not _is_trained(value)
    ]
    # "bank" was restored, and with it "bank.queue" and "bank[0]".
    inside = tuple(name + end for name in restored for end in ".[")
    return [name for name in dict.fromkeys(found) if name not in restored and not name.startswith(inside)]


def _is_trained(value: Any) -> bool:
    """Return whether a value is a tensor that an optimizer may move, e.g. the master of a parameter."""
    # Optimizers move it between windows.
    return isinstance(value, Tensor) and value.requires_grad


def warn_of_unsure(names: Sequence[str]) -> None:
    """Warn of names that the window, or the loop before it, has bound to something else.

    Args:
        names: that are not as at the last look; none is no warning.

    Examples:
        >>> warn_of_unsure([])
    """
    # Restored from the next window on: the names are learned now.
    if names:
        warn(
            f"a window was discarded that has changed {_listed(names)} for the first time, unless the loop "
            "changed that before it, and it was not restored. Load it again, as from a checkpoint; from the "
            "next window on it is restored."
        )


def _listed(names: Sequence[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if names[1:] else "")
