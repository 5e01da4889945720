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
        microbatches: of the window; they can be cut differently.
        weights: of them.
        losses: none so far.

    Attributes:
        dropped: micro-batches that were left out because they were not finite.
        next: the micro-batch that the iteration starts at; behind 0 after memory ran out.
        current: the one in the user's hands, or None.
        arrived: whether a backward of the current one has come to its end.
        broken: the one whose backward raised, or None.
        failures: how often memory ran out.
        idle_done: turns without weight that are over.
        turns: that have begun, where other ranks wait for each forward and backward.
        in_turns: they may wait for one of this rank.
    """

    def __init__(self, microbatches: MicrobatchList, weights: WindowWeights, losses: WindowLosses) -> None:
        self.microbatches, self.weights, self.losses = microbatches, weights, losses
        self.dropped: list[int] = []
        self.next = 0
        self.current: int | None = None
        self.arrived = False
        self.broken: int | None = None
        self.failures = 0
        # Counted over the window, so that a rank that failed knows how many turns are left.
        self.idle_done = self.turns = 0
        self.in_turns = True
        self._versions: dict[int, list[int]] = {}  # of the tensors of micro-batches that were handed out

    def begin(self) -> None:
        """No-op: a window begins at its first micro-batch."""

    def savepoint(self) -> None:
        """Note the micro-batch as it is handed out."""
        assert self.current is not None
        self.arrived = False
        self._versions[self.current] = versions(self.microbatches.microbatches[self.current])

    def rollback(self) -> bool:
        """Forget the current micro-batch; False if its gradient is in the sum."""
        if self.arrived:
            return False
        # A weight that was returned without a loss belongs to the failed forward.
        for index in [index for index in self.weights.returned if index not in self.losses]:
            del self.weights.returned[index]
        self.broken = None
        return True

    def restart(self) -> None:
        """Begin at the first micro-batch again."""
        self.losses, self.dropped = self.losses.empty(), []
        self.next, self.broken, self.idle_done, self.turns = 0, None, 0, 0
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
            "idle": [self.idle_done, self.microbatches.idle],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved position."""
        self.next = state["next"]
        self.weights.returned = dict(state["returned"])
        self.losses.load_state(state["losses"])
        self.dropped = list(state["dropped"])
        self.idle_done, self.microbatches.idle = state.get("idle", (0, self.microbatches.idle))

    @property
    def complete(self) -> bool:
        """Return whether every micro-batch that counts has had its backward."""
        # A broken backward leaves part of a gradient, which no later one repairs.
        if self.broken is not None or self.idle_done < self.microbatches.idle:
            return False
        count = len(self.microbatches.microbatches)
        # The usual case, without a pass over the micro-batches.
        if len(self.losses) == count:
            return True
        # A micro-batch with weight 0 is left out, so it has no loss.
        return all(index in self.losses or self.weights.has_none(index) for index in range(count))

    def written(self, first: int, last: int) -> int | None:
        """Return the first of some micro-batches that was written since it was handed out, or None."""
        for index in range(first, last + 1):
            before = self._versions.get(index)  # none of one without weight, which was not run
            if before is not None and before != versions(self.microbatches.microbatches[index]):
                return index
        return None

    def weigh_again(self) -> None:
        """Weigh the micro-batches after some were cut differently."""
        self.weights.weigh_again(self.microbatches.microbatches, self.microbatches.samples)

    def hand_out_again(self, index: int) -> None:
        """Forget that a micro-batch was handed out: it was cut into smaller ones."""
        self._versions.pop(index, None)


def versions(part: Any) -> list[int]:
    """Return the number of in-place writes of each tensor; tensors that share memory share it.

    Examples:
        >>> import torch
        >>> versions({"x": torch.zeros(2).add_(1), "name": "a"})
        [1]
    """
    kind = type(part)
    if kind is tuple or kind is dict:  # mostly of tensors alone, for which this takes a tenth of the time
        try:
            return list(map(_version, part.values() if kind is dict else part))
        # A leaf without a version, such as a list or an inference tensor: the general walk follows.
        except (AttributeError, RuntimeError):
            pass
    if isinstance(part, Tensor):
        return [] if part.is_inference() else [part._version]
    parts: Iterable[Any] = ()
    if isinstance(part, Mapping):
        parts = part.values()
    elif is_dataclass(part):
        parts = [getattr(part, field.name) for field in fields(part)]
    # A long list of numbers is one leaf: no version to find inside.
    elif isinstance(part, tuple) or (isinstance(part, list) and part and not isinstance(part[0], _SCALAR)):
        parts = part
    return [version for inner in parts for version in versions(inner)]


_SCALAR = (str, int, float)  # a list of them, one for each sample, may be long
_version = attrgetter("_version")
