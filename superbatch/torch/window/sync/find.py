"""The choice of a `Sync` for some models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from superbatch.errors import InputError, explain

from ...warn import warn
from ..wrapped_models import INSTEAD, refuse_comm_hooks, refuse_static_graphs, sharded_part
from .ddp import DDP
from .local import Local
from .manual import Manual
from .sync import Sync


def find_sync(
    models: Iterable[nn.Module], group: Any = None, *, no_sync: bool = False, sharded: bool = False
) -> Sync:
    """Return the ranks over which the models are replicated.

    Args:
        models: those that share a batch.
        group: the process group, where the models are not wrapped in DDP; None: that of their wrappers.
        no_sync: several backward passes will run under ``no_sync()``, which a static graph does not allow.
        sharded: models whose parameters are sharded over the ranks can be worked with.

    Raises:
        InputError: the models' DDP wrappers use different process groups, a communication hook, or
            parameters are sharded.

    Examples:
        >>> find_sync([nn.Linear(2, 1)]).count
        1
    """
    models = list(models)
    wrappers = [
        module
        for model in models
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
    ]
    groups = [wrapper.process_group for wrapper in wrappers] + [group] * (group is not None)
    if len(set(map(id, groups))) > 1:
        raise InputError(
            explain(
                "models wrapped in DDP over different process groups",
                "one window has one set of ranks to sum over",
                "use one process group, or one Accumulator per model",
            )
        )
    part = sharded_part(models)
    if part is not None and not sharded:
        raise InputError(f"{part}, which only Accumulator and Gradient can work with. {INSTEAD}.")
    refuse_comm_hooks(wrappers)
    if no_sync:
        refuse_static_graphs(wrappers)
    first = next((parameter for model in wrappers or models for parameter in model.parameters()), None)
    device = torch.device("cpu") if first is None else first.device
    if part is not None:
        from .sharded import Sharded  # here: it imports much of torch.distributed

        return Sharded(models, device)
    if not groups:
        _warn_if_alone()
        return Local()
    return DDP(wrappers, device) if wrappers else Manual(group, device)


def _warn_if_alone() -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warn(
            f"{dist.get_world_size()} ranks are initialised, but no model given is wrapped in "
            "DistributedDataParallel: each rank makes updates of its own. Pass the wrapped model (not "
            "its .module) to share a batch over the ranks."
        )
