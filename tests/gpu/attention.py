"""Layers with special GPU kernels: attention backends, recurrent layers, RMSNorm."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from superbatch.torch import virtual_batch
from tests.gpu import tasks
from tests.gpu.check import Figures, Run


class Attention(nn.Module):
    """Attention with one head per 16 features and the default dropout of GPT-2 and BERT."""

    def __init__(self, dropout: float, causal: bool) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(32, 96), nn.Linear(32, 4)
        self.dropout, self.causal = dropout, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 16)).movedim(2, 0).transpose(-3, -2)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=self.causal)
        return self.out(mixed.transpose(-3, -2).flatten(-2)).mean(1)


def _coupled(model: nn.Module, x: Tensor) -> Tensor:
    """Loss over statistics of the batch, so that the backward depends on every sample."""
    z = model(x)
    return ((z - z.mean(0)) / (z.std(0) + 0.1)).pow(3).mean() + z.square().mean()


def _compare(model: nn.Module, x: Tensor, run: Run, *, draws: bool) -> float:
    """Return the error of a virtual batch in micro-batches of three, against the large batch."""
    ours = copy.deepcopy(model)
    torch.manual_seed(5)
    _coupled(model, x.to(run.device)).backward()
    expected = tasks.gradients_of(model)
    torch.manual_seed(5)
    with virtual_batch(ours, 3, device=run.device, rng="batch" if draws else "microbatch") as batch:
        _coupled(ours, batch(x)).backward()
    return tasks.error(tasks.gradients_of(ours), expected)


def attention_backends(run: Run) -> Figures:
    """Each forced attention backend is exact: causal or not, with and without dropout, in its dtypes."""
    figures: Figures = {}
    for backend in (
        SDPBackend.MATH,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ):
        half = backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
        dtype = (torch.bfloat16 if half else torch.float32) if run.device.type == "cuda" else torch.float64
        for dropout in (0.0, 0.2):
            for causal in (False, True):
                torch.manual_seed(0)
                model = Attention(dropout, causal).to(run.device, dtype)
                x = torch.randn(10, 16, 32, dtype=dtype)
                name = f"{backend.name}, dropout {dropout}, {'causal' if causal else 'full'}, {dtype}"
                try:
                    with sdpa_kernel(backend):
                        model(x[:3].to(run.device)).sum().backward()
                except RuntimeError as error:
                    figures[name] = f"not on this device: {str(error).splitlines()[0][:80]}"
                    continue
                model.zero_grad()
                with sdpa_kernel(backend):
                    figures[name] = _compare(model, x, run, draws=dropout > 0)
    limits = {"float64": 1e-12, "float32": 1e-3, "bfloat16": 0.1}
    wrong = {
        name: value
        for name, value in figures.items()
        if isinstance(value, float) and not value <= limits[name.rsplit(".", 1)[-1]]
    }
    assert not wrong, wrong
    assert any(isinstance(value, float) for value in figures.values()), "premise: one backend ran"
    return figures


class Last(nn.Module):
    """A recurrent layer; return only its outputs for all positions."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x)[0]).mean(1)


def layers(run: Run) -> Figures:
    """Recurrent layers (cuDNN), RMSNorm, LayerNorm, GroupNorm and an embedding are exact in float64."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "LSTM": lambda: Last(nn.LSTM(6, 8, batch_first=True)),
        "GRU": lambda: Last(nn.GRU(6, 8, batch_first=True)),
        "RNN": lambda: Last(nn.RNN(6, 8, batch_first=True)),
        "RMSNorm": lambda: nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.Flatten(), nn.Linear(40, 4)),
        "LayerNorm": lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Flatten(), nn.Linear(40, 4)),
        "GroupNorm": lambda: nn.Sequential(
            nn.Conv1d(5, 8, 1), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(48, 4)
        ),
    }
    figures: Figures = {}
    for name, make in makers.items():
        torch.manual_seed(0)
        model = make().to(run.device, torch.float64)
        figures[name] = _compare(model, torch.randn(10, 5, 6, dtype=torch.float64), run, draws=False)
    wrong = {name: value for name, value in figures.items() if not value <= 1e-11}
    assert not wrong, wrong
    return figures
