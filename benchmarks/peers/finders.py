"""One file per finder of a micro-batch size, the table of their names, and the counts of each.

Every file has ``find(work, watch, variant) -> Found``: the documented search of its library, followed by some
updates with the found size in the same process. `Watch` counts trials by hooks on the model.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .task import Batch
from .work import loss_of

UPDATES = 3
"""Updates that must go through with a size before it counts as one that fits."""


@dataclass(frozen=True)
class Finder:
    """A row of the table."""

    name: str
    title: str
    module: str
    package: str | None
    variant: str | None = None
    loop: str = "plain"  # corresponding hand-written loop (see under_limit.py)


FINDERS = {
    finder.name: finder
    for finder in (
        Finder("accelerate", "Accelerate find_executable_batch_size", "finder_accelerate", "accelerate"),
        Finder("lightning-power", "Lightning, power", "finder_lightning", "lightning", "power"),
        Finder("lightning-binsearch", "Lightning, binsearch", "finder_lightning", "lightning", "binsearch"),
        Finder("composer", "Composer, auto", "finder_composer", "mosaicml", None, "accumulate"),
        Finder("ours-largest", 'superbatch, "largest"', "finder_ours", None, "largest", "accumulate"),
        Finder("ours-auto", 'superbatch, "auto"', "finder_ours", None, "auto", "accumulate"),
    )
}
"""By name, in the order of the table."""


@dataclass(frozen=True)
class Found:
    """Result of a search.

    Attributes:
        chosen: samples of the chosen micro-batch; 0 if none was found.
        trains: True if the updates after the search succeeded with it.
        kept: samples whose gradients went into kept updates.
        seconds: CPU time without a kept update.
        rate: CPU seconds per sample of a window after the search; 0 if not measured.
        note: explanation of the result, if needed.
    """

    chosen: int
    trains: bool
    kept: int
    seconds: float
    note: str = ""
    rate: float = 0.0


@dataclass
class Watch:
    """Counts of the forwards of a model, by result.

    Attributes:
        forwards: samples of every real forward that began, in order.
        ends: end of each forward. "done": its backward has added to the gradient of the first parameter.
            "loss", "looked": nothing was added; only the loss or its gradient was computed. "forward",
            "backward", "adding": it failed there.
        predicted: forwards of fake tensors, which compute nothing.
        windows: `forwards`, one list for each call of `window`.
    """

    forwards: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    predicted: int = 0
    windows: list[list[int]] = field(default_factory=list)

    def see(self, model: nn.Module) -> None:
        """Register hooks on every forward and backward of a model."""
        parameters = list(model.parameters())
        model.register_forward_pre_hook(self._begins)
        # Not `register_hook` on a parameter: superbatch handles parameters with such hooks differently.
        parameters[-1].register_post_accumulate_grad_hook(lambda p: self._comes_to("adding", p.grad))
        parameters[0].register_post_accumulate_grad_hook(lambda p: self._comes_to("done", p.grad))
        first = next(m for m in model.modules() if next(m.parameters(recurse=False), None) is not None)
        first.register_forward_hook(self._looks_back)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the loss of a micro-batch; every finder calls this function."""
        loss = loss_of(outputs, batch)
        self._comes_to("loss", loss)
        if loss.requires_grad and not _is_fake(loss):
            loss.register_hook(lambda gradient: self._comes_to("backward", gradient))
        return loss

    def _begins(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if _is_fake(inputs[0]):
            self.predicted += 1
            return
        self.forwards.append(len(inputs[0]))
        self.ends.append("forward")

    def _looks_back(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad and not _is_fake(output):
            output.register_hook(lambda gradient: self._comes_to("looked", gradient))

    def _comes_to(self, place: str, tensor: Tensor | None) -> None:
        if not self.ends or tensor is None or _is_fake(tensor):
            return
        if place != "looked" or self.ends[-1] == "backward":  # a real backward has begun to add by then
            self.ends[-1] = place

    def window(self) -> None:
        """Record the end of a window."""
        self.windows.append(self.forwards[sum(map(len, self.windows)) :])

    def counts(self) -> dict[str, object]:
        """Return the counts."""
        return {
            "forwards": self.forwards,
            "failed": sum(end in ("forward", "backward", "adding") for end in self.ends),
            "looked": sum(
                samples
                for samples, end in zip(self.forwards, self.ends, strict=True)
                if end in ("loss", "looked")
            ),
            "predicted": self.predicted,
            "windows": self.windows,
        }


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


class Stopwatch:
    """Clock of the CPU time of this process since its construction."""

    def __init__(self) -> None:
        self._start = time.process_time()

    def seconds(self) -> float:
        return time.process_time() - self._start


def endless(loader: Any) -> Iterator[Any]:
    """Repeat a loader without end."""
    while True:
        yield from loader
