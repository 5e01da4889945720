"""Prefetch of rows from the host's memory while the device computes.

A sweep knows the rows that it reads next. The prefetch needs device memory for one tensor of rows more than
the plan counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from superbatch.torch.window.transfer import SideStream, has_streams, pinned


class Prefetcher:
    """Copy rows to the device, one tensor ahead; `to_host` is the stream of the copies to the host."""

    def __init__(self, device: torch.device, to_host: SideStream | None = None) -> None:
        self._device = device
        # Not `to_host`: the computation waits for this stream, and would also wait for the copies of its last
        # results to the host.
        self._side = SideStream(device)
        self._to_host = to_host or SideStream(device)
        self._copies: deque[Any] = deque()
        self._coming: tuple[Hashable, Tensor] | None = None

    def fetch(self, key: Hashable, rows: Tensor) -> Tensor:
        """Return rows on the device; `key` is that of these rows in `begin`."""
        # Removed in any case, because a copy is used at once or not at all.
        coming, self._coming = self._coming, None
        if coming is not None:
            self._side.join()  # for unused rows too, because the computation reuses their memory
            if coming[0] == key:
                return coming[1]
        self._to_host.join()  # the copy of these rows to the host may be incomplete
        return rows.to(self._device, non_blocking=True)

    def begin(self, key: Hashable, rows: Tensor) -> None:
        """Begin to copy the rows that will be fetched next, if they are not on the device."""
        if rows.device == self._device:
            return
        # Allocated on the computation's stream, for which the copy waits: a host that runs far ahead does not
        # fill the device with rows.
        copy = torch.empty_like(rows, device=self._device)
        source = pinned(rows) if has_streams(self._device) else rows
        with self._side.beside(after_computation=True):
            self._side.follow(self._to_host)  # the copy of these rows to the host may be incomplete
            self._coming = key, copy.copy_(source, non_blocking=True)
        if source is not rows:
            self._bound_pinned()

    def _bound_pinned(self) -> None:
        """Wait for the copy before the last, so that at most two pinned staging buffers are alive."""
        self._copies.append(self._side.event())
        if len(self._copies) > 2:
            self._copies.popleft().synchronize()
