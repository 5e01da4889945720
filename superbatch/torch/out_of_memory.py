"""Which errors say that memory ran out: recognised narrowly, so that no other error is hidden."""

from __future__ import annotations

import torch


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, and nothing else.

    Args:
        error: what a pass raised.

    Returns:
        True for torch's accelerator error and Python's MemoryError, and for the RuntimeError of torch's
        allocator on the CPU.

    Examples:
        >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
        True
        >>> out_of_memory(RuntimeError("shapes do not match"))
        False
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)
