"""Host reads, overlapping copies and allocator calls within a window."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from superbatch.torch import Accumulator
from superbatch.torch.options import PerSampleRandom
from tests.gpu import device as devices
from tests.gpu import tasks
from tests.gpu.check import Figures, Run

MOST_READS = 2  # per window: losses and norm


def _accumulator(run: Run, samples: int, **options: Any) -> tuple[Accumulator, tasks.Task]:
    task = tasks.mlp(run.device, torch.float32, samples)
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Accumulator(model, optimizer, lambda part: task.loss(model, part), **options), task


def host_reads(run: Run) -> Figures:
    """A plain or clipped window has at most two host reads; report those of other options."""
    figures: Figures = {}
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "clipped": {"max_grad_norm": 1.0},
        "skip_microbatch": {"nonfinite": "skip_microbatch"},
        "sample_rng": {"participants": [PerSampleRandom()]},
    }
    for name, options in cases.items():
        accumulate, task = _accumulator(run, 64, microbatch_size=8, **options)
        for _ in range(2):
            accumulate(task.batch)
        with devices.synchronisations(run.device) as found:
            accumulate(task.batch)
        figures[name] = dict(Counter(found))
        if name in ("plain", "clipped"):
            assert len(found) <= MOST_READS, f"{name}: {len(found)} host reads: {Counter(found)}"
    return figures


def copies_and_kernels(run: Run) -> Figures:
    """The third window makes no allocator calls; report copies that overlap kernels."""
    rows = 64 if run.small else 8192
    accumulate, task = _accumulator(run, rows, microbatch_size=rows // 8)
    for _ in range(2):
        accumulate(task.batch)
    activities = [ProfilerActivity.CPU]
    if run.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as record:
        accumulate(task.batch)
        devices.synchronize(run.device)
    events = list(record.events() or [])
    names = Counter(event.name for event in events)
    copies = [e for e in events if "Memcpy HtoD" in e.name]
    kernels = [e for e in events if str(e.device_type).endswith("CUDA") and "Memcpy" not in e.name]
    overlapped = sum(
        any(k.time_range.start < c.time_range.end and c.time_range.start < k.time_range.end for k in kernels)
        for c in copies
    )
    mallocs = {
        name: count for name, count in names.items() if name in ("cudaMalloc", "cudaHostAlloc", "cudaFree")
    }
    assert names, "premise: the profiler saw the window"
    assert not mallocs.get("cudaMalloc"), f"the third window still asks the driver for memory: {mallocs}"
    return {
        "copies": len(copies),
        "beside a kernel": overlapped,
        "kernels": len(kernels),
        "allocator": mallocs,
    }
