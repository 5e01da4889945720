"""Random states recorded before each micro-batch, to repeat its random numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from .. import fastpaths
from ..window.participants.snapshot import RandomKeeper, restore_random_state


class Replay:
    """States of torch's, Python's and NumPy's generators at several moments.

    NumPy's state takes longest to copy and is seldom used by micro-batches, so it is copied only if it has
    changed.

    Args:
        devices: devices beside the CPU whose generators may be used.

    Examples:
        >>> replay = Replay([])
        >>> replay.note()
        >>> first = torch.rand(())
        >>> replay.back_to(0)
        >>> bool(first == torch.rand(()))
        True
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._keeper = RandomKeeper(devices)
        self._noted: list[tuple[dict[str, Any], bytes | None]] = []

    def note(self) -> None:
        """Record the present states."""
        self._keeper.begin()
        state = self._keeper.before
        if self._noted and state["python"] == self._noted[-1][0]["python"]:
            state["python"] = self._noted[-1][0]["python"]  # saves 25 KB for each micro-batch
        self._noted.append((state, _numpy()))

    def back_to(self, number: int) -> None:
        """Restore the states that the `note` with this number has recorded."""
        state, memory = self._noted[number]
        # NumPy's state takes longest to restore, so only if it has changed. Its memory does not contain the
        # second normal number that the generator may have in store.
        if memory is not None and memory == _numpy() and not state["numpy"][3]:
            state = {name: value for name, value in state.items() if name != "numpy"}
        restore_random_state(state)


def _numpy() -> bytes | None:
    return fastpaths.numpy_memory(sys.modules["numpy"].random) if "numpy" in sys.modules else None
