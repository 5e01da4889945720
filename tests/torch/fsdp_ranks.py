"""Worker for one of the two gloo ranks of `test_fsdp`: `python -m ... RANK FOLDER [CELL ...]`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from superbatch.errors import InputError
from superbatch.torch import Accumulator
from superbatch.torch.window.norm import finite_norm
from superbatch.torch.window.sync.fsdp2 import FSDP2
from superbatch.torch.window.sync.sharded import Sharded
from tests.torch.counter import Counter
from tests.torch.helpers import mse, sgd
from tests.torch.sharded_tasks import TASKS, Task, large_batches, net
from tests.torch.sharded_training import (
    Found,
    Place,
    Training,
    batches,
    by_hand,
    failing,
    fully,
    join,
    leave,
    left_as_set,
    local,
    not_finite,
    of_gradient,
    resumed,
    run,
    stopped,
    trained,
    whole,
)


def averaging(self: FSDP2) -> ExitStack:
    """Mutant: let FSDP2 average over the ranks."""
    return ExitStack()


def own_norm(self: Sharded, gradients: Any) -> tuple[float, bool]:
    """Mutant: return the norm of this rank's shards."""
    return finite_norm([None if g is None else local(g) for g in gradients])


def nonzero_idle_backward(self: Sharded, *, again: bool) -> None:
    """Mutant: a rank without a micro-batch runs a backward with nonzero gradients."""
    torch.autograd.backward(self._outputs, [torch.ones_like(each) for each in self._outputs])


MUTANTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "mean over the ranks": ("samples", lambda: mock.patch.object(FSDP2, "settings", averaging)),
    "norm of one rank": ("clipped", lambda: mock.patch.object(Sharded, "norm", own_norm)),
    "idle turns that add": (
        "windows",
        lambda: mock.patch.object(Sharded, "zero_backward", nonzero_idle_backward),
    ),
}


def mutated(name: str, place: Place) -> Found:
    """Train with a mutant."""
    task, change = MUTANTS[name]
    with change():
        return trained(TASKS[task], place)


def blocks_compiled(model: nn.Module) -> nn.Module:
    """Compile each block."""
    for block in cast(nn.ModuleList, model.blocks):
        block.compile(backend="aot_eager")
    return model


def compiled(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Compile each block, and shard the model."""
    return fully(blocks_compiled(model), mesh)


REPLICATED = ("returned", "counted", "dropout", "checkpointed", "fused", "terms", "auto")
"""Tasks that `not_sharded` trains too, besides those that it lists."""


def kept_gathered(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard a model; its parameters stay all-gathered until the end of a window."""
    sharded = fully(model, mesh, reshard_after_forward=False)
    cast(FSDPModule, sharded).set_reshard_after_backward(False)
    return sharded


BF16 = torch.bfloat16
POLICIES = {
    "float32": MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64),
    "bfloat16": MixedPrecisionPolicy(
        param_dtype=BF16, reduce_dtype=torch.float32, output_dtype=torch.float32
    ),
    "bfloat16 loss": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
}


def with_policies(mesh: DeviceMesh, rank: int) -> dict[str, Callable[[], Found]]:
    """Return the cells of other FSDP options, by name."""
    found: dict[str, Callable[[], Found]] = {}
    for name, policy in POLICIES.items():
        place = Place(partial(fully, mesh=mesh, mp_policy=policy), rank)
        for reduced in ("window", "microbatch"):
            found[f"{name} policy, {reduced}/in float32"] = partial(
                trained, TASKS["in float32"], place, sync=reduced
            )
        found[f"{name} policy, large batch/in float32"] = partial(by_fsdp2, TASKS["in float32"], place)
    offload = partial(fully, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return found | {
        "offloaded/clipped": partial(trained, TASKS["clipped"], Place(offload, rank)),
        "kept gathered/clipped": partial(
            trained, TASKS["clipped"], Place(partial(kept_gathered, mesh=mesh), rank)
        ),
        "ignored/clipped": partial(trained, TASKS["clipped"], Place(partial(with_ignored, mesh=mesh), rank)),
        "compiled/clipped": partial(trained, TASKS["clipped"], Place(partial(compiled, mesh=mesh), rank)),
    }


def with_ignored(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard all parameters except two, which are replicated."""
    ignored = {model.get_parameter(name) for name in ("last.weight", "first.bias")}
    return fully(model, mesh, ignored_params=ignored)


def not_sharded(rank: int) -> dict[str, Callable[[], Found]]:
    """Return the cells of models that are not sharded, by name."""
    place = Place(lambda model: model, rank)
    found: dict[str, Callable[[], Found]] = {
        f"all_reduce/{task}": partial(trained, TASKS[task], place, sync="all_reduce")
        for task in ("clipped", "windows", "tokens", "forked", "checked")
    }
    for how, where_all, options in (
        ("DDP", Place(DistributedDataParallel, rank), {}),
        ("all_reduce", place, {"sync": "all_reduce"}),
    ):
        for task in (*REPLICATED, "autocast"):
            found[f"{how}/{task}"] = partial(trained, TASKS[task], where_all, **options)
        for inside in (False, True):
            name = f"{how}, resumed {'inside' if inside else 'between'}/clipped"
            found[name] = partial(resumed, TASKS["clipped"], where_all, inside=inside, **options)
        for kind in ("memory", "error"):
            name = f"{how}, {kind} in the forward/samples"
            found[name] = partial(failing, where_all, "forward", kind, bad=1, **options)
    found["DDP, compiled/clipped"] = partial(
        trained, TASKS["clipped"], Place(lambda model: DistributedDataParallel(blocks_compiled(model)), rank)
    )
    found["all_reduce, compiled/clipped"] = partial(
        trained, TASKS["clipped"], Place(blocks_compiled, rank), sync="all_reduce"
    )
    found["DDP, auto with little memory/samples"] = partial(
        failing,
        Place(DistributedDataParallel, rank),
        "forward",
        "memory",
        bad=0,
        microbatch_size="auto",
    )
    found["apart"] = partial(trained, TASKS["samples"], place, sync=None)
    found["not stated"] = partial(refused, place, "auto")
    found["unlike"] = partial(refused, place, "all_reduce", seed=rank)
    return found


def refused(place: Place, sync: Any, *, seed: int = 0) -> Found:
    """Return the error raised when an Accumulator is constructed."""
    model = place.shard(net())
    with torch.no_grad():
        model.get_parameter("first.bias").add_(seed)
    try:
        Accumulator(model, sgd(model.parameters()), partial(mse, model), sync=sync)
    except InputError as error:
        return {"text": str(error)}
    return {"text": ""}


def counted(place: Place) -> Found:
    """Count forwards by a user-defined participant; one rank has fewer micro-batches."""
    counter, task = Counter(), TASKS["windows"]

    def loss(batch: Any) -> Any:
        counter.value += 1
        return task.loss(training.model, batch)

    training = Training(task, place, loss, participants=[counter])
    for batch in batches(task, place.rank):
        training.run(batch)
    return {**training.found(), "counted": counter.value}


def by_fsdp2(task: Task, place: Place) -> Found:
    """Train on the large batch, the same on both ranks, by FSDP2 alone."""
    model = place.shard(task.make())
    optimizer = task.optimizer(model.parameters())
    for batch in large_batches(task, 2):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    return {"parameters": whole(model)}


def cells(place: Place) -> dict[str, Callable[[], Found]]:
    """Return all cells by name; the part after the slash is the task of the reference."""
    found = {name: partial(trained, task, place) for name, task in TASKS.items()}
    found |= {
        "by hand/samples": partial(by_hand, TASKS["samples"], place),
        "gradient": partial(of_gradient, TASKS["samples"], place),
        "resumed/clipped": partial(resumed, TASKS["clipped"], place, inside=False),
        "resumed inside/clipped": partial(resumed, TASKS["clipped"], place, inside=True),
        "resumed in a turn without weight/windows": partial(
            resumed, TASKS["windows"], place, inside=True, at=2
        ),
        "as set": partial(left_as_set, place),
        "counted by a participant/windows": partial(counted, place),
        "nan": partial(stopped, place, partial(not_finite, gradient=False, rank=place.rank), check=False),
        "bad gradient": partial(
            stopped, place, partial(not_finite, gradient=True, rank=place.rank), check=False
        ),
        "wrong reduction": partial(stopped, place, mse, reduction="sum"),
    }
    for task in ("clipped", "windows", "tokens", "forked", "bfloat16 loss"):
        found[f"each micro-batch/{task}"] = partial(trained, TASKS[task], place, sync="microbatch")
    for how in ("memory", "error"):
        for where in ("loss", "forward", "backward"):
            name = f"{how} in the {where}/samples"
            found[name] = partial(failing, place, where, how, bad=len(where) % 2)
        name = f"{how} in the backward of each micro-batch/samples"
        found[name] = partial(failing, place, "backward", how, bad=0, sync="microbatch")
    for where in ("loss", "forward"):
        name = f"error in the {where} of the check/samples"
        # In every micro-batch of training: what only the check evaluates may fail without an error.
        found[name] = partial(failing, place, where, "error", bad=1, above=1, check=True)
    found["memory in the forward of the check/samples"] = partial(
        failing, place, "forward", "memory", bad=0, check=True
    )
    for size in ("auto", "largest"):
        found[f"{size} with little memory/samples"] = partial(
            failing, place, "forward", "memory", bad=0, microbatch_size=size
        )
    found["resumed inside, each micro-batch/clipped"] = partial(
        resumed, TASKS["clipped"], place, inside=True, sync="microbatch"
    )
    return found | {
        f"mutant: {name}/{task}": partial(mutated, name, place) for name, (task, _) in MUTANTS.items()
    }


def main(rank: int, folder: Path, chosen: list[str]) -> None:
    """Run the cells, and write the results into the folder."""
    join(rank, folder, 2)
    mesh = init_device_mesh("cpu", (2,))
    every = cells(Place(partial(fully, mesh=mesh), rank)) | with_policies(mesh, rank) | not_sharded(rank)
    leave(run(every, chosen), rank, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
