"""Compiled models, replayed graphs, and gradient scaling with fused optimizers."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.torch import Accumulator, virtual_batch
from tests.gpu import tasks
from tests.gpu.check import Figures, Run, Skip


def _train(task: tasks.Task, model: Any, run: Run, updates: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    accumulate = Accumulator(
        model, optimizer, lambda part: task.loss(model, part), microbatch_size=7, weight=None
    )
    return [accumulate(task.batch).loss for _ in range(updates)]


def compiled(run: Run) -> Figures:
    """`torch.compile` with CUDA graphs, whose losses share one storage, gives the losses of eager mode."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        raise Skip("torch.compile needs a C compiler")
    task = tasks.mlp(run.device, torch.float32)
    eager = _train(task, copy.deepcopy(task.model), run)
    figures: Figures = {}
    for mode in ("default",) if run.small else ("default", "reduce-overhead"):
        torch.compiler.reset()
        losses = _train(task, torch.compile(copy.deepcopy(task.model), mode=mode), run)
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, eager, strict=True))
        assert worst < 1e-4, f"{mode}: losses {losses} for {eager}"
        figures[mode] = worst
    return figures


def graphed_callables(run: Run) -> Figures:
    """`torch.cuda.make_graphed_callables`, with outputs in the graph's memory, gives eager losses."""
    task = tasks.mlp(run.device, torch.float32)
    eager = _train(task, copy.deepcopy(task.model), run)
    model = copy.deepcopy(task.model)
    if run.device.type == "cuda":
        sample = torch.randn(7, 12, device=run.device)
        model = torch.cuda.make_graphed_callables(model, (sample,))
    losses = _train(task, model, run)
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, eager, strict=True))
    assert worst < 1e-4, f"losses {losses} for {eager}"
    return {"largest difference": worst}


def scaled_half(run: Run) -> Figures:
    """With float16 autocast, a GradScaler and fused Adam, an overflow skips one update."""
    task = tasks.mlp(run.device, torch.float32)
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(run.device.type, init_scale=2.0**40)

    def loss_fn(part: tasks.Batch) -> Tensor:
        dtype = torch.float16 if run.device.type == "cuda" else torch.bfloat16
        with torch.autocast(run.device.type, dtype):
            return task.loss(model, part)

    accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size=7, scaler=scaler, max_grad_norm=1.0)
    scales, made = [], []
    for _ in range(40):
        update = accumulate(task.batch)
        scales.append(scaler.get_scale())
        made.append(update.made)
    if run.device.type == "cuda":
        assert not made[0], "premise: the first scale overflows in float16"
    assert made[-1], "the scale came down"
    assert accumulate.updates == sum(made)
    return {"skipped": made.count(False), "final scale": scales[-1]}


def compiled_virtual(run: Run) -> Figures:
    """`virtual_batch(compile=True)` compiles the recorded program for the device."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        raise Skip("torch.compile needs a C compiler")
    if run.small:
        raise Skip("compiling takes minutes on a CPU; tests/torch/test_virtual_compile.py does it there")
    task = tasks.batchnorm(run.device, torch.float32)
    expected = tasks.large_batch(task, run.device)
    model: nn.Module = copy.deepcopy(task.model)
    with virtual_batch(model, 4, device=run.device, compile=True) as batch:
        task.loss(model, batch(task.batch)).backward()
    return {"error": tasks.assert_exact(tasks.gradients_of(model), expected, 1e-3, "compiled")}
