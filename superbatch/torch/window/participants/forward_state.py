"""Participant for the state that a forward moves: buffers, teachers, memory banks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .moved_state import MovedState


class ForwardState:
    """State that a forward moves.

    Args:
        keeper: of the state; it learns from window to window.
        each: copy the state before each micro-batch, which may be left out.

    Examples:
        >>> import torch
        >>> model = torch.nn.BatchNorm1d(2)
        >>> state = ForwardState(MovedState([model]), each=True)
        >>> state.begin()
        >>> state.savepoint()
        >>> _ = model(torch.ones(3, 2))
        >>> state.rollback(), model.running_mean.tolist()
        (True, [0.0, 0.0])
    """

    def __init__(self, keeper: MovedState, *, each: bool) -> None:
        self._keeper, self._each = keeper, each
        self._saved: MovedState | None = None

    def begin(self) -> None:
        """Record the present state."""
        self._saved = None
        self._keeper.begin()

    def savepoint(self) -> None:
        """Copy the state where a micro-batch may be left out."""
        if self._each:
            self._saved = self._keeper.twin()
            self._saved.begin()

    def rollback(self) -> bool:
        """Restore the savepoint; False if the state has moved since `begin`, and there is no copy."""
        if self._saved is None:
            return not self._keeper.changed()
        self._saved.restore()
        return True

    def restart(self) -> None:
        """Restore the state; the copies stay valid."""
        self._keeper.restore()

    def restore(self) -> None:
        """Restore the state, identities included."""
        self._keeper.restore()

    def commit(self) -> None:
        """Drop the copies, and learn what the window has moved."""
        self._saved = None
        self._keeper.commit()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        return {"state_before": self._keeper.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let `restore` restore what was saved."""
        self._keeper.load_state_dict(state["state_before"])
