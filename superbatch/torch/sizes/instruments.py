"""Functions that measure for automatic sizes: a prediction, the limit, a memory meter, and a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from superbatch.results.memory import Limit, Peak

from ..memory.limits import PeakMeter, free_in_heap, memory_limit


class Meter(Protocol):
    """Meter of the peak memory between two calls, beyond the memory in use at the first."""

    def start(self) -> None:
        """Begin a measurement."""
        ...

    def stop(self) -> int | None:
        """Return the peak in bytes; None if it cannot be measured."""
        ...


@dataclass(frozen=True)
class Instruments:
    """Functions that measure memory and time; tests replace them.

    Attributes:
        predict: returns the predicted peak of (micro-batch, number of samples); raises `PredictionError`.
        limit: reads the free memory.
        meter: meter of peak memory.
        now: returns a point in time, without waiting for the device.
        seconds: returns the time between two such points; may wait for the device.
        retries: returns how often the allocator had to empty its caches to continue.
        holes: returns the freed bytes that the C library's heap still holds; 0 on an accelerator.
        clean: empties the cache of the device's allocator, so that each size is measured alone.
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
    """Return the instruments of a device.

    Examples:
        >>> instruments = instruments_for(torch.device("cpu"), lambda microbatch, samples: None)
        >>> start = instruments.now()
        >>> instruments.seconds(start, instruments.now()) >= 0, instruments.limit().bytes > 0
        (True, True)
    """
    # A function, because the limit is read again for each measurement.
    limit, meter = (lambda: memory_limit(device)), PeakMeter(device)
    if device.type != "cuda":
        return Instruments(
            predict=predict,
            limit=limit,
            meter=meter,
            now=_now,
            seconds=_seconds,
            # Only a caching allocator retries.
            retries=lambda: 0,
            holes=free_in_heap,
        )

    # Not yet tested on a GPU.
    def now() -> torch.cuda.Event:
        # An event on the stream: reading the time does not wait for the device.
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        # elapsed_time is in milliseconds, and requires that the second event has completed.
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def retries() -> int:
        # Each retry has emptied the allocator's cache, so memory is nearly full.
        return torch.cuda.memory_stats(device).get("num_alloc_retries", 0)

    return Instruments(
        predict, limit, meter, now, seconds, retries, holes=lambda: 0, clean=torch.cuda.empty_cache
    )


def _now() -> tuple[float, float]:
    # Wall time, and CPU time of this thread; `_seconds` chooses one.
    return time.perf_counter(), time.thread_time()


def _seconds(start: tuple[float, float], end: tuple[float, float]) -> float:
    """Return the wall time between two points; with one torch thread, the CPU time of this thread."""
    wall, alone = (after - before for before, after in zip(start, end, strict=True))
    return alone if torch.get_num_threads() == 1 else wall
