"""Participant for the position in a window: micro-batches, their weights and losses so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor

from ..loss.records import WindowLosses, WindowWeights
from .microbatches import MicrobatchList


class Progress:
    """Position in a window.

    Args:
        microbatches: the micro-batches of the window.
        weights: their weights.
        losses: their losses, empty at the beginning.

    Attributes:
        dropped: micro-batches that were left out because they were not finite.
        next: index of the micro-batch at which an iteration starts; not 0 after a retry or a resume.
        current: index of the micro-batch that the user's loop works on, or None.
        arrived: whether a gradient of the current micro-batch is in the sum.
        broken: index of the micro-batch whose backward has not ended, or has raised; or None.
        failures: number of times that memory ran out.
        extra_turns_done: number of extra turns (forwards with weight 0) that are over.
        turns: number of turns that have begun, if each forward and backward is collective.
        others_may_wait: whether other ranks may wait for a turn of this rank.
    """

    def __init__(self, microbatches: MicrobatchList, weights: WindowWeights, losses: WindowLosses) -> None:
        self.microbatches, self.weights, self.losses = microbatches, weights, losses
        self.dropped: list[int] = []
        self.next = 0
        self.current: int | None = None
        self.arrived = False
        self.broken: int | None = None
        self.failures = 0
        # Counted, so that a rank that failed can take part in the remaining turns.
        self.extra_turns_done = self.turns = 0
        self.others_may_wait = True
        # By micro-batch: the versions of its tensors before its forward.
        self._versions: dict[int, list[int]] = {}

    def begin(self) -> None:
        """No-op: a window begins at its first micro-batch."""

    def savepoint(self) -> None:
        """Record the versions of the current micro-batch's tensors."""
        assert self.current is not None
        self.arrived = False
        self._versions[self.current] = versions(self.microbatches.microbatches[self.current])

    def rollback(self) -> bool:
        """Discard the weight of the current micro-batch; return False if its gradient is in the sum."""
        if self.arrived:
            return False
        # A returned weight without a loss belongs to the forward that failed.
        for index in [index for index in self.weights.returned if index not in self.losses]:
            del self.weights.returned[index]
        self.broken = None
        return True

    def restart(self) -> None:
        """Return to the first micro-batch."""
        self.losses, self.dropped = self.losses.empty(), []
        self.next, self.broken, self.extra_turns_done, self.turns = 0, None, 0, 0
        self._versions.clear()
        self.weights.returned.clear()

    def restore(self) -> None:
        """No-op: the window is over."""

    def commit(self) -> None:
        """No-op: the window is over."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, weights and losses."""
        samples = self.microbatches.samples
        return {
            "microbatches": len(self.microbatches),
            "samples": None if samples is None else list(samples),
            "next": self.next,
            "weights": self.weights.ahead,
            "returned": dict(self.weights.returned),
            "losses": self.losses.state(),
            "dropped": list(self.dropped),
            "extra_turns": [self.extra_turns_done, self.microbatches.extra_turns],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved position."""
        self.next = state["next"]
        self.weights.returned = dict(state["returned"])
        self.losses.load_state(state["losses"])
        self.dropped = list(state["dropped"])
        self.extra_turns_done, self.microbatches.extra_turns = state.get(
            "extra_turns", (0, self.microbatches.extra_turns)
        )

    @property
    def complete(self) -> bool:
        """True if every micro-batch that counts has had its backward."""
        # A backward that raised has added part of a gradient, so the window cannot be complete.
        if self.broken is not None or self.extra_turns_done < self.microbatches.extra_turns:
            return False
        count = len(self.microbatches.microbatches)
        # Usually every micro-batch has a loss, which needs no loop.
        if len(self.losses) == count:
            return True
        # A micro-batch with weight 0 is skipped and has no loss.
        return all(index in self.losses or self.weights.is_known_zero(index) for index in range(count))

    def written(self, first: int, last: int) -> int | None:
        """Return the first micro-batch in first..last that was written to since its savepoint, or None."""
        for index in range(first, last + 1):
            before = self._versions.get(index)  # None for weight 0, which was not run
            if before is not None and before != versions(self.microbatches.microbatches[index]):
                return index
        return None

    def weigh_again(self) -> None:
        """Compute the weights again after micro-batches were cut differently."""
        self.weights.weigh_again(self.microbatches.microbatches, self.microbatches.samples)

    def remove_versions(self, index: int) -> None:
        """Remove the recorded versions of a micro-batch that was cut into smaller ones."""
        self._versions.pop(index, None)


def versions(part: Any) -> list[int]:
    """Return the version counter of each tensor, which counts in-place writes; views share one counter.

    Examples:
        >>> import torch
        >>> versions({"x": torch.zeros(2).add_(1), "name": "a"})
        [1]
    """
    kind = type(part)
    if kind is tuple or kind is dict:  # usually of tensors only, for which this takes a tenth of the time
        try:
            return list(map(_version, part.values() if kind is dict else part))
        # For a leaf without a version, such as a list or an inference tensor, the general walk follows.
        except (AttributeError, RuntimeError):
            pass
    if isinstance(part, Tensor):
        return [] if part.is_inference() else [part._version]
    parts: Iterable[Any] = ()
    if isinstance(part, Mapping):
        parts = part.values()
    elif is_dataclass(part):
        parts = [getattr(part, field.name) for field in fields(part)]
    # A list of numbers is one leaf, and may be long.
    elif isinstance(part, tuple) or (isinstance(part, list) and part and not isinstance(part[0], _SCALAR)):
        parts = part
    return [version for inner in parts for version in versions(inner)]


_SCALAR = (str, int, float)
_version = attrgetter("_version")
