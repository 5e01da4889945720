"""What a case consists of: a model, a batch, and the loss that a user would write for the real batch."""

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
    """A model with a loss, whose gradient for the real batch is known from plain PyTorch.

    Attributes:
        name: unique; also the seed of the model.
        build: the model as a user makes it, in the mode that it is trained in. Tests call `make`.
        data: a batch of n samples, the same at every call: nested tensors, all with n samples first. Tests
            call `batch`.
        loss: unchanged user code for the whole batch; a scalar. It may call `backward` itself before.
        coupled: plain accumulation (the mean over micro-batches, weighted by their samples) gives a wrong
            gradient. A loss that is a sum is no such mean, and counts as coupled.
        random: the model or the loss draws numbers.
        buffers: the forward changes buffers.
        parameters_still: names of the parameters that get no gradient.
        n: the number of samples, no multiple of `microbatch`.
        microbatch: samples of a micro-batch.
        min_n: the fewest samples that plain PyTorch can run.
        wrap: "inputs" when the labels (`batch["y"]`) are left plain tensors, "all" when nothing is.
        tolerance: largest relative error of a gradient, where its condition asks for more than 1e-12.
        may_refuse: a clear error is as good as the gradient: torch's own subclasses of tensors fail here.
        note: where the case comes from, or what it is hard for.
    """

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[int], Any]
    loss: Loss
    coupled: bool
    random: bool = False
    buffers: bool = False
    parameters_still: tuple[str, ...] = ()
    n: int = 14
    microbatch: int = 4
    min_n: int = 2
    wrap: Literal["all", "inputs"] = "all"
    tolerance: float = 1e-12
    may_refuse: bool = False
    note: str = ""

    def __str__(self) -> str:
        return self.name

    def make(self) -> nn.Module:
        """Build the model in float64, the same at every call.

        All parameters are moved away from ones and zeros, with which a wrong factor would not show.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(self.name.encode()))
            model = self.build().double()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model

    def batch(self, n: int | None = None) -> Any:
        """Return the batch of n samples (`self.n` of them by default)."""
        n = self.n if n is None else n
        assert n >= self.min_n, f"{self.name} needs {self.min_n} samples"
        return self.data(n)


class Apply(nn.Module):
    """A module made of a function: `forward(*inputs)` is `function(module, *inputs)`."""

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
