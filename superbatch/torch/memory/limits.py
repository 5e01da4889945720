"""Limits of memory, and the peak memory between two calls.

On the CPU, *address space* (``RLIMIT_AS``, ``VmSize``) grows when the C library allocates it, and *resident
memory* (cgroups, the machine) when a page is first written to. Both include memory that the C library has
freed but not returned to the system. The next tensors use that memory, so it counts as free in a `Limit`, and
as used by the work in a `PeakMeter`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from superbatch.errors import InputError
from superbatch.results.memory import Limit, binary_text

from .cgroups import cgroup_limits

_PROC = Path("/proc")


def memory_limit(device: torch.device) -> Limit:
    """Return the bytes that may still be allocated, and the origin of that limit.

    * CPU: the least of what address space (``RLIMIT_AS``, ``RLIMIT_DATA``), control groups (versions 1 and 2,
      with every group above) and the machine allow. File caches that can be dropped count as free.
    * CUDA: the device's free memory, plus the unused whole blocks of torch's allocator, within
      `torch.cuda.set_per_process_memory_fraction`. Holes beside used memory do not count, because no large
      tensor fits into them. (Not yet tested on a GPU.)

    Call it after a prediction, which imports modules, and before a window allocates memory. On the CPU it
    takes about 0.5 ms.

    Args:
        device: one device.

    Returns:
        The limit; not below 0.

    Raises:
        InputError: the device is not a CPU or a CUDA device.

    Examples:
        >>> memory_limit(torch.device("cpu")).bytes > 0
        True
    """
    if device.type == "cpu":
        return _least([*_process_limits(), *cgroup_limits(_PROC), *_machine()], free_in_heap())
    if device.type == "cuda":
        return _cuda_limit(device)
    raise _unknown(device)


class PeakMeter:
    """Measures the peak memory of the work between `start` and `stop`, as `memory_limit` counts it.

    * CPU: on Linux the highest address space, or the highest resident memory if the address space had been
      larger before; on other systems nothing. `start` resets the process's ``VmHWM``.
    * CUDA: the growth of the memory that torch's allocator has reserved, holes included; nothing if it has
      not grown. The allocator's peak statistics are not reset, because the user may use them.

    `start` and `stop` take about 0.1 ms on the CPU, and do not wait for a GPU.

    Raises:
        InputError: the device is not a CPU or a CUDA device.

    Examples:
        >>> meter = PeakMeter(torch.device("cpu"))
        >>> meter.start()
        >>> block = torch.ones(1 << 24)
        >>> peak = meter.stop()
        >>> peak is None or peak > 0.9 * block.nbytes
        True
    """

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise _unknown(device)
        self._device = device
        self._before: dict[str, int] | None = None
        self._allocated = self._reserved = 0
        self._free = 0

    def start(self) -> None:
        """Begin the measurement."""
        if self._device.type == "cuda":
            self._allocated = torch.cuda.memory_allocated(self._device)
            self._reserved = torch.cuda.memory_reserved(self._device)
        else:
            self._free = free_in_heap()
            resettable = _reset_highest_resident()
            self._before = _status() if resettable else None

    def stop(self) -> int | None:
        """End the measurement; return the peak bytes beyond those in use at `start`, None if unknown."""
        if self._device.type == "cuda":
            reserved = torch.cuda.memory_reserved(self._device)
            return reserved - self._allocated if reserved > self._reserved else None
        before, self._before = self._before, None
        after = _status()
        if before is None or after is None:
            return None
        # VmPeak cannot be reset. If it has not grown, the peak was below it and is unknown.
        name, base = ("VmPeak", "VmSize") if after["VmPeak"] > before["VmPeak"] else ("VmHWM", "VmRSS")
        # The work uses free bytes of the heap first, which changes none of these numbers.
        return max(0, after[name] - before[base] + self._free)


def free_in_heap() -> int:
    """Return the bytes that the C library has freed but not returned to the system; 0 if unknown.

    Examples:
        >>> free_in_heap() >= 0
        True
    """
    # glibc's heap shrinks only at its end, so its holes may be as large as the tensors. A peak of 1.4 to 2.9
    # times the prediction was measured, and no holes with MALLOC_MMAP_THRESHOLD_=65536.
    if not sys.platform.startswith("linux"):
        return 0
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc from 2.33 on
    if mallinfo2 is None:
        return 0
    # Without restype ctypes would read an int.
    mallinfo2.restype = _Mallinfo2
    return int(mallinfo2().fordblks)


class _Mallinfo2(ctypes.Structure):
    """The struct mallinfo2 of <malloc.h>."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
    ] + [("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


def _least(limits: list[Limit], free: int) -> Limit:
    if not limits:
        return Limit(sys.maxsize, "this system reports no limit")
    least = min(limits, key=lambda limit: limit.bytes)
    return Limit(max(0, least.bytes + free), least.by)


def _process_limits() -> Iterator[Limit]:
    status = _status()
    if status is None:
        return
    import resource  # Unix only, as /proc is

    for name, used in (("RLIMIT_AS", status["VmSize"]), ("RLIMIT_DATA", status["VmData"])):
        # The soft limit is the one that stops an allocation.
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            yield Limit(soft - used, f"{name} of {binary_text(soft)}")


def _machine() -> Iterator[Limit]:
    try:
        lines = (_PROC / "meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("MemAvailable:"):
            yield Limit(int(line.split()[1]) * 1024, "memory of this machine that is available")


def _status() -> dict[str, int] | None:
    """Return sizes of this process in bytes, by their names in /proc; None if there is no /proc."""
    try:
        text = (_PROC / "self" / "status").read_text(encoding="utf-8")
    except OSError:
        return None
    lines = (line.split() for line in text.splitlines() if line.startswith("Vm"))
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}


def _reset_highest_resident() -> bool:
    try:
        (_PROC / "self" / "clear_refs").write_text("5", encoding="ascii")
    except OSError:  # no Linux, or a system that forbids it
        return False
    return True


def _cuda_limit(device: torch.device) -> Limit:
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)  # one reading of all; empty before the first use
    # Inactive parts of split blocks are holes, into which no large tensor fits.
    used = stats.get("allocated_bytes.all.current", 0) + stats.get("inactive_split_bytes.all.current", 0)
    unused = stats.get("reserved_bytes.all.current", 0) - used
    limits = [Limit(free + unused, f"free memory of {device}")]
    fraction_of = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # from torch 2.7 on
    fraction = 1.0 if fraction_of is None else fraction_of(device)
    if fraction < 1.0:
        limits.append(Limit(int(fraction * total) - used, f"set_per_process_memory_fraction({fraction:g})"))
    return _least(limits, 0)


def _unknown(device: torch.device) -> InputError:
    return InputError(
        f"The memory of device={str(device)!r} cannot be measured, only that of CPU and CUDA. Pass "
        "microbatch_size= as an int."
    )
