"""Random states noted before many micro-batches, cheaply, and restored one by one."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from .. import fastpaths
from ..window.participants.snapshot import RandomKeeper, restore_random_state


class Replay:
    """States of torch's, Python's and NumPy's generators at several moments.

    To copy NumPy's state takes longer than all else, and most micro-batches do not move it.

    Args:
        devices: whose generators may be drawn from, beside the CPU's.

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
        """Note the states as they are now."""
        self._keeper.begin()
        state = self._keeper.taken
        if self._noted and state["python"] == self._noted[-1][0]["python"]:
            state["python"] = self._noted[-1][0]["python"]  # 25 KB that most micro-batches share
        self._noted.append((state, _numpy()))

    def back_to(self, number: int) -> None:
        """Restore the states as they were at the `note` of this number."""
        state, memory = self._noted[number]
        # A second normal number that the generator still holds back does not show in its memory.
        if memory is not None and memory == _numpy() and not state["numpy"][3]:
            # Restoring NumPy's state takes longer than everything else, so only where it has moved.
            state = {name: value for name, value in state.items() if name != "numpy"}
        restore_random_state(state)


def _numpy() -> bytes | None:
    return fastpaths.numpy_memory(sys.modules["numpy"].random) if "numpy" in sys.modules else None
