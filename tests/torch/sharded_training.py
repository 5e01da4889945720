"""Trainings of sharded models on each rank, and the results that the tests read."""

from __future__ import annotations

import copy
import datetime
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from superbatch.torch import Accumulator, Gradient, Window
from superbatch.torch.window.sync.fsdp2 import FSDP2
from tests.torch.helpers import mse
from tests.torch.sharded_tasks import Task
from tests.torch.two_ranks import end_rank

Found = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Sharding of a model, and the data of this rank.

    Attributes:
        shard: shards a model.
        rank: index among the ranks with data of their own.
    """

    shard: Callable[[nn.Module], nn.Module]
    rank: int


def fully(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Apply `fully_shard` to each module with submodules, then to the model."""
    inner = dict(options)
    if "mp_policy" in options:  # only the outputs of the model get this dtype
        inner["mp_policy"] = replace(options["mp_policy"], output_dtype=None)
    for module in list(model.modules())[:0:-1]:
        if list(module.children()) and not isinstance(module, nn.ModuleList):
            fully_shard(module, mesh=mesh, **inner)
    fully_shard(model, mesh=mesh, **options)  # in place
    return model


def full(tensor: Tensor) -> Tensor:
    """Return a tensor, unsharded."""
    every = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return every.detach().clone()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters, unsharded."""
    return {name.removeprefix("module."): full(each) for name, each in model.named_parameters()}


def batches(task: Task, rank: int) -> list[Any]:
    """Return the batches of a rank, or windows of their micro-batches."""
    found = task.data(rank)
    if not task.window_size:
        return found
    return [Window(list(zip(*(t.split(task.window_size) for t in batch), strict=True))) for batch in found]


class Training:
    """A sharded model with its optimizer and `Accumulator`."""

    def __init__(self, task: Task, place: Place, loss: Any = None, **options: Any) -> None:
        self.model = place.shard(task.make())
        self.optimizer = task.optimizer(self.model.parameters())
        self.accumulate = Accumulator(
            self.model,
            self.optimizer,
            loss or partial(task.loss, self.model),
            **{"check": False, **task.options, **options},
        )
        self.updates: list[Any] = []
        self.exchanges: list[int] = []  # of each update
        torch.manual_seed(1)

    def run(self, batch: Any) -> None:
        """Make an update."""
        before = exchanges(self.model)
        self.updates.append(self.accumulate(batch))
        self.exchanges.append(exchanges(self.model) - before)

    def found(self) -> Found:
        """Return the results that the tests compare."""
        return {
            "parameters": whole(self.model),
            "losses": [u.loss for u in self.updates],
            "norms": [u.grad_norm for u in self.updates],
            "microbatches": [u.microbatches for u in self.updates],
            "failures": [u.failures for u in self.updates],
            "exchanges": self.exchanges,
            "sharded": all(isinstance(p, DTensor) for p in self.model.parameters()),
            "elements": sum(local(p).numel() for p in self.model.parameters()),
            "gradients": sum(p.grad is not None for p in self.model.parameters()),
            "report": str(self.accumulate.sync),
        }


def local(tensor: Any) -> Tensor:
    """Return this rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def exchanges(model: nn.Module) -> int:
    """Return the number of collectives so far among the ranks that share parameters."""
    return sum(FSDP2([model]).exchanges().values())


def trained(task: Task, place: Place, **options: Any) -> Found:
    """Train through an `Accumulator`."""
    training = Training(task, place, **options)
    for batch in batches(task, place.rank):
        training.run(batch)
    return training.found()


def by_hand(task: Task, place: Place) -> Found:
    """Train in a user-defined loop, with a forward under no_grad after each update."""
    training = Training(task, place)
    for batch in batches(task, place.rank):
        with training.accumulate.window(batch) as window:
            for microbatch in window:
                window.backward(task.loss(training.model, microbatch))
        training.updates.append(window.update)
        with torch.no_grad():
            training.model(batch[0])
    return training.found()


def of_gradient(task: Task, place: Place) -> Found:
    """Accumulate the gradients of all batches, and make one step."""
    model = place.shard(task.make())
    optimizer = task.optimizer(model.parameters())
    gradient_of = Gradient(model, partial(task.loss, model), microbatch_size=2, check=False)
    records = [gradient_of(batch) for batch in batches(task, place.rank)]
    norms = [record.grad_norm for record in records]
    optimizer.step()
    return {"parameters": whole(model), "losses": [r.loss for r in records], "norms": norms}


def resumed(task: Task, place: Place, *, inside: bool, at: int = 1, **options: Any) -> Found:
    """Save before an update, or inside it after two micro-batches; resume in new objects.

    Args:
        task: the training.
        place: sharding of the model.
        inside: save inside the window.
        at: index of the update.
        options: options of the `Accumulator`.
    """
    first, data = Training(task, place, **options), batches(task, place.rank)
    for batch in data[:at]:
        first.run(batch)
    state = first.accumulate.state_dict()
    if inside:
        with first.accumulate.window(data[at]) as window:
            for index, microbatch in enumerate(window):
                window.backward(task.loss(first.model, microbatch))
                if index == 1:
                    state = copy.deepcopy(first.accumulate.state_dict())
                    break
    models, steps = first.model.state_dict(), first.optimizer.state_dict()
    second = Training(task, place, **options)
    second.model.load_state_dict(models)
    second.optimizer.load_state_dict(steps)
    second.accumulate.load_state_dict(state)
    second.updates = first.updates
    for batch in data[at:]:
        second.run(batch)
    return second.found()


class BrokenError(Exception):
    """Error in user code."""


class Fails:
    """Makes one rank fail on more than `above` samples.

    Args:
        where: ``"loss"``, ``"forward"`` or ``"backward"``; the latter two fail in the middle of the model.
        how: ``"memory"`` or ``"error"``.
        here: True on the failing rank.
        above: number of samples that still succeed.
    """

    def __init__(self, where: str, how: str, *, here: bool, above: int) -> None:
        self.where, self.how, self.armed, self.above = where, how, here, above
        self.inside = 0  # number of calls at `where`

    def __call__(self, x: Tensor, where: str) -> None:
        """Fail if `where` is the place."""
        self.inside += where == self.where
        if self.armed and where == self.where and len(x) > self.above:
            raise (
                torch.OutOfMemoryError("out of memory")
                if self.how == "memory"
                else BrokenError("no such label")
            )


def failing(place: Place, where: str, how: str, bad: int, above: int = 2, **options: Any) -> Found:
    """Train; after an error of one rank, repeat the window."""
    task, fails = Task(options={"microbatch_size": 4}), Fails(where, how, here=place.rank == bad, above=above)

    def loss(batch: Any) -> Tensor:
        output = training.model(batch[0])
        fails(batch[0], "loss")
        return nn.functional.mse_loss(output, batch[1])

    training = Training(task, place, loss, **options)
    model: Any = training.model
    getattr(model, "module", model).fragile.fails = fails
    outcome = []
    for batch in batches(task, place.rank):
        before = whole(model)
        try:
            training.run(batch)
        except Exception as error:  # noqa: BLE001 - the test checks it
            same = all(torch.equal(value, before[name]) for name, value in whole(model).items())
            outcome.append((type(error).__name__, str(error), same, training.found()["gradients"]))
            fails.armed = False
            training.run(batch)
    return {**training.found(), "outcome": outcome}


def stopped(place: Place, loss: Any, **options: Any) -> Found:
    """Return the error of the first update, and True if the parameters are unchanged."""
    task = Task(options={"microbatch_size": 2})
    model = place.shard(task.make())
    optimizer = task.optimizer(model.parameters())
    accumulate = Accumulator(model, optimizer, partial(loss, model), **{**task.options, **options})
    before = whole(model)
    try:
        accumulate(batches(task, place.rank)[0])
    except Exception as error:  # noqa: BLE001 - the test checks it
        same = all(torch.equal(value, before[name]) for name, value in whole(model).items())
        return {"outcome": (type(error).__name__, str(error), same)}
    return {"outcome": None}


def not_finite(model: nn.Module, batch: Any, *, gradient: bool, rank: int) -> Tensor:
    """Return a loss that is non-finite on one rank, or whose gradient is."""
    value = mse(model, batch)
    if rank:
        return value + (value * 0).sqrt() if gradient else value * math.nan
    return value


def left_as_set(place: Place) -> Found:
    """Return FSDP2's settings before and after a window, and gradients of FSDP2 alone."""
    training = Training(Task(), place)

    def settings() -> list[Any]:
        groups = [group for module in training.model.modules() for group in _groups(module)]
        return [
            (g.reduce_grads, g.all_reduce_grads, g.gradient_divide_factor, g.force_sum_reduction_for_comms)
            for g in groups
        ]

    before, batch = settings(), batches(Task(), place.rank)[0]
    training.run(batch)
    mse(training.model, batch).backward()  # by FSDP2 alone: the mean over the ranks
    gradients = {name: full(p.grad) for name, p in training.model.named_parameters() if p.grad is not None}
    return {"before": before, "after": settings(), "parameters": whole(training.model), "own": gradients}


def _groups(module: Any) -> list[Any]:
    if not hasattr(module, "_get_fsdp_state"):
        return []
    state = module._get_fsdp_state()  # older torch has one group
    return state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]


def run(cells: dict[str, Callable[[], Found]], chosen: list[str]) -> dict[str, Found]:
    """Run the chosen cells; return the results and warnings of each."""
    found: dict[str, Found] = {}
    for name, cell in cells.items():
        if not chosen or name in chosen:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found[name] = cell()
            texts = [str(one.message) for one in caught]
            found[name]["warned"] = [text for text in texts if "returned a view tensor" not in text]
    return found


def join(rank: int, folder: Path, count: int) -> None:
    """Initialize the process group."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=30),
    )


def leave(found: Any, rank: int, folder: Path) -> None:
    """Write the results into the folder, and end the process."""
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    end_rank()
