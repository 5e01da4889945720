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
    """Return a function that names the parameter which a DTensor is sharded as; None: no parameter is.

    Examples:
        >>> sharding_names([nn.Linear(1, 1)])(torch.ones(1)) is None
        True
    """
    # The first parameter of a sharding stands for all that are sharded alike.
    known: dict[Any, str] = {}
    for parameter, name in parameter_names(models).items():
        if hasattr(parameter, "device_mesh"):
            known.setdefault(_sharding(parameter), name)
    return lambda tensor: known.get(_sharding(tensor)) if hasattr(tensor, "device_mesh") else None


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the shards of this rank; all ranks call it together.

    Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    """
    # Imported here: it takes longer than this library.
    from torch.distributed.checkpoint.state_dict_saver import save

    save(dict(tensors), checkpoint_id=str(folder / FOLDER))


def read_shards(
    folder: Path, entries: Mapping[str, Mapping[str, Any]], models: Sequence[nn.Module]
) -> dict[str, Tensor]:
    """Read tensors, each sharded as the parameter that it was sharded as is now; all ranks call it together.

    Args:
        folder: of the checkpoint.
        entries: from `codec.sharded_in`.
        models: which may be sharded over another number of ranks, or not at all.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    if not entries:
        return {}
    # By plain name: the wrapping may have changed since.
    parameters = {name: parameter for parameter, name in parameter_names(models).items()}
    tensors: dict[str, Any] = {}
    for name, entry in entries.items():
        like, dtype = parameters.get(entry["like"]), as_dtype(entry["dtype"])
        # Sharded as the parameter is now, which may be over another number of ranks.
        if like is not None and list(like.shape) == entry["shape"]:
            tensors[name] = torch.empty_like(like.detach(), dtype=dtype, requires_grad=False)
        else:
            # No such parameter here: each rank reads it whole.
            tensors[name] = torch.empty(entry["shape"], dtype=dtype)
    with warnings.catch_warnings():  # one process reads what several have written: that is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        load(tensors, checkpoint_id=str(folder / FOLDER), no_dist=not dist.is_initialized())
    return tensors


def placed(value: Any, here: Any) -> Any:
    """Return a tensor that every rank has whole, sharded as another one is; anything else as it is.

    Examples:
        >>> placed(torch.ones(1), torch.zeros(1))
        tensor([1.])
    """
    # Optimizer state of a sharded parameter, saved by a program that did not shard.
    if not isinstance(value, Tensor) or not hasattr(here, "device_mesh") or hasattr(value, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(here.device), here.device_mesh, here.placements)


def _sharding(tensor: Any) -> Any:
    return tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements)
