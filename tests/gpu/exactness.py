"""Gradients on the device against those of the large batch on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.torch import Accumulator, virtual_batch
from superbatch.torch.gradcache.cached import cached_gradients
from superbatch.torch.options import GhostBatchNorm
from tests.gpu import device as devices
from tests.gpu import tasks
from tests.gpu.check import Figures, Run


def _rounding(make: Callable[..., tasks.Task], run: Run, dtype: torch.dtype) -> float:
    """Return the allowed relative error: in float32 four times that of the large batch itself."""
    if dtype == torch.float64:
        return 1e-12
    task, exact = make(run.device, dtype), make(run.device, torch.float64)
    exact.model.load_state_dict(task.model.state_dict())
    exact.batch.update({name: x.double() for name, x in task.batch.items() if x.is_floating_point()})
    return 4 * tasks.error(tasks.large_batch(task, run.device), tasks.large_batch(exact, run.device)) + 1e-6


def plain_window(run: Run) -> Figures:
    """A window is exact in float64 for three models and four sizes, with tails and token weights."""
    figures: Figures = {}
    for make in tasks.SEPARABLE:
        task = make(run.device)
        expected = tasks.large_batch(task, run.device)
        for size in (1, 4, 8, 21):
            found, update = tasks.accumulated(task, run.device, size)
            assert update.microbatches == -(-21 // size)
            figures[f"{task.name}, m={size}"] = tasks.assert_exact(found, expected, 1e-12, task.name)
    return figures


def every_precision(run: Run) -> Figures:
    """Windows and `"auto"` are within bounds in float32 without TF32 and in bfloat16 autocast.

    The bound of autocast is twice the difference between the large batch in bfloat16 and in float32.
    """
    figures: Figures = {}
    with devices.no_tf32():
        for make in tasks.SEPARABLE:
            task = make(run.device, torch.float32)
            expected = tasks.large_batch(task, run.device)
            tolerance = _rounding(make, run, torch.float32)
            sizes: tuple[Any, ...] = (4,) if run.small else (1, 4, "auto", "largest")
            for size in sizes:
                found, _ = tasks.accumulated(task, run.device, size)
                figures[f"{task.name}, float32, m={size}"] = tasks.assert_exact(
                    found, expected, tolerance, size
                )
            rounded = tasks.large_batch(task, run.device, autocast=torch.bfloat16)
            noise = tasks.error(rounded, expected)
            found, _ = tasks.accumulated(task, run.device, 4, autocast=torch.bfloat16)
            figures[f"{task.name}, bfloat16 autocast"] = tasks.assert_exact(found, rounded, 2 * noise, "bf16")
    return figures


def virtual_batchnorm(run: Run) -> Figures:
    """`virtual_batch` is exact through a conv net with BatchNorm, in float64 and float32."""
    figures: Figures = {}
    with devices.no_tf32():
        for dtype in (torch.float64, torch.float32):
            tolerance = _rounding(tasks.batchnorm, run, dtype)
            task = tasks.batchnorm(run.device, dtype)
            expected = tasks.large_batch(task, run.device)
            plain, _ = tasks.accumulated(task, run.device, 4, participants=[GhostBatchNorm()])
            assert tasks.error(plain, expected) > 1e-3, "premise: plain accumulation gives another gradient"
            for size in (1, 4, 8):
                model = copy.deepcopy(task.model)
                with virtual_batch(model, size, device=run.device) as batch:
                    task.loss(model, batch(task.batch)).backward()
                found = tasks.gradients_of(model)
                figures[f"{dtype}, m={size}"] = tasks.assert_exact(found, expected, tolerance, (dtype, size))
                running = task_buffers(task.model, task, run.device)
                for name, buffer in model.named_buffers():
                    assert torch.allclose(buffer.double(), running[name].double(), rtol=1e-5), name
    return figures


def task_buffers(model: nn.Module, task: tasks.Task, device: torch.device) -> dict[str, Tensor]:
    """Return the buffers after one forward of the whole batch."""
    model = copy.deepcopy(model)
    task.loss(model, tasks.on(device, task.batch))
    return dict(model.named_buffers())


def whole_batch(run: Run) -> Figures:
    """`WholeBatch` with a fixed size and `"auto"` is exact over several updates of Adam in float64."""
    figures: Figures = {}
    sizes: tuple[Any, ...] = (5,) if run.small else (1, 5, "auto")
    for size in sizes:
        task = tasks.batchnorm(run.device)
        expected = tasks.large_batch(task, run.device)
        found, _ = tasks.accumulated(task, run.device, size, whole=True)
        figures[f"m={size}"] = tasks.assert_exact(found, expected, 1e-12, size)
    return figures


def cached(run: Run) -> Figures:
    """`cached_gradients` of a contrastive loss repeats the device's dropout in the second pass."""
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 8))
    tower = tower.to(run.device, torch.float64)
    batch = {"a": torch.randn(20, 12, dtype=torch.float64), "b": torch.randn(20, 12, dtype=torch.float64)}

    def contrast(z: dict[str, Tensor]) -> Tensor:
        logits = F.normalize(z["a"]) @ F.normalize(z["b"]).T / 0.1
        return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))

    def encode(part: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tower(x) for name, x in part.items()}

    torch.manual_seed(1)
    cached_gradients(encode, contrast, batch, 4, models=tower)
    found = tasks.gradients_of(tower)
    tower.zero_grad()
    torch.manual_seed(1)
    parts = [{name: x[i : i + 4].to(run.device) for name, x in batch.items()} for i in range(0, 20, 4)]
    rows = [encode(part) for part in parts]  # same random numbers, in the order of the micro-batches
    contrast({name: torch.cat([row[name] for row in rows]) for name in ("a", "b")}).backward()
    return {"error": tasks.assert_exact(found, tasks.gradients_of(tower), 1e-12, "cached")}


def mixed_devices(run: Run) -> Figures:
    """A window with one model on the CPU and one on the device is exact."""
    torch.manual_seed(0)
    first, second = nn.Linear(6, 8).double(), nn.Linear(8, 3).to(run.device, torch.float64)
    x, y = torch.randn(10, 6).double(), torch.randn(10, 3).double()

    def loss_fn(part: tuple[Tensor, Tensor]) -> Tensor:
        hidden = first(part[0].cpu()).tanh().to(run.device)
        return F.mse_loss(second(hidden), part[1].to(run.device))

    def grads() -> list[Tensor]:
        return [p.grad.detach().cpu() for m in (first, second) for p in m.parameters() if p.grad is not None]

    loss_fn((x, y)).backward()
    expected = grads()
    for parameter in (*first.parameters(), *second.parameters()):
        parameter.grad = None
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    found: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: found.extend(grads()))
    Accumulator([first, second], optimizer, loss_fn, microbatch_size=3, device=None)((x, y))
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
    assert worst < 1e-12, worst
    return {"error": worst}
