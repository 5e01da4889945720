"""Participant that calls all participants of the user."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from ..participant import Participant


class UserParticipants:
    """Calls the participants of the user in order, and restores them in reverse order."""

    def __init__(self, participants: Sequence[Participant]) -> None:
        self.participants = tuple(participants)
        self._begun, self._is_open = 0, False

    @contextmanager
    def outside_window(self) -> Iterator[None]:
        """Return a context for forwards outside of a window, such as those of a check; restore all after it.

        Inside an open window this makes a new savepoint first. Participants with an attribute
        ``ignores_checks = True`` are left out.
        """
        # Otherwise, for example, a counter of samples would count those of the check.
        called = [each for each in self.participants if not getattr(each, "ignores_checks", False)]
        with ExitStack() as stack:  # calls back in reverse order
            for each in called:
                if self._is_open:
                    stack.callback(_savepoint_of(each))
                else:
                    stack.callback(each.restore)
                    each.begin()
            yield

    def begin(self) -> None:
        """Begin all."""
        self._begun, self._is_open = 0, True
        for each in self.participants:
            self._begun += 1  # before the call, so that a participant that fails is restored too
            each.begin()

    def savepoint(self) -> None:
        """Make a savepoint of all."""
        for each in self.participants:
            each.savepoint()

    def rollback(self) -> bool:
        """Roll back all; return False if one of them cannot: the window restarts."""
        return all(each.rollback() for each in reversed(self.participants))

    def restart(self) -> None:
        """Restart all."""
        for each in self.participants:
            each.restart()

    def restore(self) -> None:
        """Restore those that have begun, even if one of them raises."""
        self._is_open = False
        with ExitStack() as stack:  # calls back in reverse order
            for each in self.participants[: self._begun]:
                stack.callback(each.restore)

    def commit(self) -> None:
        """Commit all, even if one of them raises."""
        self._is_open = False
        with ExitStack() as stack:
            for each in reversed(self.participants):
                stack.callback(each.commit)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all."""
        return {"participants": [each.state_dict() for each in self.participants]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the states of all."""
        for each, saved in zip(self.participants, state["participants"], strict=True):
            each.load_state_dict(saved)


def _savepoint_of(participant: Participant) -> Callable[[], object]:
    """Make a savepoint in an open window, and return a function that restores it."""
    participant.savepoint()
    # An immediate rollback shows whether the participant can roll back at all.
    if participant.rollback():
        participant.savepoint()
        return participant.rollback
    # A deep copy, because state_dict may return the participant's own tensors.
    return partial(participant.load_state_dict, copy.deepcopy(participant.state_dict()))
