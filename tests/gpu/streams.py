"""Host reads, overlapping copies and allocator calls within a window."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from superbatch.torch import Accumulator, virtual_batch
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
    """The third window makes no allocator calls, and most of its large copies overlap kernels."""
    model, batch, samples = tasks.wide(run.device, small=run.small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate = Accumulator(
        model, optimizer, lambda part: tasks.wide_loss(model, part), microbatch_size=samples // 8
    )
    for _ in range(2):
        accumulate(batch)
    activities = [ProfilerActivity.CPU]
    if run.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as record:
        accumulate(batch)
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
    if run.device.type == "cuda":
        assert overlapped >= len(copies) // 2, f"{overlapped} of {len(copies)} copies overlap kernels"
    return {
        "copies": len(copies),
        "beside a kernel": overlapped,
        "kernels": len(kernels),
        "allocator": mallocs,
    }


def offloaded_rows(run: Run) -> Figures:
    """Rows that were stored on the host by a separate stream give the gradients of rows on the device.

    The copies are large and repeated, so that a copy that is not waited for would show.
    """
    width, samples = (16, 24) if run.small else (2048, 4096)
    torch.manual_seed(0)
    layers = [(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU()) for _ in range(5)]
    model = nn.Sequential(*(each for layer in layers for each in layer)).to(run.device, torch.float64)
    x = torch.randn(samples, width, dtype=torch.float64)
    figures: Figures = {}
    expected: dict[str, torch.Tensor] = {}
    part = 8 * width * samples
    for budget in (None, 0, 0, 0, part, part, part):
        model.zero_grad()
        with virtual_batch(model, samples // 8, device=run.device, device_budget=budget) as batch:
            model(batch(x)).square().mean().backward()
        on_host = batch.report().kept_on_host
        assert bool(on_host) == (budget is not None), "premise: rows were stored on the host"
        found = tasks.gradients_of(model)
        expected = expected or found
        error = tasks.assert_exact(found, expected, 1e-12, f"device_budget={budget}")
        figures[f"device_budget={budget}"] = {"error": error, "bytes on the host": on_host}
    return figures
