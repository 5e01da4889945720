"""Test case of coupled samples: a model, a batch, and the loss that a user would write for the real batch."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Model with a loss, whose gradient on the real batch is known from plain PyTorch.

    Attributes:
        name: unique; also seeds the model.
        build: returns the model as a user builds it, in its mode of training. Tests call `make`.
        data: returns a batch of n samples, the same at every call: nested tensors with n samples first. Tests
            call `batch`.
        loss: unchanged user code for the whole batch; returns a scalar. It may call `backward` itself before.
        coupled: plain accumulation (the mean over micro-batches, weighted by their samples) gives a wrong
            gradient. A loss that is a sum over samples is not a mean, and counts as coupled.
        random: the model or the loss draws random numbers.
        buffers: the forward changes buffers.
        without_gradient: names of the parameters without a gradient.
        n: number of samples, not a multiple of `microbatch`.
        microbatch: number of samples of a micro-batch.
        min_n: least number of samples that plain PyTorch can run.
        wrap: "inputs" keeps the labels (`batch["y"]`) plain tensors, "all" wraps every tensor.
        tolerance: largest relative error of a gradient; above 1e-12 if the gradient is ill-conditioned.
        note: source of the case, or its difficulty.
    """

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[int], Any]
    loss: Loss
    coupled: bool
    random: bool = False
    buffers: bool = False
    without_gradient: tuple[str, ...] = ()
    n: int = 14
    microbatch: int = 4
    min_n: int = 2
    wrap: Literal["all", "inputs"] = "all"
    tolerance: float = 1e-12
    note: str = ""

    def __str__(self) -> str:
        return self.name

    def make(self) -> nn.Module:
        """Build the model in float64, the same at every call.

        All parameters are moved away from ones and zeros, which would hide a wrong factor.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(self.name.encode()))
            model = self.build().double()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model

    def batch(self, n: int | None = None) -> Any:
        """Return the batch of n samples (default: `self.n`)."""
        n = self.n if n is None else n
        assert n >= self.min_n, f"{self.name} needs {self.min_n} samples"
        return self.data(n)


class Apply(nn.Module):
    """Module made from a function: `forward(*inputs)` is `function(module, *inputs)`."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def between(function: Callable[..., Any], **parts: Any) -> Callable[[], nn.Module]:
    """Build Linear(6, 8) -> `function(module, hidden)` of 8 features -> Linear(8, 3), for `data.rows`."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.last(function(net, net.first(x)))

    def build() -> nn.Module:
        made = {name: part() for name, part in parts.items()}
        return Apply(forward, first=nn.Linear(6, 8), last=nn.Linear(8, 3), **made)

    return build
