"""Participants of the user's own, in a window."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ..participant import Participant


class Extra:
    """Participants that take part as one, in their order; restored in the other order.

    Args:
        participants: of the user.

    Attributes:
        participants: of the user.
    """

    def __init__(self, participants: Sequence[Participant]) -> None:
        self.participants = tuple(participants)
        self._begun, self._is_open = 0, False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Restore all after the block, whose forwards are no part of a window, such as those of a check.

        Inside a window the savepoint becomes that before the block.
        """
        if not self._is_open:
            try:
                self.begin()
                yield
            finally:
                self.restore()
            return
        self.savepoint()
        unable = [each for each in self.participants if not each.rollback()]
        saved = [copy.deepcopy(each.state_dict()) for each in unable]
        self.savepoint()
        try:
            yield
        finally:
            for each in reversed(self.participants):
                each.rollback()
            for each, state in zip(unable, saved, strict=True):
                each.load_state_dict(state)

    def begin(self) -> None:
        """Begin all."""
        self._begun, self._is_open = 0, True
        for each in self.participants:
            self._begun += 1  # one that fails counts
            each.begin()

    def savepoint(self) -> None:
        """Make a savepoint of all."""
        for each in self.participants:
            each.savepoint()

    def rollback(self) -> bool:
        """Roll all back; False at the first that cannot, for then the window restarts."""
        return all(each.rollback() for each in reversed(self.participants))

    def restart(self) -> None:
        """Restart all."""
        for each in self.participants:
            each.restart()

    def restore(self) -> None:
        """Restore those that have begun, also after one that fails."""
        self._is_open = False
        with ExitStack() as stack:  # which begins with the last one
            for each in self.participants[: self._begun]:
                stack.callback(each.restore)

    def commit(self) -> None:
        """Commit all, also after one that fails."""
        self._is_open = False
        with ExitStack() as stack:
            for each in reversed(self.participants):
                stack.callback(each.commit)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all."""
        return {"participants": [each.state_dict() for each in self.participants]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the states of all."""
        for each, saved in zip(self.participants, state["participants"], strict=True):
            each.load_state_dict(saved)
