"""Random states recorded before each micro-batch, to repeat its random numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from .. import fastpaths
from ..window.participants.snapshot import RandomKeeper, restore_random_state


class Replay:
    """Recorded states of torch's, Python's and NumPy's generators.

    NumPy's state takes longest to copy and is seldom used by micro-batches, so it is copied only if it has
    changed.

    Args:
        devices: devices beside the CPU whose generators may be used.

    Examples:
        >>> replay = Replay([])
        >>> replay.record()
        >>> first = torch.rand(())
        >>> replay.back_to(0)
        >>> bool(first == torch.rand(()))
        True
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._keeper = RandomKeeper(devices)
        self._states: list[tuple[dict[str, Any], bytes | None]] = []

    def record(self) -> None:
        """Record the present states."""
        self._keeper.begin()
        state = self._keeper.before
        if self._states and state["python"] == self._states[-1][0]["python"]:
            state["python"] = self._states[-1][0]["python"]  # saves 25 KB for each micro-batch
        self._states.append((state, _numpy()))

    def back_to(self, number: int) -> None:
        """Restore the states of one call of `record`, by its number; -1: the last."""
        state, memory = self._states[number]
        # NumPy's state takes longest to restore, so only if it has changed. Its memory does not contain the
        # second normal number that the generator may have in store.
        if memory is not None and memory == _numpy() and not state["numpy"][3]:
            state = {name: value for name, value in state.items() if name != "numpy"}
        restore_random_state(state)


def _numpy() -> bytes | None:
    return fastpaths.numpy_memory(sys.modules["numpy"].random) if "numpy" in sys.modules else None
