"""Participant for the state that a forward changes: buffers, teachers, memory banks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..participant import no_savepoint
from .forward_state_keeper import ForwardStateKeeper


class ForwardState:
    """State that a forward changes.

    Args:
        keeper: copies and restores the state.

    Examples:
        >>> import torch
        >>> model = torch.nn.BatchNorm1d(2)
        >>> state = ForwardState(ForwardStateKeeper([model]))
        >>> state.begin()
        >>> _ = model(torch.ones(3, 2))
        >>> state.restore()
        >>> model.running_mean.tolist()
        [0.0, 0.0]
    """

    def __init__(self, keeper: ForwardStateKeeper) -> None:
        # It outlives the window: it learns which state changes, and copies only that in later windows.
        self._keeper = keeper

    def begin(self) -> None:
        """Record the present state."""
        self._keeper.begin()

    @no_savepoint
    def savepoint(self) -> None:
        """No-op: the state is not copied before each micro-batch."""

    def rollback(self) -> bool:
        """Return whether the state is as at `begin`; if not, the window restarts."""
        return not self._keeper.changed()

    def restart(self) -> None:
        """Restore the state, and keep the copies."""
        # discarded=False, because the window runs again and changes the same state.
        self._keeper.restore(discarded=False)

    def restore(self) -> None:
        """Restore the state: the objects that names are bound to, and their content."""
        self._keeper.restore()

    def commit(self) -> None:
        """Free the copies, and learn which state the window has changed."""
        self._keeper.commit()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        return {"state_before": self._keeper.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make `restore` restore a saved state."""
        self._keeper.load_state_dict(state["state_before"])


class ForwardStateOfEach(ForwardState):
    """State that a forward changes, copied before each micro-batch too, so that one can be dropped.

    Examples:
        >>> import torch
        >>> model = torch.nn.BatchNorm1d(2)
        >>> state = ForwardStateOfEach(ForwardStateKeeper([model]))
        >>> state.begin()
        >>> state.savepoint()
        >>> _ = model(torch.ones(3, 2))
        >>> state.rollback(), model.running_mean.tolist()
        (True, [0.0, 0.0])
    """

    def __init__(self, keeper: ForwardStateKeeper) -> None:
        super().__init__(keeper)
        # None until the first savepoint of a window.
        self._saved: ForwardStateKeeper | None = None

    def begin(self) -> None:
        """Record the present state."""
        self._saved = None
        super().begin()

    def savepoint(self) -> None:
        """Copy the state."""
        # In a second keeper, because the first one has the state at the beginning of the window.
        self._saved = self._keeper.new_keeper()
        self._saved.begin()

    def rollback(self) -> bool:
        """Restore the savepoint."""
        if self._saved is None:
            # Before the first micro-batch there is no savepoint.
            return super().rollback()
        self._saved.restore()
        return True

    def commit(self) -> None:
        """Free the copies, and learn which state the window has changed."""
        self._saved = None
        super().commit()
