"""Rows that lie in the host's memory: the next ones are on their way while these are worked on.

A sweep knows what it reads next. One tensor of rows more than the plan counts is on the device meanwhile. The
part for CUDA was not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ..transfer import SideStream, pinned


class Ahead:
    """Brings rows to the device, and those that come next meanwhile.

    Args:
        device: where they are worked with.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = SideStream(device)
        self._coming: tuple[Hashable, Tensor] | None = None

    def fetch(self, key: Hashable, rows: Tensor) -> Tensor:
        """Return rows on the device.

        Args:
            key: of these rows, as given to `begin`.
            rows: where they lie.
        """
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] == key:
            self._side.hand_over(coming[1])
            return coming[1]
        return rows.to(self._device, non_blocking=True)

    def begin(self, key: Hashable, rows: Tensor) -> None:
        """Begin to copy rows that are fetched next, if they lie elsewhere."""
        if rows.device == self._device:
            return
        # What is kept on the host may itself still be on its way there.
        with self._side.beside(after_computation=True):
            source = pinned(rows) if self._device.type == "cuda" else rows
            self._coming = key, source.to(self._device, non_blocking=True)
