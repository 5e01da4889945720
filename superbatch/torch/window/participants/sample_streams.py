"""Participant for `PerSampleRandom`: one random stream per sample, under a key that all ranks share."""

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
    """Random streams of a window's samples, which depend on a sample's place in the batch alone.

    Args:
        sync: ranks that share the key.
        samples: of this rank.
    """

    def __init__(self, sync: Sync, samples: int) -> None:
        self._sync, self._samples = sync, samples
        self._key: int | None = None
        self._calls: dict[int, Any] = {}  # random draws of all micro-batches are compared with these
        self._after_key: Tensor | None = None
        self._last: EnteredOrLeft[None] | None = None

    def begin(self) -> None:
        """Draw the key; a collective."""
        # From the global generator, so torch.manual_seed decides it; rank 0's counts for all.
        self._key = self._sync.first(int(torch.randint(1 << 52, ())))
        self.first_sample = self._sync.before(self._samples)
        # The state after the draw: a restart must not draw a second key.
        self._after_key = torch.get_rng_state()

    def of(self, places: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context in which samples at these places of the effective batch draw."""
        # `begin` has drawn it.
        assert self._key is not None
        self._last = sample_stream(self._key, indices=places, calls=self._calls)
        return self._last

    @no_savepoint
    def savepoint(self) -> None:
        """No-op: a stream depends on the key and the sample."""

    def rollback(self) -> bool:
        """No-op: a stream depends on the key and the sample."""
        return True

    def restart(self) -> None:
        """Keep the key: the generator is as after drawing it."""
        if self._after_key is not None:
            torch.set_rng_state(self._after_key)

    def restore(self) -> None:
        """Leave the stream that an interrupt has left entered; the generators are another participant."""
        # Inside the stream the generators are the sample's; leaving it brings the global ones back.
        if self._last is not None:
            self._last.close()

    def commit(self) -> None:
        """No-op: the generator has moved by one draw."""

    def state_dict(self) -> dict[str, Any]:
        """Return the key."""
        return {"key": self._key}

    def generator_state(self) -> Tensor:
        """Return the state of the generator outside of the streams, which hide it during a micro-batch."""
        assert self._after_key is not None
        return self._after_key

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with a saved key; the generators were loaded before."""
        self._key = state["key"]
        self._after_key = torch.get_rng_state()
