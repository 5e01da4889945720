"""Warnings of state that a discarded window may have changed and that was not restored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ...warn import warn
from .reached import Table


def warn_of_not_restored(names: Sequence[str]) -> None:
    """Warn of state that the window has changed for the first time, so that there is no copy.

    Examples:
        >>> warn_of_not_restored([])
    """
    if names:
        warn(
            f"A window was discarded, but the state {_listed(names)} was not restored: it changed for the "
            "first time, and there is no copy. Load it again, for example from a checkpoint."
        )


def may_be_state(changed: Iterable[tuple[Table, Any, Any]], restored: Collection[str]) -> list[str]:
    """Return names of bindings that may be state and were not restored; functions are not state.

    Args:
        changed: bindings that differ from the last inspection, as (table, key, value).
        restored: names of bindings that were restored.

    Examples:
        >>> may_be_state([(Table("model", {}, own=True), "forward", print)], [])
        []
    """
    found = [
        table.name_of(key)
        for table, key, value in changed
        if (isinstance(value, nn.Module) or not callable(value)) and not _is_trained(value)
    ]
    # If "bank" was restored, so were "bank.queue" and "bank[0]".
    inside = tuple(name + end for name in restored for end in ".[")
    return [name for name in dict.fromkeys(found) if name not in restored and not name.startswith(inside)]


def _is_trained(value: Any) -> bool:
    """Return whether a value is a tensor that an optimizer may change, e.g. the master of a parameter."""
    return isinstance(value, Tensor) and value.requires_grad


def warn_of_possibly_changed(names: Sequence[str]) -> None:
    """Warn of bindings that either the window has changed, or the user's loop before the window.

    Args:
        names: bindings that differ from the last inspection; if there are none, there is no warning.

    Examples:
        >>> warn_of_possibly_changed([])
    """
    if names:
        warn(
            f"A window was discarded, but {_listed(names)} was not restored: the window may have changed it "
            "for the first time. Load it again, for example from a checkpoint, unless your own loop has "
            "changed it; from the next window on it is restored."
        )


def _listed(names: Sequence[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if names[1:] else "")
