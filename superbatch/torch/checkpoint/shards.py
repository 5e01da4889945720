"""Sharded tensors of a checkpoint, written and read by torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .files import as_dtype
from .names import parameter_names

FOLDER = "shards"


def sharding_names(models: Sequence[nn.Module]) -> Callable[[Tensor], str | None]:
    """Return a function from a DTensor to the name of a parameter with the same sharding, or to None.

    Examples:
        >>> sharding_names([nn.Linear(1, 1)])(torch.ones(1)) is None
        True
    """
    # The first parameter with each sharding.
    names_by_sharding: dict[Any, str] = {}
    for parameter, name in parameter_names(models).items():
        if hasattr(parameter, "device_mesh"):
            names_by_sharding.setdefault(_sharding(parameter), name)
    return lambda tensor: names_by_sharding.get(_sharding(tensor)) if hasattr(tensor, "device_mesh") else None


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the shards of this rank; call it on all ranks.

    Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    """
    # Imported here, because it takes longer than importing this library.
    from torch.distributed.checkpoint.state_dict_saver import save

    save(dict(tensors), checkpoint_id=str(folder / FOLDER))


def read_shards(
    folder: Path, entries: Mapping[str, Mapping[str, Any]], models: Sequence[nn.Module]
) -> dict[str, Tensor]:
    """Read tensors, each with the present sharding of its parameter; call it on all ranks.

    Args:
        folder: folder of the checkpoint.
        entries: from `codec.sharded_in`.
        models: the models, which may be sharded over another number of ranks, or not at all.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    if not entries:
        return {}
    # By plain name, because the wrapping may have changed.
    parameters = {name: parameter for parameter, name in parameter_names(models).items()}
    tensors: dict[str, Any] = {}
    for name, entry in entries.items():
        like, dtype = parameters.get(entry["like"]), as_dtype(entry["dtype"])
        if like is not None and list(like.shape) == entry["shape"]:
            tensors[name] = torch.empty_like(like.detach(), dtype=dtype, requires_grad=False)
        else:
            # Without such a parameter each rank reads the full tensor.
            tensors[name] = torch.empty(entry["shape"], dtype=dtype)
    with warnings.catch_warnings():  # without a process group torch warns, but one process may load
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        load(tensors, checkpoint_id=str(folder / FOLDER), no_dist=not dist.is_initialized())
    return tensors


def placed(value: Any, here: Any) -> Any:
    """Shard a full tensor as `here` is sharded; return any other value unchanged.

    Examples:
        >>> placed(torch.ones(1), torch.zeros(1))
        tensor([1.])
    """
    # E.g. optimizer state of a sharded parameter, saved by a program without sharding.
    if not isinstance(value, Tensor) or not hasattr(here, "device_mesh") or hasattr(value, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(here.device), here.device_mesh, here.placements)


def _sharding(tensor: Any) -> Any:
    return tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements)
