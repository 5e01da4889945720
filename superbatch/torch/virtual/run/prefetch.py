"""Prefetch of rows from the host's memory, while the device computes.

A sweep knows what it reads next. One tensor of rows more than the plan counts is on the device meanwhile. The
part for CUDA was not run on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from superbatch.torch.window.transfer import SideStream, has_streams, pinned


class Prefetcher:
    """Brings rows to the device, and those that come next meanwhile.

    Args:
        device: where they are worked with.
        to_host: the stream of the copies that these rows come from. Not the same as for the copies back:
            the computation waits for those, and would wait for the copies of its last results too.
    """

    def __init__(self, device: torch.device, to_host: SideStream | None = None) -> None:
        self._device = device
        self._side = SideStream(device)
        self._to_host = to_host or SideStream(device)
        self._copies: deque[Any] = deque()
        self._coming: tuple[Hashable, Tensor] | None = None

    def fetch(self, key: Hashable, rows: Tensor) -> Tensor:
        """Return rows on the device.

        Args:
            key: of these rows, as given to `begin`.
            rows: where they lie.
        """
        coming, self._coming = self._coming, None
        if coming is not None:
            self._side.join()  # also for rows that nobody wants: their memory is the computation's
            if coming[0] == key:
                return coming[1]
        self._to_host.join()  # the copy to the host may not be through
        return rows.to(self._device, non_blocking=True)

    def begin(self, key: Hashable, rows: Tensor) -> None:
        """Begin to copy rows that are fetched next, if they are in other memory."""
        if rows.device == self._device:
            return
        # Memory of the computation's own stream, which the copy therefore waits for: rows do not pile up
        # where the host is far ahead.
        there = torch.empty_like(rows, device=self._device)
        source = pinned(rows) if has_streams(self._device) else rows
        with self._side.beside(after_computation=True):
            self._side.follow(self._to_host)  # what is kept on the host may itself still be on its way there
            self._coming = key, there.copy_(source, non_blocking=True)
        if source is not rows:
            self._bound_pinned()

    def _bound_pinned(self) -> None:
        """Wait until the last copy but one is through: what it was copied from is pinned memory of ours."""
        self._copies.append(self._side.event())
        if len(self._copies) > 2:
            self._copies.popleft().synchronize()
