"""Sum of a few numbers over the ranks, with as few messages as possible."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class FrameSum:
    """A sum over the ranks that has begun.

    Args:
        frame: this rank's numbers, equally many on each rank; they are overwritten.
        group: the process group; each of its ranks must begin the same sum.
    """

    def __init__(self, frame: Tensor, group: Any) -> None:
        count = dist.get_world_size(group)
        # Gloo's all-reduce passes a tensor around a ring twice: 2 (count - 1) messages, one after the other.
        # Here each rank sends its numbers to all ranks at once, in the time of one message.
        if dist.get_backend(group) == "gloo":
            self._rows = frame.new_empty(count, len(frame))
            copies = frame.expand(count, -1).contiguous()
            self._work: Any = dist.all_to_all_single(self._rows, copies, group=group, async_op=True)
        else:
            self._rows = frame.unsqueeze(0)
            self._work = dist.all_reduce(self._rows, group=group, async_op=True)

    def is_completed(self) -> bool:
        """Return whether `numbers` returns without waiting."""
        return bool(self._work.is_completed())

    def numbers(self) -> list[float]:
        """Wait for the other ranks, and return the sums, which are bit for bit equal on all ranks.

        Raises:
            RuntimeError: another rank cannot be reached.
        """
        self._work.wait()
        rows = self._rows
        return (rows[0] if len(rows) == 1 else torch.sum(rows, 0)).tolist()
