"""Instruments that find an automatic size: a prediction, the limit, a meter of memory, and a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from superbatch.results.memory import Limit, Peak

from ..checks import introspection
from ..memory.limits import PeakMeter, free_in_heap, memory_limit


class Meter(Protocol):
    """Measures the peak of a stretch of work, beyond the memory in use at its start."""

    def start(self) -> None:
        """Begin."""
        ...

    def stop(self) -> int | None:
        """Return the peak in bytes, None where it cannot be known."""
        ...


@dataclass(frozen=True)
class Instruments:
    """Sources of measurements; tests bring their own.

    Attributes:
        predict: (micro-batch, its samples) -> its predicted peak; raises `PredictionError`.
        limit: reads the free memory.
        meter: of memory.
        now: a point in time, without waiting for the device.
        seconds: the time between two such points; may wait for the device.
        retries: how often the allocator had to empty its caches to continue.
        holes: bytes that the C library's heap keeps although they are free; 0 on an accelerator.
        clean: empties the cache of the device's allocator, so that a size is measured by itself.
    """

    predict: Callable[[Any, int], Peak]
    limit: Callable[[], Limit]
    meter: Meter
    now: Callable[[], Any]
    seconds: Callable[[Any, Any], float]
    retries: Callable[[], int]
    holes: Callable[[], int]
    clean: Callable[[], None] = lambda: None


def instruments_for(device: torch.device, predict: Callable[[Any, int], Peak]) -> Instruments:
    """The instruments of a device.

    The part for CUDA was not run on a GPU.

    Args:
        device: where the models are.
        predict: see `Instruments`.

    Returns:
        The instruments.

    Examples:
        >>> instruments = instruments_for(torch.device("cpu"), lambda microbatch, samples: None)
        >>> start = instruments.now()
        >>> instruments.seconds(start, instruments.now()) >= 0, instruments.limit().bytes > 0
        (True, True)
    """
    # Functions, as both are read again for each measurement.
    limit, meter = (lambda: memory_limit(device)), PeakMeter(device)
    if device.type != "cuda":
        return Instruments(
            predict=predict,
            limit=limit,
            meter=meter,
            now=_now,
            seconds=_seconds,
            # Only caching allocators retry.
            retries=lambda: 0,
            holes=free_in_heap,
        )

    def now() -> torch.cuda.Event:
        # On the stream, so that taking the time does not wait for the device.
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        # elapsed_time is in milliseconds, and needs the second event to be over.
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def retries() -> int:
        # Each retry has emptied the cache: micro-batches are near the limit.
        return torch.cuda.memory_stats(device).get("num_alloc_retries", 0)

    return Instruments(
        predict, limit, meter, now, seconds, retries, holes=lambda: 0, clean=torch.cuda.empty_cache
    )


def _now() -> tuple[float, float]:
    # The time of the process's clock and of this thread alone; `_seconds` chooses one.
    return time.perf_counter(), time.thread_time()


def _seconds(start: tuple[float, float], end: tuple[float, float]) -> float:
    """Return the time between two points; with one thread of torch, that of this thread alone."""
    wall, alone = (after - before for before, after in zip(start, end, strict=True))
    return alone if torch.get_num_threads() == 1 else wall


def is_compiled(models: Sequence[nn.Module]) -> bool:
    """Return whether a model, or a part of one, was given to torch.compile: each new size compiles it anew.

    Args:
        models: any modules.

    Returns:
        True if so.

    Examples:
        >>> is_compiled([nn.Linear(1, 1)])
        False
    """
    return any(introspection.is_compiled(module) for model in models for module in model.modules())
