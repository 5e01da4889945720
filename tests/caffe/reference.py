"""Transcription of Caffe's `Solver::Step` and `ApplyUpdate`: blob by blob, on sums.

It shares no code with superbatch, and tests compare it with trajectories that Caffe computed. It covers cases
without such trajectories: clipping, L1, ignored labels, micro-batches of several sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Param = dict[str, Any]
"""Fields of the solver by name, as numbers."""

DEFAULTS: Param = {
    "type": "SGD",
    "momentum": 0.0,
    "momentum2": 0.999,
    "rms_decay": 0.99,
    "delta": 1e-8,
    "weight_decay": 0.0,
    "regularization_type": "L2",
    "clip_gradients": -1.0,
    "iter_size": 1,
}


class Reference:
    """Solver for one net."""

    def __init__(self, model: nn.Module, lr_mult: Sequence[float], decay_mult: Sequence[float], **param: Any):
        self.blobs: list[Tensor] = list(model.parameters())
        self.lr_mult, self.decay_mult = lr_mult, decay_mult
        self.param = DEFAULTS | param
        self.history = [torch.zeros_like(blob) for blob in self.blobs]
        self.history2 = [torch.zeros_like(blob) for blob in self.blobs]
        self.iter = 0

    def step(self, losses: Sequence[Callable[[], Tensor]], rate: float) -> float:
        """Run one iteration (forward and backward of each micro-batch, ApplyUpdate); return the mean loss."""
        diffs = [torch.zeros_like(blob) for blob in self.blobs]
        total = 0.0
        for loss_fn in losses:
            loss = loss_fn()
            gradients = torch.autograd.grad(loss, self.blobs, allow_unused=True)
            for diff, gradient in zip(diffs, gradients, strict=True):
                if gradient is not None:
                    diff += gradient
            total += float(loss.detach())
        self.clip(diffs)
        with torch.no_grad():
            for index, diff in enumerate(diffs):
                self.normalize(diff)
                self.regularize(index, diff)
                self.blobs[index].sub_(self.value(index, diff, rate * self.lr_mult[index]))
        self.iter += 1
        return total / self.param["iter_size"]

    def clip(self, diffs: list[Tensor]) -> None:
        bound = self.param["clip_gradients"]
        norm = math.sqrt(sum(float((diff**2).sum()) for diff in diffs))
        if 0 <= bound < norm:
            for diff in diffs:
                diff *= bound / norm

    def normalize(self, diff: Tensor) -> None:
        diff *= 1.0 / self.param["iter_size"]

    def regularize(self, index: int, diff: Tensor) -> None:
        decay = self.param["weight_decay"] * self.decay_mult[index]
        data = self.blobs[index]
        diff += decay * (data if self.param["regularization_type"] == "L2" else data.sign())

    def value(self, index: int, g: Tensor, rate: float) -> Tensor:
        p, h, h2 = self.param, self.history, self.history2
        mu, delta = p["momentum"], p["delta"]
        if p["type"] == "SGD":
            h[index] = rate * g + mu * h[index]
            return h[index]
        if p["type"] == "Nesterov":
            before = h[index]
            h[index] = rate * g + mu * before
            return (1 + mu) * h[index] - mu * before
        if p["type"] == "AdaGrad":
            h[index] = g**2 + h[index]
            return rate * (g / (h[index] ** 0.5 + delta))
        if p["type"] == "RMSProp":
            h[index] = (1 - p["rms_decay"]) * g**2 + p["rms_decay"] * h[index]
            return rate * (g / (h[index] ** 0.5 + delta))
        if p["type"] == "AdaDelta":
            h[index] = (1 - mu) * g**2 + mu * h[index]
            update = g * ((delta + h2[index]) / (delta + h[index])) ** 0.5
            h2[index] = (1 - mu) * update**2 + mu * h2[index]
            return rate * update
        beta2, t = p["momentum2"], self.iter + 1
        h[index] = (1 - mu) * g + mu * h[index]
        h2[index] = (1 - beta2) * g * g + beta2 * h2[index]
        correction = math.sqrt(1 - beta2**t) / (1 - mu**t)
        return rate * correction * (h[index] / (h2[index] ** 0.5 + delta))
