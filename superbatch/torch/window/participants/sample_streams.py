"""Participant for `PerSampleRandom`: one random stream per sample, from a key that all ranks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ...interrupts import EnteredOrLeft
from ...rng.sample_rng import sample_stream
from ..participant import no_savepoint
from ..sync.sync import Sync


class SampleStreams:
    """Random streams of a window's samples; a stream depends only on the sample's position in the batch.

    Args:
        sync: the ranks that share the key.
        samples: number of samples of this rank.
    """

    def __init__(self, sync: Sync, samples: int) -> None:
        self._sync, self._samples = sync, samples
        self._key: int | None = None
        # The random calls of the first micro-batch; all micro-batches must make the same calls.
        self._calls: dict[int, Any] = {}
        self._after_key: Tensor | None = None
        self._last: EnteredOrLeft[None] | None = None

    def begin(self) -> None:
        """Draw the key; a collective."""
        # From the global generator, so that torch.manual_seed determines it; all ranks use rank 0's.
        self._key = self._sync.first(int(torch.randint(1 << 52, ())))
        self.first_sample = self._sync.sum_before(self._samples)
        # The state after the draw, because a restart must not draw a second key.
        self._after_key = torch.get_rng_state()

    def of(self, positions: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context in which each sample draws from its stream.

        Args:
            positions: position of each sample in the effective batch.
        """
        assert self._key is not None
        self._last = sample_stream(self._key, indices=positions, calls=self._calls)
        return self._last

    @no_savepoint
    def savepoint(self) -> None:
        """No-op: a stream depends only on the key and the sample."""

    def rollback(self) -> bool:
        """No-op: a stream depends only on the key and the sample."""
        return True

    def restart(self) -> None:
        """Set the generator to its state after the key was drawn, and keep the key."""
        if self._after_key is not None:
            torch.set_rng_state(self._after_key)

    def restore(self) -> None:
        """Leave a stream that an interrupt has not left; `RandomKeeper` restores the generators."""
        # Inside a stream the global generators have a sample's state; leaving the stream restores theirs.
        if self._last is not None:
            self._last.close()

    def commit(self) -> None:
        """No-op: the generator stays as it is after drawing the key."""

    def state_dict(self) -> dict[str, Any]:
        """Return the key."""
        return {"key": self._key}

    def generator_state(self) -> Tensor:
        """Return the state of the global generator outside of the streams."""
        assert self._after_key is not None
        return self._after_key

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved key; the generators were loaded before."""
        self._key = state["key"]
        self._after_key = torch.get_rng_state()
