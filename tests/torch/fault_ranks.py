"""Two gloo ranks; one fails once in a phase of a window: `python -m ... RANK FOLDER BAD [CELL ...]`.

Both ranks catch every error and continue with the next batch, as a loop with ``try`` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from superbatch.errors import SuperbatchError
from superbatch.torch import Accumulator
from tests.torch.sharded_training import full, fully, join, leave, run

FAILS_AT = 1  # the second of four batches
BATCHES = 4
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate"  # text of torch's allocator


class FaultError(Exception):
    """Error of the failing rank."""


class Fault:
    """Raises once in a phase of one batch's window; an out-of-memory error repeats."""

    def __init__(self, phase: str, *, here: bool) -> None:
        self.phase, self.batch, self.armed, self.fired = phase, -1, here, False

    def at(self, phase: str) -> None:
        """Raise if `phase` is the phase that fails."""
        if not self.armed or self.phase != phase or self.batch != FAILS_AT:
            return
        self.fired = True
        if phase == "memory":
            raise torch.OutOfMemoryError("no memory")
        self.armed = False
        if phase in ("interrupt", "interrupted clip"):
            raise KeyboardInterrupt
        raise FaultError(f"no {phase}")


class Fragile(torch.autograd.Function):
    """Identity whose backward may fail."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        """Return the input."""
        ctx.fault = fault
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient, or fail."""
        ctx.fault.at("backward")
        return gradients[0], None


class FragileSGD(torch.optim.SGD):
    """SGD whose step may fail before it writes anything."""

    fault: Fault

    def step(self, closure: Any = None) -> Any:
        self.fault.at("step")
        return super().step(closure)


class FailingReduction(TorchDispatchMode):
    """Runs out of memory for the flat buffer of an all-reduce."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.cat.default:
            try:
                self._fault.at("reduction")
            except FaultError:
                raise RuntimeError(NO_MEMORY) from None
        return func(*args, **(kwargs or {}))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def rows(rank: int, batch: int) -> Tensor:
    """Return the samples of a rank."""
    generator = torch.Generator().manual_seed(10 * batch + rank)
    return torch.randn(5 + 2 * rank, 4, generator=generator, dtype=torch.float64)


def batch_of(fault: Fault, rank: int) -> Any:
    """Return the batch of a rank; a fault makes its lengths unequal, or the batch empty."""
    try:
        fault.at("split")
    except FaultError:
        return rows(rank, fault.batch), torch.zeros(3)
    try:
        fault.at("rows")
    except FaultError:
        return rows(rank, fault.batch)[:0]
    return rows(rank, fault.batch)


def error_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return a mean over samples."""
    return (model(x) - x[:, :3].cos()).square().mean()


def weight_of(fault: Fault, x: Tensor) -> int:
    """Return the number of samples, or fail."""
    fault.at("weight")
    return len(x)


def owned(accumulate: Accumulator, loss_fn: Callable[[Tensor], Tensor], fault: Fault, batch: Any) -> str:
    """Make an update in a user-defined loop, which may be left at its second micro-batch."""
    with accumulate.window(batch) as window:
        for index, microbatch in enumerate(window):
            if index == 1:
                fault.at("block")
                try:
                    fault.at("break")
                except FaultError:
                    break
            window.backward(loss_fn(microbatch))
    return "made" if window.update.made else f"skipped: {window.update.skipped}"


def wrapped(how: str) -> Any:
    """Return the model, wrapped for its ranks."""
    if how == "DDP":
        return DistributedDataParallel(net())
    return fully(net(), init_device_mesh("cpu", (2,))) if how == "FSDP2" else net()


def optimizer_of(model: nn.Module, fault: Fault) -> torch.optim.Optimizer:
    """Return an optimizer whose step or hook may fail."""
    # torch's own SGD can be restored after a failure; the state of a subclass cannot be known.
    kind = FragileSGD if fault.phase == "step" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    if isinstance(optimizer, FragileSGD):
        optimizer.fault = fault
    if fault.phase == "hook" or (fault.phase == "own hook" and fault.armed):
        optimizer.register_step_pre_hook(lambda *_: fault.at(fault.phase))
    return optimizer


def train_with_fault(rank: int, bad: int, how: str, phase: str) -> dict[str, Any]:
    """Train on four batches; return each outcome, and the parameters after each."""
    fault = Fault(phase, here=rank == bad)
    model = wrapped(how)
    optimizer = optimizer_of(model, fault)

    def loss_fn(x: Tensor) -> Tensor:
        for one in ("forward", "interrupt"):
            fault.at(one)
        loss = error_of(model, x)
        fault.at("memory")  # after the forward, for which the other rank waits
        return Fragile.apply(loss, fault)

    def clip(gradients: Any) -> None:
        for one in ("clip", "interrupted clip"):
            fault.at(one)

    def factor(updates: int) -> float:
        fault.at("scheduler")
        return 1.0

    accumulate = Accumulator(
        model,
        optimizer,
        loss_fn,
        microbatch_size=2,
        weight=partial(weight_of, fault),
        clip=clip if "clip" in phase else None,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, factor) if phase == "scheduler" else None,
        check=False,
        sync="all_reduce" if how == "all_reduce" else "auto",
    )
    outcomes: list[str] = []
    gradients = 0
    states: list[dict[str, Tensor]] = []
    for fault.batch in range(BATCHES):
        try:
            if phase in ("block", "break"):
                outcomes.append(owned(accumulate, loss_fn, fault, batch_of(fault, rank)))
            else:
                with FailingReduction(fault) if phase == "reduction" else nullcontext():
                    accumulate(batch_of(fault, rank))
                outcomes.append("made")
        except (FaultError, SuperbatchError, KeyboardInterrupt) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
        gradients += sum(parameter.grad is not None for parameter in model.parameters())
        states.append({name.removeprefix("module."): full(p) for name, p in model.named_parameters()})
    return {"outcomes": outcomes, "states": states, "fired": fault.fired, "gradients": gradients}


HOW = ("DDP", "all_reduce", "FSDP2")
REPLICATED = ("DDP", "all_reduce")
PHASES = (
    *("split", "rows", "weight", "forward", "interrupt", "memory", "backward", "block", "break"),
    *("clip", "interrupted clip", "hook", "own hook", "step", "scheduler"),
)


def cells(rank: int, bad: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return all cells by name."""
    cells = [(how, phase) for how in HOW for phase in PHASES] + [(how, "reduction") for how in REPLICATED]
    return {f"{how}, {phase}": partial(train_with_fault, rank, bad, how, phase) for how, phase in cells}


def main(rank: int, folder: Path, bad: int, chosen: list[str]) -> None:
    """Run the cells, and write the results into the folder."""
    join(rank, folder, 2)
    leave(run(cells(rank, bad), chosen), rank, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
