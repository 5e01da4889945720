"""Trainings of sharded models on each of several ranks, and what the tests read of them."""

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
    """How models are sharded, and whose data this rank has.

    Attributes:
        shard: shards a model.
        rank: among those that have data of their own.
    """

    shard: Callable[[nn.Module], nn.Module]
    rank: int


def fully(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Give each module that has layers of its own to `fully_shard`, and the model."""
    inner = dict(options)
    if "mp_policy" in options:  # the outputs of the model alone have its dtype
        inner["mp_policy"] = replace(options["mp_policy"], output_dtype=None)
    for module in list(model.modules())[:0:-1]:
        if list(module.children()) and not isinstance(module, nn.ModuleList):
            fully_shard(module, mesh=mesh, **inner)
    fully_shard(model, mesh=mesh, **options)  # in place
    return model


def full(tensor: Tensor) -> Tensor:
    """Return all of a tensor."""
    every = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return every.detach().clone()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters."""
    return {name.removeprefix("module."): full(each) for name, each in model.named_parameters()}


def batches(task: Task, rank: int) -> list[Any]:
    """Return the batches of a rank, or windows over them."""
    found = task.data(rank)
    if not task.pieces:
        return found
    return [Window(list(zip(*(t.split(task.pieces) for t in batch), strict=True))) for batch in found]


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
        """Return what the test compares."""
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
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def exchanges(model: nn.Module) -> int:
    """Return how many exchanges there have been among the ranks that share parameters."""
    return sum(FSDP2([model]).exchanges().values())


def trained(task: Task, place: Place, **options: Any) -> Found:
    """Train through an `Accumulator`."""
    training = Training(task, place, **options)
    for batch in batches(task, place.rank):
        training.run(batch)
    return training.found()


def by_hand(task: Task, place: Place) -> Found:
    """Train in a loop of one's own, with a forward without gradient after each update."""
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
    """Add up the gradients of all batches, and make one step."""
    model = place.shard(task.make())
    optimizer = task.optimizer(model.parameters())
    gradient_of = Gradient(model, partial(task.loss, model), microbatch_size=2, check=False)
    records = [gradient_of(batch) for batch in batches(task, place.rank)]
    norms = [record.grad_norm for record in records]
    optimizer.step()
    return {"parameters": whole(model), "losses": [r.loss for r in records], "norms": norms}


def resumed(task: Task, place: Place, *, inside: bool, at: int = 1, **options: Any) -> Found:
    """Save before an update, or inside it after two turns, and resume with a new model.

    Args:
        task: the training.
        place: of the model.
        inside: whether the window has begun.
        at: the update.
        options: of the `Accumulator`.
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
    """An error of the user's program."""


class Fails:
    """Lets one rank fail where it has more than two samples.

    Args:
        where: ``"loss"``, ``"forward"`` or ``"backward"``, the latter two in the middle of the model.
        how: ``"memory"`` or ``"error"``.
        here: this is the rank.
    """

    def __init__(self, where: str, how: str, *, here: bool) -> None:
        self.where, self.how, self.armed = where, how, here
        self.inside = 0  # how often the model has come there

    def __call__(self, x: Tensor, where: str) -> None:
        """Fail there."""
        self.inside += where == self.where
        if self.armed and where == self.where and len(x) > 2:
            raise (
                torch.OutOfMemoryError("out of memory")
                if self.how == "memory"
                else BrokenError("no such label")
            )


def failing(place: Place, where: str, how: str, bad: int, **options: Any) -> Found:
    """Train, and go on after one rank has failed in the first window."""
    task, fails = Task(options={"microbatch_size": 4}), Fails(where, how, here=place.rank == bad)

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
        except Exception as error:  # noqa: BLE001 - the test looks at it
            same = all(torch.equal(value, before[name]) for name, value in whole(model).items())
            outcome.append((type(error).__name__, str(error), same, training.found()["gradients"]))
            fails.armed = False
            training.run(batch)
    return {**training.found(), "outcome": outcome}


def stopped(place: Place, loss: Any, **options: Any) -> Found:
    """Return the error of a training's first update, and whether everything is as before."""
    task = Task(options={"microbatch_size": 2})
    model = place.shard(task.make())
    optimizer = task.optimizer(model.parameters())
    accumulate = Accumulator(model, optimizer, partial(loss, model), **{**task.options, **options})
    before = whole(model)
    try:
        accumulate(batches(task, place.rank)[0])
    except Exception as error:  # noqa: BLE001 - the test looks at it
        same = all(torch.equal(value, before[name]) for name, value in whole(model).items())
        return {"outcome": (type(error).__name__, str(error), same)}
    return {"outcome": None}


def not_finite(model: nn.Module, batch: Any, *, gradient: bool, rank: int) -> Tensor:
    """Return a loss that is not finite on one rank, or whose gradient alone is not."""
    value = mse(model, batch)
    if rank:
        return value + (value * 0).sqrt() if gradient else value * math.nan
    return value


def left_as_set(place: Place) -> Found:
    """Return what FSDP2 is set to before and after a window, and how it computes without one."""
    training = Training(Task(), place)

    def settings() -> list[Any]:
        groups = [group for module in training.model.modules() for group in _groups(module)]
        return [
            (g.reduce_grads, g.all_reduce_grads, g.gradient_divide_factor, g.force_sum_reduction_for_comms)
            for g in groups
        ]

    before, batch = settings(), batches(Task(), place.rank)[0]
    training.run(batch)
    mse(training.model, batch).backward()  # as FSDP2 does it: the mean over the ranks
    gradients = {name: full(p.grad) for name, p in training.model.named_parameters() if p.grad is not None}
    return {"before": before, "after": settings(), "parameters": whole(training.model), "own": gradients}


def _groups(module: Any) -> list[Any]:
    if not hasattr(module, "_get_fsdp_state"):
        return []
    state = module._get_fsdp_state()  # of an older torch with one group
    return state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]


def run(cells: dict[str, Callable[[], Found]], chosen: list[str]) -> dict[str, Found]:
    """Return what each cell found, and the warnings that it gave."""
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
    """Make a process group."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=30),
    )


def leave(found: Any, rank: int, folder: Path) -> None:
    """Leave what came out in the folder, and end the process."""
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    end_rank()
