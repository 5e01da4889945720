"""Time and peak memory of a call on a device, interleaved over contestants."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from superbatch.torch.memory.meter import peak_bytes


@dataclass(frozen=True)
class Row:
    """Row of the table: one contestant.

    Attributes:
        seconds: median over rounds.
        ratio: ratio of its median to the first contestant's.
        low, high: quartiles of the ratio within a round.
        peak: bytes on top of those before the call; None if not measured.
        rounds: number of timed rounds.
        error: reason why it did not run; the other figures are then 0.
    """

    name: str
    seconds: float
    ratio: float
    low: float
    high: float
    peak: int | None
    rounds: int
    error: str | None = None


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call: between two CUDA events, or by the clock on other devices."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    torch.cuda.synchronize(device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def compare(
    contestants: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    seconds: float,
    most_rounds: int = 15,
    peaks: bool = True,
) -> list[Row]:
    """Let contestants take turns until the time is over; ratios refer to the first.

    A contestant whose first call would begin later has the error "no time left".
    """
    until = time.monotonic() + seconds
    times: dict[str, list[float]] = {name: [] for name in contestants}
    errors: dict[str, str] = {}
    memory: dict[str, int] = {}
    for (
        name,
        call,
    ) in contestants.items():  # the first call creates optimizer state, compiles kernels and fills caches
        if memory and time.monotonic() > until:
            errors[name] = "no time left"
            continue
        try:
            call()
            if peaks:
                memory[name] = peak_bytes(call, device=device)
        except (RuntimeError, MemoryError) as error:
            errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            _free(device)
    for index in range(most_rounds):
        if index >= 1 and time.monotonic() > until:
            break
        for name, call in contestants.items():
            if name not in errors:
                times[name].append(timed(call, device))
    return [_row(name, times, memory.get(name), errors.get(name)) for name in contestants]


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _row(name: str, times: Mapping[str, list[float]], peak: int | None, error: str | None) -> Row:
    own, base = times[name], next(iter(times.values()))
    if not own or not base:
        return Row(name, 0.0, 0.0, 0.0, 0.0, peak, len(own), error)
    ratios = [a / b for a, b in zip(own, base, strict=False)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    ratio = statistics.median(own) / statistics.median(base)
    return Row(name, statistics.median(own), ratio, low, high, peak, len(own), error)
