"""Recognition of out-of-memory errors, narrow enough to hide no other error; and freeing of caches."""

from __future__ import annotations

import ctypes
import sys

import torch

from superbatch.errors import OutOfMemoryError

from ..devices import module_of
from .limits import memory_limit

# Messages of torch and other libraries, on devices without an error type for lack of memory.
_TEXTS = (
    "DefaultCPUAllocator: can't allocate",  # POSIX
    "DefaultCPUAllocator: not enough memory",  # Windows
    "std::bad_alloc",  # a kernel's own scratch memory on the CPU
    "CUDA out of memory",  # older versions of torch, without an error type
    "CUDA error: out of memory",  # the driver, not the allocator
    "CUDA driver error: out of memory",  # the driver, with expandable segments
    "Triton Error [CUDA]: out of memory",  # loading of a compiled kernel
    "Triton Error [HIP]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",  # a workspace, or the handle made at the first use
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",  # from cuDNN 9 on
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "CURAND_STATUS_ALLOCATION_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "HIPFFT_ALLOC_FAILED",
    "miopenStatusAllocFailed",
    "MPS backend out of memory",
    "XPU out of memory",
    "HIP out of memory",
    "HIP error: out of memory",
)
# oneDNN has the same message for a lack of memory and for a missing kernel. It means a lack of memory only if
# fewer than _SCARCE_BYTES are free.
_SCARCE_TEXTS = ("could not create a primitive", "could not execute a primitive")
_SCARCE_BYTES = 2**26
# The same on a GPU: no handle could be made, or no engine got its workspace.
_SCARCE_TEXTS_CUDA = (
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUSOLVER_STATUS_NOT_INITIALIZED",
    "CUSPARSE_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "HIPBLAS_STATUS_NOT_INITIALIZED",
    "unable to find an engine to execute this computation",
)
# A handle and its first workspace take up to 256 MiB; on a large device workspaces may take a 16th of it.
_SCARCE_BYTES_CUDA, _SCARCE_SHARE = 2**28, 16
_TYPES = (RuntimeError, getattr(torch, "AcceleratorError", RuntimeError))


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out.

    Returns:
        True for torch.OutOfMemoryError and Python's MemoryError. True for an error of torch if its text says
        that an allocator, a library's workspace or a driver has no memory. False for this library's own
        OutOfMemoryError, e.g. of an accumulator inside a loss function: its update may be incomplete, so it
        must not run again.

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
    # The exact type, because a subclass may be an error of the user with any text.
    if type(error) not in _TYPES:
        return False
    message = str(error)
    if any(text in message for text in _TEXTS):
        return True
    # These texts have other causes too, so the free memory decides.
    if any(text in message for text in _SCARCE_TEXTS_CUDA):
        return _is_scarce_on_cuda()
    return message in _SCARCE_TEXTS and _is_scarce()


_PINNING = {"cuda", "xpu"}  # devices for which torch caches pinned host memory


def _release_pinned() -> None:
    """Free unused pinned memory, which torch caches in blocks of powers of two."""
    accelerator = getattr(torch, "accelerator", None)
    # Private, because older versions of torch have no public function for this.
    empty = getattr(accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


def _is_scarce() -> bool:
    return memory_limit(torch.device("cpu")).bytes < _SCARCE_BYTES


def _is_scarce_on_cuda() -> bool:
    """Return whether a GPU that this process uses has hardly any memory left."""
    if not torch.cuda.is_initialized():
        return False
    # Only GPUs in use, because a query of another GPU would allocate memory there.
    in_use = {torch.cuda.current_device()}
    in_use |= {index for index in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(index)}
    for index in in_use:
        total = torch.cuda.mem_get_info(index)[1]
        if memory_limit(torch.device("cuda", index)).bytes < max(_SCARCE_BYTES_CUDA, total // _SCARCE_SHARE):
            return True
    return False


def release_caches(*devices: torch.device) -> None:
    """Free unused memory: the allocators' caches, and the free blocks of the C library's heap.

    Args:
        devices: devices whose caches are emptied, beside the CPU's. torch empties the caches of all devices
            of a kind at once.

    Examples:
        >>> release_caches()
    """
    for kind in dict.fromkeys(device.type for device in devices):
        module = None if kind == "cpu" else module_of(torch.device(kind))
        empty = getattr(module, "empty_cache", None)
        if empty is not None:
            empty()
        if kind in _PINNING:
            _release_pinned()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
        if trim is not None:
            trim(0)
