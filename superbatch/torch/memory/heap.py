"""Memory of the CPU that windows free and take again, in the C library's heap."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cache

import torch

_LEARNT = 2**25 - 2**16  # glibc learns from blocks of up to 32 MiB, its own header included


def keep_freed_memory(devices: Iterable[torch.device]) -> None:
    """Let glibc keep what a micro-batch frees for the next one.

    By default it hands the end of its heap back to the system once more is free there than twice the largest
    block that a program has freed so far, and fetches it again page by page, in each micro-batch: some per
    cent of the time of a small transformer, in one process and not in the next, as memory happens to lie. A
    block of 32 MiB that is taken, never touched and freed is the largest that it learns from; afterwards up
    to 64 MiB stay. Costs microseconds, once in a process, and no memory; where the user has set glibc's
    thresholds, or another allocator is in use, it does nothing.

    Args:
        devices: where the training works; nothing is done where none is the CPU.

    Examples:
        >>> keep_freed_memory([torch.device("cpu")])

    References:
        mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    if any(device.type == "cpu" for device in devices):
        with suppress(RuntimeError):  # a limit of addresses: then there is not so much to keep
            _take_and_free()


@cache  # glibc does not forget, and a profiler would show the block in each step
def _take_and_free() -> None:
    # No tensor: those who count tensors would count it, and deterministic algorithms fill what is empty.
    torch.UntypedStorage(_LEARNT, device="cpu")
