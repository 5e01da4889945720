"""Windows in several modes, and an event at the n-th line of the library that they run."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import superbatch
from superbatch.noise.meter import NoiseMeter
from superbatch.torch import Accumulator, WholeBatch
from superbatch.torch.masters import MasterWeights, fp32_masters
from superbatch.torch.options import FrozenBatchNorm, GhostBatchNorm, PerSampleRandom
from tests.torch.helpers import mse, rows
from tests.torch.states import fingerprint

LIBRARY = str(Path(superbatch.__file__).parent)
BATCHES = rows(7, 3)


class Model(nn.Module):
    """BatchNorm, dropout, a counting buffer, and random numbers from Python and NumPy."""

    def __init__(self, *, norm: bool = True, draws: bool = True, counts: bool = True) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.drop = nn.Dropout(0.3 if draws else 0.0)
        self.register_buffer("seen", torch.zeros(()))
        self.draws, self.counts = draws, counts

    def forward(self, x: Tensor) -> Tensor:
        if self.draws:
            x = x * (1 + 0.1 * random.random()) * (1 + 0.1 * np.random.rand())
        if self.counts:
            self.seen += len(x)
        return self.head(self.drop(torch.tanh(self.norm(self.body(x)))))


def _adamw(parameters: Any) -> list[torch.optim.Optimizer]:
    """Return AdamW with two parameter groups."""
    body, *rest = parameters
    return [torch.optim.AdamW([{"params": [body], "lr": 0.1}, {"params": rest}], lr=0.01, foreach=False)]


def _momentum(parameters: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)]


def _two(parameters: Any) -> list[torch.optim.Optimizer]:
    first, *rest = parameters
    return [*_momentum([first]), *_adamw(rest)]


@dataclass(frozen=True)
class Mode:
    """Options of an `Accumulator` or a `WholeBatch`, and of the model that it trains."""

    options: dict[str, Any] = field(default_factory=dict)
    optimizers: Callable[[Any], list[torch.optim.Optimizer]] = _adamw
    norm: bool = True
    draws: bool = True
    counts: bool = True
    dtype: torch.dtype = torch.float64
    owned: bool = False
    masters: bool = False
    whole: bool = False


_POOLED = {"participants": [GhostBatchNorm()]}
MODES: dict[str, Mode] = {
    "adamw, two groups": Mode(_POOLED),
    "two optimizers": Mode({**_POOLED, "max_grad_norm": 0.1}, optimizers=_two),
    "momentum": Mode({**_POOLED, "gradient_sum": "momentum"}, optimizers=_momentum),
    "owned": Mode(_POOLED, owned=True),
    "frozen": Mode({"participants": [FrozenBatchNorm()]}),
    "skip_microbatch": Mode({**_POOLED, "nonfinite": "skip_microbatch"}),
    "sample_rng": Mode({"participants": [PerSampleRandom()]}, norm=False, draws=False),
    "checked": Mode({"check": True}, norm=False, draws=False, counts=False),
    "noise": Mode({"observers": lambda: [NoiseMeter(every=1)]}, norm=False),
    "buffers": Mode({"gradient_sum": torch.float32}, dtype=torch.bfloat16, norm=False),
    "masters": Mode(dtype=torch.bfloat16, norm=False, masters=True),
    "scaler": Mode(
        {**_POOLED, "scaler": lambda: torch.amp.GradScaler("cpu", init_scale=64.0)}, dtype=torch.float32
    ),
    "whole batch": Mode(draws=False, whole=True, optimizers=_momentum),
}


class Run:
    """Training in one mode, identical each time."""

    def __init__(self, name: str, *, draws: bool = True) -> None:
        mode = MODES[name] if draws else replace(MODES[name], draws=False)
        self.breaks: BaseException | None = None  # raised once, by the second loss of a window
        self._losses = 0
        self.reseed()
        self.model = Model(norm=mode.norm, draws=mode.draws, counts=mode.counts).to(mode.dtype)
        self.masters = fp32_masters(self.model) if mode.masters else None
        trained = list(self.model.parameters() if self.masters is None else self.masters.values())
        self.optimizers = mode.optimizers(trained)
        self.owned, self.whole, self.dtype = mode.owned, mode.whole, mode.dtype
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in self.optimizers]
        options = {"microbatch_size": 3, "scheduler": self.schedulers, **mode.options}
        for made in ("observers", "scaler"):
            if made in options:
                options[made] = options[made]()
        self.scaler = options.get("scaler")
        masters = self.masters
        stepped = self.optimizers if masters is None else [MasterWeights(o, masters) for o in self.optimizers]
        self.accumulate: Accumulator | WholeBatch
        if mode.whole:
            self.accumulate = WholeBatch(self.model, stepped, self.loss, **options)
        else:
            loss_fn = None if mode.owned else self.loss
            self.accumulate = Accumulator(self.model, stepped, loss_fn, **{"check": False, **options})

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a micro-batch, or of the whole batch."""
        loss = mse(self.model, batch)
        self._losses += 1
        if self.breaks is not None and (self._losses == 2 or self.whole):
            error, self.breaks = self.breaks, None
            raise error
        return loss

    def reseed(self) -> None:
        """Seed all random generators."""
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)

    def update(self, number: int) -> None:
        """Run the update of a batch."""
        self._losses = 0
        batch = tuple(each.to(self.dtype) for each in BATCHES[number])
        if not self.owned:
            self.accumulate(batch)
            return
        assert isinstance(self.accumulate, Accumulator)
        with self.accumulate.window(batch) as window:
            for microbatch in window:
                window.backward(self.loss(microbatch))

    def state(self) -> dict[str, Any]:
        """Return copies of all state, without memory addresses."""
        objects = [self.model, *self.optimizers, *self.schedulers, self.accumulate]
        if self.scaler is not None:
            objects.append(self.scaler)
        found = {key: value for key, value in fingerprint(*objects).items() if not key.endswith("identity")}
        for number, master in enumerate((self.masters or {}).values()):
            found[f"master {number}"] = master.detach()
        return {key: value.clone() if isinstance(value, Tensor) else value for key, value in found.items()}


def interrupt() -> None:
    """Send SIGINT, as Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


class AtLine:
    """Call a function at the n-th line of the library that runs inside the block.

    Attributes:
        lines: number of lines that ran.
        place: line of the call.
    """

    def __init__(self, number: int, happens: Callable[[], None] = interrupt) -> None:
        """Call `happens` at line `number`; with 0, only count the lines."""
        self.number, self.happens, self.lines, self.place = number, happens, 0, ""

    def __enter__(self) -> AtLine:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        return self._line if name.startswith(LIBRARY) and not name.endswith("interrupts.py") else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.number:
                self.place = (
                    f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
                )
                self.happens()
        return self._line
