"""Real out-of-memory errors, sizes that "auto" finds, and memory leaks."""

from __future__ import annotations

import copy
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from superbatch.errors import OutOfMemoryError
from superbatch.torch import Accumulator, WholeBatch, virtual_batch
from superbatch.torch.options import GhostBatchNorm
from tests.gpu import device as devices
from tests.gpu import tasks
from tests.gpu.check import Figures, Run, Skip

ROOT = Path(__file__).resolve().parents[2]


def _snapshot(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().cpu() for parameter in model.parameters()]


def _ballast(run: Run, left: int) -> Tensor:
    """Allocate all free memory of the device but `left` bytes."""
    if run.device.type != "cuda":
        return torch.empty(0)
    devices.release(run.device)
    free, _ = torch.cuda.mem_get_info(run.device)
    return torch.empty(max(0, free - left), dtype=torch.uint8, device=run.device)


def out_of_memory(run: Run) -> Figures:
    """With any of twelve amounts of free memory, a window gives the same update, or an error and no change.

    The failure occurs in the forward, the backward or the optimizer's first step.
    """
    model, batch, samples = tasks.wide(run.device, small=run.small)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.Adam(reference.parameters(), lr=1e-3)
    for start in range(0, samples, samples // 8):
        part = {name: x[start : start + samples // 8].to(run.device) for name, x in batch.items()}
        (tasks.wide_loss(reference, part) / 8).backward()
    optimizer.step()
    expected = _snapshot(reference)
    before = _snapshot(model)
    weights = sum(p.nbytes for p in model.parameters())
    del reference, optimizer
    figures: Figures = {}
    with devices.no_tf32():
        for step in range(12):
            left = int(weights * (0.4 + 0.9 * step))
            # Before the copy, which would take a part of the last ballast, so that it could not be freed.
            devices.release(run.device)
            mine = copy.deepcopy(model)
            ours = torch.optim.Adam(mine.parameters(), lr=1e-3)
            ballast = _ballast(run, left)
            try:
                update = Accumulator(
                    mine,
                    ours,
                    lambda part, mine=mine: tasks.wide_loss(mine, part),
                    microbatch_size=samples,
                    check=False,
                )(batch)
                outcome = f"{update.failures} failures, {update.microbatches} micro-batches"
            except (OutOfMemoryError, torch.OutOfMemoryError) as error:
                outcome = f"refused: {type(error).__name__}"
            del ballast
            for name, found, then, now in zip(
                dict(mine.named_parameters()), _snapshot(mine), before, expected, strict=True
            ):
                wanted = then if outcome.startswith("refused") else now
                # Adam's first step is lr x sign: rounding may change the sign for a gradient near 0.
                share = float(((found - wanted).abs() > 1e-4).float().mean())
                assert share < 1e-3, f"{outcome} with {left} bytes left, but {share:.1%} of {name} differ"
            figures[f"{left >> 20} MiB left"] = outcome
            del mine, ours
    if run.device.type == "cuda":
        assert any("refused" in text for text in figures.values()), f"premise: too little at first: {figures}"
        assert any(not text.startswith(("0", "refused")) for text in figures.values()), (
            f"premise: some window ran out of memory and was finished: {figures}"
        )
    return figures


def out_of_memory_virtual(run: Run) -> Figures:
    """A virtual batch that runs out of memory leaves no gradient or the exact one."""
    model, batch, samples = tasks.wide(run.device, small=run.small)
    expected: dict[str, Tensor] = {}
    figures: Figures = {}
    with devices.no_tf32():
        for left in (1 << 40, 1 << 31, 1 << 29, 1 << 27):
            model.zero_grad()
            ballast = _ballast(run, left) if expected else torch.empty(0)
            try:
                with virtual_batch(model, samples // 8, device=run.device) as virtual:
                    tasks.wide_loss(model, virtual(batch)).backward()
                found = tasks.gradients_of(model)
                expected = expected or found
                figures[f"{left >> 20} MiB left"] = tasks.assert_exact(found, expected, 1e-5, left)
            except (OutOfMemoryError, torch.OutOfMemoryError) as error:
                assert all(p.grad is None for p in model.parameters()), "a failed block left gradients"
                figures[f"{left >> 20} MiB left"] = f"refused: {type(error).__name__}"
            finally:
                del ballast
    return figures


def expandable_segments(run: Run) -> Figures:
    """Repeat `out_of_memory` in a process whose allocator has expandable segments."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-m", "tests.gpu", "--here", "out_of_memory", "--device", str(run.device)]
    done = subprocess.run(
        [*command, *(["--small"] if run.small else [])],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {"output": done.stdout.strip()[-1000:]}


def found_sizes(run: Run) -> Figures:
    """`"largest"` and `"auto"` find a size in a few per cent of the memory; report failed trials."""
    model, batch, _ = tasks.wide(run.device, small=run.small)
    figures: Figures = {}
    fraction = 0.03 if not run.small else 0.1
    for mode in ("largest", "auto"):
        with devices.fraction_of_memory(run.device, fraction) as allowed:
            retries = devices.statistic(run.device, "num_alloc_retries")
            devices.reset_peak(run.device)
            mine = copy.deepcopy(model)
            optimizer = torch.optim.SGD(mine.parameters(), lr=1e-3)
            accumulate = Accumulator(
                mine, optimizer, lambda part, mine=mine: tasks.wide_loss(mine, part), microbatch_size=mode
            )
            updates = [accumulate(batch) for _ in range(4)]
            assert all(update.made for update in updates)
            report = accumulate.memory
            figures[mode] = {
                "allowed": allowed,
                "micro-batches": [update.microbatches for update in updates],
                "failures": [update.failures for update in updates],
                "allocator retries": devices.statistic(run.device, "num_alloc_retries") - retries,
                "reserved peak": devices.statistic(run.device, "reserved_bytes.all.peak"),
                "size": None if report is None else report.chosen,
            }
            del accumulate, mine, optimizer
    return figures


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def leaks(run: Run) -> Figures:
    """Live bytes after 20 updates equal those after 5, for plain windows and virtual batches."""
    figures: Figures = {}
    kinds = {"plain": partial(Accumulator, participants=[GhostBatchNorm()]), "whole batch": WholeBatch}
    for name, kind in kinds.items():
        task = tasks.batchnorm(run.device, torch.float32)
        model = copy.deepcopy(task.model)
        optimizer = torch.optim.Adam(model.parameters())
        accumulate = kind(model, optimizer, partial(task.loss, model), microbatch_size=4)
        marks = []
        for count in (5, 15):
            for _ in range(count):
                accumulate(task.batch)
            marks.append((devices.allocated(run.device), _resident()))
        (live, host), (live_later, host_later) = marks
        assert live_later <= live, f"{name}: {live_later - live} bytes more on the device after 15 updates"
        assert host_later - host < 64 << 20, f"{name}: {host_later - host} bytes more in the process"
        figures[name] = {"device": live, "host growth": host_later - host, "pinned": _pinned()}
    return figures


def _pinned() -> dict[str, int]:
    read = getattr(torch.cuda, "host_memory_stats", None)  # torch >= 2.7
    if read is None or not torch.cuda.is_available():
        return {}
    return {name: int(value) for name, value in read().items() if name.endswith("bytes.current")}


def many_devices(run: Run) -> Figures:
    """A window with models on two devices makes an update."""
    if run.device.type == "cuda" and torch.cuda.device_count() < 2:
        raise Skip("one GPU is visible")
    others = [torch.device("cuda", 1)] if run.device.type == "cuda" else [run.device]
    first, second = nn.Linear(6, 8).to(run.device), nn.Linear(8, 2).to(others[0])

    def loss_fn(x: Tensor) -> Tensor:
        return nn.functional.dropout(second(first(x).to(others[0])), 0.5).square().mean()

    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    update = Accumulator([first, second], optimizer, loss_fn, microbatch_size=3, check=False)(
        torch.randn(8, 6)
    )
    assert update.made
    return {"devices": [str(run.device), str(others[0])]}
