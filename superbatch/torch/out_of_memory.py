"""Which errors say that memory ran out - narrowly, so that no other is hidden; and giving memory back."""

from __future__ import annotations

import ctypes
import sys

import torch

from ..errors import OutOfMemoryError
from .sizes.limits import memory_limit

# What torch and the libraries below it say, on devices that have no error type of their own for it.
_TEXTS = (
    "DefaultCPUAllocator: can't allocate",  # POSIX
    "DefaultCPUAllocator: not enough memory",  # Windows
    "std::bad_alloc",  # a kernel's own scratch memory on the CPU
    "CUDA out of memory",  # torch before it had a type for it
    "CUDA error: out of memory",  # the driver, not the allocator
    "CUBLAS_STATUS_ALLOC_FAILED",  # a workspace, or the handle made at its first use
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
    "XPU out of memory",
    "HIP out of memory",
    "HIP error: out of memory",
)
# oneDNN says the same when it has no memory for its kernels and when it has no such kernel: so only where
# there is hardly any memory.
_SCARCE_TEXTS = ("could not create a primitive", "could not execute a primitive")
_SCARCE_BYTES = 2**26
_TYPES = (RuntimeError, getattr(torch, "AcceleratorError", RuntimeError))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, and nothing else.

    Args:
        error: what a pass raised.

    Returns:
        True for torch's accelerator error and Python's MemoryError, and for an error of torch's own type with
        the text of an allocator, of a library's workspace, or of a driver that has no memory. False for this
        library's own OutOfMemoryError, a verdict: what raised it, such as an accumulator inside a loss
        function, must not be run again, since its update may be half made.

    Examples:
        >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
        True
        >>> out_of_memory(RuntimeError("shapes do not match"))
        False
    """
    if isinstance(error, OutOfMemoryError):
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if type(error) not in _TYPES:
        return False
    said = str(error)
    return any(text in said for text in _TEXTS) or (said in _SCARCE_TEXTS and _is_scarce())


def _is_scarce() -> bool:
    return memory_limit(torch.device("cpu")).bytes < _SCARCE_BYTES


def release_caches(device: torch.device | None) -> None:
    """Give memory that nobody uses back: the allocator's caches, and what the C library keeps.

    Args:
        device: whose caches, besides the CPU's; None for the CPU alone.

    Examples:
        >>> release_caches(None)
    """
    if device is not None and device.type != "cpu":
        empty = getattr(torch.get_device_module(device), "empty_cache", None)
        if empty is not None:
            empty()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
        if trim is not None:
            trim(0)
