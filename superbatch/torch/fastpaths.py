"""Fast paths: private functions of torch, and direct reads of NumPy's and Python's memory, only for speed.

Each path has a plain version beside it, which does the same with public functions; `PLAIN` pairs them.
`tests/torch/test_fastpaths.py` compares both, and `benchmarks/fastpaths.py` measures the gain of each path.
A path that gains less than 1 % of a window is replaced by its plain version. Callers write
``fastpaths.backward(...)``, so that a path can be exchanged in one place.

Private functions that correctness needs are not in this file, but in the files that use them.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

# -- autograd ------------------------------------------------------------------------------------------------

# The function that torch.autograd.backward calls last. torch's function modes do not see it.
engine_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward
_in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active


def backward(
    loss: Tensor, gradient: Tensor | None, inputs: Sequence[Tensor] | None, *, retain_graph: bool
) -> None:
    """Run autograd without the checks of user input in `torch.autograd.backward`.

    Args:
        loss: the tensor that the backward starts from.
        gradient: gradient with respect to `loss`.
        inputs: leaves whose ``.grad`` is accumulated; None for all.
        retain_graph: keep the graph for another backward.

    Examples:
        >>> x = torch.ones(2, requires_grad=True)
        >>> backward(x.sum(), torch.tensor(3.0), None, retain_graph=False)
        >>> x.grad
        tensor([3., 3.])
    """
    # Subclasses of Tensor and transforms of torch.func need torch's own function.
    if type(loss) is not Tensor or gradient is None or _in_transform():
        plain_backward(loss, gradient, inputs, retain_graph=retain_graph)
        return
    engine_backward(
        (loss,),
        (gradient,),
        keep_graph=retain_graph,
        create_graph=False,
        inputs=tuple(inputs or ()),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def plain_backward(
    loss: Tensor, gradient: Tensor | None, inputs: Sequence[Tensor] | None, *, retain_graph: bool
) -> None:
    """Run autograd by its public function."""
    torch.autograd.backward(loss, gradient, retain_graph, inputs=inputs)


# -- NumPy's global generator --------------------------------------------------------------------------------

_MT19937_BYTES = 624 * 4 + 4  # NumPy's struct mt19937_state: uint32_t key[624]; int pos;


def numpy_memory(numpy_random: Any) -> bytes | None:
    """Return the state of NumPy's global generator as bytes; None if it is not a Mersenne Twister.

    The bytes do not include the second normal number that the generator may store.

    Examples:
        >>> import numpy
        >>> before = numpy_memory(numpy.random)
        >>> _ = numpy.random.rand()
        >>> numpy_memory(numpy.random) == before
        False
    """
    get_bit_generator = getattr(numpy_random, "get_bit_generator", None)  # from NumPy 1.24 on
    bits = None if get_bit_generator is None else get_bit_generator()
    if bits is None or type(bits).__name__ != "MT19937":
        return None
    return ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)


def plain_numpy_memory(numpy_random: Any) -> bytes | None:
    """Return the bytes of `numpy_memory` from the public state, which NumPy builds number by number."""
    state = numpy_random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return None
    inner = state["state"]
    return inner["key"].tobytes() + bytes(ctypes.c_int(inner["pos"]))


# -- Python's global generator -------------------------------------------------------------------------------

_PYTHON_WORDS = 1 + 624  # CPython: RandomObject after its head: int index; uint32_t state[624]


def python_memory() -> tuple[bytes, float | None] | None:
    """Return the state of Python's global generator: its bytes, and its spare normal number or None.

    Returns None if its memory does not have the expected layout.

    Examples:
        >>> before = python_memory()
        >>> _ = random.random()
        >>> python_memory() == before
        False
    """
    generator = _python_generator()
    if generator is None:
        return None
    return ctypes.string_at(id(generator) + object.__basicsize__, 4 * _PYTHON_WORDS), generator.gauss_next


def plain_python_memory() -> tuple[bytes, float | None] | None:
    """Return the values of `python_memory` from the public state, which Python builds number by number."""
    _, (*state, index), gauss_next = random.getstate()
    return bytes((ctypes.c_uint32 * _PYTHON_WORDS)(index, *state)), gauss_next


@cache
def _python_generator() -> Any:
    """Return Python's global generator, or None if its memory differs from its public state."""
    generator: Any = getattr(random, "_inst", None)
    if sys.implementation.name != "cpython" or type(generator) is not random.Random:
        return None
    if type(generator).__basicsize__ < object.__basicsize__ + 4 * _PYTHON_WORDS:
        return None
    memory = ctypes.string_at(id(generator) + object.__basicsize__, 4 * _PYTHON_WORDS)
    plain = plain_python_memory()
    return generator if plain is not None and memory == plain[0] else None


# -- many tensors in one call --------------------------------------------------------------------------------
#
# On an accelerator: one kernel for all tensors of a device and dtype, as torch.optim does. On the CPU: a loop
# inside torch.


def divide(tensors: list[Tensor], divisor: float) -> None:
    """Divide tensors in place.

    Examples:
        >>> one = torch.ones(2)
        >>> divide([one], 4.0)
        >>> one
        tensor([0.2500, 0.2500])
    """
    torch._foreach_div_(tensors, divisor)  # pyright: ignore[reportPrivateImportUsage]


def plain_divide(tensors: list[Tensor], divisor: float) -> None:
    """Divide tensors in place, one by one."""
    for tensor in tensors:
        tensor.div_(divisor)


def multiply(tensors: list[Tensor], factor: float) -> None:
    """Multiply tensors in place.

    Examples:
        >>> one = torch.ones(2)
        >>> multiply([one], 4.0)
        >>> one
        tensor([4., 4.])
    """
    if not tensors or tensors[0].is_cpu:  # on the CPU torch's own loop rounds the factor to bfloat16
        plain_multiply(tensors, factor)
    else:
        torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportPrivateImportUsage]


def plain_multiply(tensors: list[Tensor], factor: float) -> None:
    """Multiply tensors in place, one by one."""
    for tensor in tensors:
        tensor.mul_(factor)


def add(targets: list[Tensor], sources: list[Tensor], factor: float) -> None:
    """Add `factor` times each source to its target, in place.

    Examples:
        >>> one = torch.ones(2)
        >>> add([one], [torch.ones(2)], 4.0)
        >>> one
        tensor([5., 5.])
    """
    torch._foreach_add_(targets, sources, alpha=factor)  # pyright: ignore[reportPrivateImportUsage]


def plain_add(targets: list[Tensor], sources: list[Tensor], factor: float) -> None:
    """Add `factor` times each source to its target, in place, one by one."""
    for target, source in zip(targets, sources, strict=True):
        target.add_(source, alpha=factor)


def norms(tensors: list[Tensor], order: float = 2.0, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the norm of each tensor, all of one device and dtype.

    Examples:
        >>> norms([torch.tensor([3.0, 4.0])])
        [tensor(5.)]
    """
    return list(torch._foreach_norm(tensors, order, dtype))  # pyright: ignore[reportPrivateImportUsage]


def plain_norms(tensors: list[Tensor], order: float = 2.0, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the norm of each tensor, one by one."""
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into others of the same shape, all of one device and dtype.

    Examples:
        >>> zero = torch.zeros(2)
        >>> copy([zero], [torch.ones(2)])
        >>> zero
        tensor([1., 1.])
    """
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def plain_copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into others, one by one."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


# -- the C library's heap ------------------------------------------------------------------------------------

_BLOCK_BYTES = 2**25 - 2**16  # glibc raises its threshold for blocks of up to 32 MiB with their headers


def keep_freed_memory(devices: Iterable[torch.device]) -> None:
    """Make glibc keep memory that a micro-batch frees, for the next micro-batch.

    By default glibc returns the end of its heap to the system once its free part exceeds twice the largest
    block freed so far. Each micro-batch then fetches the memory again page by page. glibc raises this
    threshold for freed blocks of up to 32 MiB, so this function allocates one such block and frees it
    untouched; afterwards glibc keeps up to 64 MiB. It takes microseconds, once per process, and no memory.
    It has no effect if the user has set glibc's thresholds or uses another allocator (docs/decisions/0021).

    Args:
        devices: devices of the training; without the CPU among them this is a no-op.

    Examples:
        >>> keep_freed_memory([torch.device("cpu")])

    References:
        mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    if any(device.type == "cpu" for device in devices):
        with suppress(RuntimeError):  # the address space may be limited (ulimit -v)
            _allocate_and_free()


def plain_keep_freed_memory(devices: Iterable[torch.device]) -> None:
    """Leave the heap as it is."""


@cache  # once per process is enough, and a profiler would show the block in each step
def _allocate_and_free() -> None:
    # A storage, not a tensor: torch.empty fills its memory in deterministic mode, and tools count tensors.
    torch.UntypedStorage(_BLOCK_BYTES, device="cpu")


PLAIN: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "backward": plain_backward,
        "numpy_memory": plain_numpy_memory,
        "python_memory": plain_python_memory,
        "divide": plain_divide,
        "multiply": plain_multiply,
        "add": plain_add,
        "norms": plain_norms,
        "copy": plain_copy,
        "keep_freed_memory": plain_keep_freed_memory,
    }
)
"""The plain version of each path, by the name of the path."""
