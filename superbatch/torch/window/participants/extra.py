"""Participants of the user's own, in a window."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
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

        Inside a window the savepoint becomes that before the block. Left out are participants with an
        attribute ``ignores_checks = True``, which count what follows a savepoint alone.
        """
        # Others would keep what the check moved: e.g. a noise meter that counts samples.
        moved = [each for each in self.participants if not getattr(each, "ignores_checks", False)]
        with ExitStack() as stack:  # which ends with the first one
            for each in moved:
                if self._is_open:
                    stack.callback(_undo(each))
                else:
                    stack.callback(each.restore)
                    each.begin()
            yield

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


def _undo(participant: Participant) -> Callable[[], object]:
    """Make a savepoint in an open window, and return what restores it."""
    participant.savepoint()
    # An immediate rollback shows whether the participant can roll back at all.
    if participant.rollback():
        participant.savepoint()
        return participant.rollback
    # Deep copy: state_dict may return the participant's live tensors.
    return partial(participant.load_state_dict, copy.deepcopy(participant.state_dict()))
