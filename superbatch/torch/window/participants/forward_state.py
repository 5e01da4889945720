"""Participant for the state that a forward moves: buffers, teachers, memory banks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..participant import no_savepoint
from .moved_state import MovedState


class ForwardState:
    """State that a forward moves.

    Args:
        keeper: of the state; it learns from window to window.

    Examples:
        >>> import torch
        >>> model = torch.nn.BatchNorm1d(2)
        >>> state = ForwardState(MovedState([model]))
        >>> state.begin()
        >>> _ = model(torch.ones(3, 2))
        >>> state.restore()
        >>> model.running_mean.tolist()
        [0.0, 0.0]
    """

    def __init__(self, keeper: MovedState) -> None:
        # Outlives the window: it learns which state moves and copies only that in later windows.
        self._keeper = keeper

    def begin(self) -> None:
        """Record the present state."""
        self._keeper.begin()

    @no_savepoint
    def savepoint(self) -> None:
        """No-op: there is no copy for one micro-batch."""

    def rollback(self) -> bool:
        """Return whether the state is as at `begin`: there is no copy of the savepoint."""
        # A changed state without a copy of the savepoint forces the whole window to restart.
        return not self._keeper.changed()

    def restart(self) -> None:
        """Restore the state; the copies stay valid."""
        # discarded=False: the window runs again, so a warning of lost state would be wrong.
        self._keeper.restore(discarded=False)

    def restore(self) -> None:
        """Restore the state, identities included."""
        self._keeper.restore()

    def commit(self) -> None:
        """Drop the copies, and learn what the window has moved."""
        self._keeper.commit()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        return {"state_before": self._keeper.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let `restore` restore what was saved."""
        self._keeper.load_state_dict(state["state_before"])


class ForwardStateOfEach(ForwardState):
    """State that a forward moves, copied before each micro-batch too, which may be left out.

    Examples:
        >>> import torch
        >>> model = torch.nn.BatchNorm1d(2)
        >>> state = ForwardStateOfEach(MovedState([model]))
        >>> state.begin()
        >>> state.savepoint()
        >>> _ = model(torch.ones(3, 2))
        >>> state.rollback(), model.running_mean.tolist()
        (True, [0.0, 0.0])
    """

    def __init__(self, keeper: MovedState) -> None:
        super().__init__(keeper)
        # None until the first savepoint of a window.
        self._saved: MovedState | None = None

    def begin(self) -> None:
        """Record the present state."""
        self._saved = None
        super().begin()

    def savepoint(self) -> None:
        """Copy the state."""
        # A second keeper with the same knowledge: that of the window must keep the state at its begin.
        self._saved = self._keeper.twin()
        self._saved.begin()

    def rollback(self) -> bool:
        """Restore the savepoint."""
        if self._saved is None:
            # A failure before the first micro-batch: only the state at `begin` is known.
            return super().rollback()
        self._saved.restore()
        return True

    def commit(self) -> None:
        """Drop the copies, and learn what the window has moved."""
        self._saved = None
        super().commit()
