"""Coupled batches of models sharded by FSDP2 or HSDP: `python -m ... RANK FOLDER COUNT`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from superbatch.errors import SuperbatchError
from superbatch.torch import WholeBatch, count_tokens, virtual_batch
from superbatch.torch.window.sync.sharded import Sharded
from tests.torch.coupled_ranks import (
    COUNTS,
    EVEN,
    Found,
    Training,
    balanced,
    contrastive,
    data,
    error_of,
    failing,
    net,
    of_gradient,
    of_labels,
    plain,
    resumed,
)
from tests.torch.sharded_training import full, join, leave, local, run

OF_FOUR = ((5, 9, 4, 6), (7, 3, 2, 5))


class Checkpointed(nn.Sequential):
    """Layers whose activations are recomputed in the backward, except those of the first."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        for index, layer in enumerate(self):
            input = checkpoint(layer, input, use_reentrant=False) if index else layer(input)
        return input


def checkpointed() -> nn.Module:
    """Return the model without BatchNorm, with activation checkpointing."""
    return Checkpointed(*plain().children())


def sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Apply `fully_shard` to each linear layer, then to the model."""
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)  # in place
    return model


def parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split two layers over ranks: column-wise, then row-wise."""
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def trained(rank: int, loss: Any = error_of, counts: Any = COUNTS, **options: Any) -> Found:
    """Train, and count the elements of the local shards."""
    training = Training(rank, loss, **options)
    found = training.run(data(rank, counts))
    return {**found, "elements": sum(local(each).numel() for each in training.inner.parameters())}


def mixed(rank: int, wrap: Callable[[nn.Module], nn.Module], *, by_hand: bool = False) -> Found:
    """Train a model of float32 parameters, with `WholeBatch` or by one backward per rank."""
    model = wrap(plain().float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = partial(error_of, model)
    whole = WholeBatch(model, optimizer, loss, microbatch_size=2)
    losses = []
    for batch in data(rank, EVEN):
        batch = {key: each.float() if each.is_floating_point() else each for key, each in batch.items()}
        if by_hand:
            optimizer.zero_grad()
            error = loss(batch)
            error.backward()
            optimizer.step()
            losses.append(error.item())
        else:
            losses.append(whole(batch).loss)
    return {"state": {name: full(each) for name, each in model.named_parameters()}, "losses": losses}


def refused(rank: int, shard: Callable[[nn.Module], nn.Module], **options: Any) -> Found:
    """Return the error raised when the training is constructed."""
    try:
        Training(rank, make=plain, wrap=shard, **options)
    except SuperbatchError as error:
        return {"error": (type(error).__name__, str(error))}
    return {"error": None}


def by_virtual_batch(rank: int, wrap: Callable[[nn.Module], nn.Module], how: str = "") -> Found:
    """Return gradients of `virtual_batch` for ranks with equal counts; an error may end the first block."""
    model = wrap(net())
    gradients: list[dict[str, torch.Tensor]] = []
    for batch in data(rank, EVEN):
        if how == "error" and not gradients:
            with suppress(ZeroDivisionError), virtual_batch(model, microbatch_size=4) as virtual:
                error_of(model, virtual(batch)).backward()
                raise ZeroDivisionError
        with virtual_batch(model, microbatch_size=2 + rank, group=dist.group.WORLD) as virtual:
            error_of(model, virtual(batch)).backward()
        found = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        gradients.append(found)
    whole = {name: full(each) for name, each in model.state_dict().items()}
    return {"gradients": gradients, "whole": whole}


def without_all_gather(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> Found:
    """Mutant: each layer frees its unsharded parameters after its forward."""
    with mock.patch.object(Sharded, "gathered", return_value=nullcontext()):
        try:
            return {"error": None, **trained(rank, wrap=wrap)}
        except (RuntimeError, SuperbatchError) as error:
            return {"error": str(error)}


def cells(rank: int, count: int) -> dict[str, Callable[[], Found]]:
    """Return all cells by name."""
    if count == 4:
        replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        hsdp: Any = partial(sharded, mesh=replicas)
        return {
            "BatchNorm": partial(trained, rank, counts=OF_FOUR, wrap=hsdp),
            "balanced": partial(trained, rank, balanced, OF_FOUR, wrap=hsdp),
        }
    mesh = init_device_mesh("cpu", (count,))
    fsdp: Any = partial(sharded, mesh=mesh)
    bfloat16: Any = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    by_bfloat16 = partial(sharded, mesh=mesh, mp_policy=bfloat16)
    kept = partial(sharded, mesh=mesh, reshard_after_forward=False)
    return {
        "BatchNorm": partial(trained, rank, wrap=fsdp),
        "kept gathered": partial(trained, rank, wrap=kept),
        "offloaded": partial(
            trained, rank, wrap=partial(sharded, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        ),
        "auto": partial(trained, rank, wrap=fsdp, microbatch_size="auto"),
        "labels": partial(trained, rank, of_labels, wrap=fsdp, weight=count_tokens("labels")),
        "contrastive": partial(trained, rank, contrastive, EVEN, wrap=fsdp),
        "balanced": partial(trained, rank, balanced, wrap=fsdp),
        "without BatchNorm": partial(trained, rank, balanced, wrap=fsdp, make=plain),
        "checkpointed": partial(trained, rank, balanced, wrap=fsdp, make=checkpointed),
        "resumed": partial(resumed, rank, wrap=fsdp),
        "gradient": partial(of_gradient, rank, fsdp),
        "memory in the loss": partial(failing, rank, "loss", "memory", wrap=fsdp),
        "memory in a sweep": partial(failing, rank, "sweep", "memory", wrap=fsdp),
        "error in the loss": partial(failing, rank, "loss", "error", wrap=fsdp),
        "error in a sweep": partial(failing, rank, "sweep", "error", wrap=fsdp),
        "bfloat16": partial(mixed, rank, by_bfloat16),
        "bfloat16, by hand": partial(mixed, rank, by_bfloat16, by_hand=True),
        "float32": partial(mixed, rank, fsdp),
        "block": partial(by_virtual_batch, rank, fsdp),
        "block after an error": partial(by_virtual_batch, rank, fsdp, "error"),
        "mutant: not gathered": partial(without_all_gather, rank, fsdp),
        "tensor parallel": partial(refused, rank, partial(parallel, mesh=mesh)),
        "each micro-batch": partial(refused, rank, fsdp, sync="microbatch"),
    }


def main(rank: int, folder: Path, count: int, chosen: list[str]) -> None:
    """Run the cells, and write the results into the folder."""
    join(rank, folder, count)
    leave(run(cells(rank, count), chosen), rank, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
