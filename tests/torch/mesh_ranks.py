"""Worker for one of the four gloo ranks of `test_meshes`: `python -m ... RANK FOLDER [CELL ...]`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from superbatch.errors import OptimizerError
from superbatch.torch.window.sync.manual import Manual
from superbatch.torch.window.sync.sharded import Sharded
from tests.torch.sharded_tasks import TASKS
from tests.torch.sharded_training import (
    Found,
    Place,
    failing,
    fully,
    join,
    leave,
    resumed,
    run,
    trained,
)


def parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split the layers of each block over ranks: column-wise, then row-wise."""
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def fsdp_and_tp(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Apply tensor parallelism over one mesh dimension, and FSDP2 over the other."""
    return fully(parallel(model, mesh["tp"]), mesh["dp"], **options)


BFLOAT16 = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
)


def compiled(model: nn.Module, shard: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Compile each block, and shard the model."""
    for block in cast(nn.ModuleList, model.blocks):
        block.compile(backend="aot_eager")
    return shard(model)


def places(rank: int) -> dict[str, Place]:
    """Return the ways to shard, by name."""
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mixed = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return {
        "HSDP": Place(partial(fully, mesh=replicas), rank),
        "TP": Place(partial(parallel, mesh=init_device_mesh("cpu", (4,))), 0),
        "FSDP2 x TP": Place(partial(fsdp_and_tp, mesh=mixed), rank // 2),
    }


def counted_twice(self: Sharded, numbers: Iterable[float]) -> list[float]:
    """Mutant: sum over all ranks, as if each had its own data."""
    return Manual.sum_numbers(self, numbers)


MUTANTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "tensor-parallel ranks have data": (
        "FSDP2 x TP/windows",
        lambda: mock.patch.object(Sharded, "sum_numbers", counted_twice),
    ),
    "elements count once per rank": (
        "FSDP2 x TP/clipped",
        lambda: mock.patch.object(Sharded, "_holders", return_value=1),
    ),
}


QUICK = (
    *("HSDP/clipped", "HSDP/windows", "HSDP, each micro-batch/clipped", "TP/clipped", "TP/terms"),
    *(
        "FSDP2 x TP/clipped",
        "FSDP2 x TP/windows",
        "FSDP2 x TP/checked",
        "FSDP2 x TP, each micro-batch/clipped",
    ),
    "HSDP, memory in the forward/samples",
    "HSDP, error in the backward/samples",
)
"""Cells of the default run; the others are slow."""


def mutated(name: str, place: Place) -> Found:
    """Train with a mutant."""
    cell, change = MUTANTS[name]
    with change():
        try:
            return trained(TASKS[cell.split("/")[-1]], place)
        except OptimizerError as error:
            return {"error": str(error)}


def cells(rank: int) -> dict[str, Callable[[], Found]]:
    """Return all cells by name; the part after the slash is the task of the reference."""
    every = places(rank)
    found: dict[str, Callable[[], Found]] = {}
    for kind, place in every.items():
        tasks = ("clipped", "windows", "counted", "terms", "checkpointed", "dropout", "checked", "foreach")
        for task in (*tasks, "autocast"):
            if (kind, task) != ("TP", "foreach"):  # no foreach step takes DTensors and plain tensors
                found[f"{kind}/{task}"] = partial(trained, TASKS[task], place)
        for inside in (False, True):
            name = f"{kind}, resumed {'inside' if inside else 'between'}/clipped"
            found[name] = partial(resumed, TASKS["clipped"], place, inside=inside)
        found[f"{kind}, compiled/clipped"] = partial(
            trained, TASKS["clipped"], Place(partial(compiled, shard=place.shard), place.rank)
        )
        if kind != "TP":
            for task in ("clipped", "windows", "forked"):
                found[f"{kind}, each micro-batch/{task}"] = partial(
                    trained, TASKS[task], place, sync="microbatch"
                )
            found[f"{kind}, bfloat16 policy/in float32"] = partial(
                trained,
                TASKS["in float32"],
                Place(partial(cast(Any, place.shard), mp_policy=BFLOAT16), place.rank),
            )
    for how, where in product(("memory", "error"), ("loss", "forward", "backward")):
        found[f"HSDP, {how} in the {where}/samples"] = partial(failing, every["HSDP"], where, how, bad=2)
    for name, (cell, _) in MUTANTS.items():
        found[f"mutant: {name}/{cell.split('/')[-1]}"] = partial(mutated, name, every[cell.split("/")[0]])
    return found


def main(rank: int, folder: Path, chosen: list[str]) -> None:
    """Run the cells, and write the results into the folder."""
    join(rank, folder, 4)
    if chosen == ["quick"]:
        chosen = [name for name in cells(rank) if name in QUICK or name.startswith("mutant")]
    leave(run(cells(rank), chosen), rank, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
