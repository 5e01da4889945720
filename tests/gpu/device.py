"""Calls that differ between CUDA and the CPU of a dry run.

A dry run executes the same lines. A CPU has no allocator statistics, so they are zero there.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    """Return the bytes of live tensors."""
    synchronize(device)
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def release(device: torch.device) -> None:
    """Free the memory of models that only cycles of references still hold, and the allocator's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def statistic(device: torch.device, name: str) -> int:
    """Return one entry of `torch.cuda.memory_stats`."""
    return int(torch.cuda.memory_stats(device).get(name, 0)) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def fraction_of_memory(device: torch.device, fraction: float) -> Iterator[int]:
    """Limit this process to a fraction of the device's memory; yield the bytes."""
    if device.type != "cuda":
        yield 1 << 30
        return
    total = torch.cuda.get_device_properties(device).total_memory
    release(device)
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    try:
        yield int(total * fraction)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()


@contextmanager
def no_tf32() -> Iterator[None]:
    """Compute float32 products and convolutions without TF32."""
    matmul = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = matmul


@contextmanager
def synchronisations(device: torch.device) -> Iterator[list[str]]:
    """Collect one entry, `file:line`, for each host read that torch's sync debug mode reports.

    The mode does not report pageable copies, cudaMalloc and waits for events.
    """
    found: list[str] = []
    if device.type != "cuda":
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Setting the mode warns too, that it is a prototype.
    found += [f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)]
