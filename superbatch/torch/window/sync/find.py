"""Choice of the `Sync` for models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from superbatch.errors import InputError

from ...warn import warn
from ..wrapped_models import INSTEAD, refuse_comm_hooks, refuse_static_graphs, sharded_part
from .ddp import DDP
from .local import Local
from .manual import Manual
from .sync import Sync, SyncOption


def find_sync(
    models: Iterable[nn.Module],
    group: Any = None,
    *,
    no_sync: bool = False,
    sharded: Literal["split", "gathered"] | None = None,
    sync: SyncOption | Literal["warn"] = "warn",
    in_buckets: bool = False,
) -> Sync:
    """Return the ranks that share a batch of the models.

    Args:
        models: the models that share a batch.
        group: the process group of models that are not wrapped in DDP; None: that of their wrappers.
        no_sync: several backward passes will run under ``no_sync()``, which a static graph does not allow.
        sharded: use of sharded parameters: ``"split"`` keeps them sharded, ``"gathered"`` gathers them for a
            window; None: they raise.
        sync: the option of an accumulator; ``"warn"``: as ``"auto"``, but unwrapped models on several ranks
            train apart with a warning.
        in_buckets: reduced gradients may stay in the buckets of DDP, which the next window overwrites.

    Raises:
        InputError: the models' DDP wrappers use different process groups, or a communication hook; parameters
            are sharded, or differ between ranks; or `sync` does not fit the models.

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
            "The models are wrapped in DDP with different process groups, but a window sums over the ranks "
            "of one. Use one process group, or one Accumulator per model."
        )
    part = sharded_part(models)
    if part is not None and sharded is None:
        raise InputError(
            f"{part}, which only Accumulator, Gradient, WholeBatch, WholeGradient and virtual_batch support. "
            f"Use one of these, {INSTEAD}."
        )
    if part is not None and wrappers:
        raise InputError(
            f"{part}, and is also wrapped in DistributedDataParallel. Remove the wrapper, and replicate the "
            "model by fully_shard over a mesh of two dimensions (HSDP) instead."
        )
    _check_option(sync, wrapped=bool(wrappers), part=part, per_microbatch=sharded == "split")
    refuse_comm_hooks(wrappers)
    if no_sync:
        refuse_static_graphs(wrappers)
    first = next((parameter for model in wrappers or models for parameter in model.parameters()), None)
    device = torch.device("cpu") if first is None else first.device
    if part is not None:
        from .sharded import Sharded  # here: it imports much of torch.distributed

        if sharded == "gathered":
            return Sharded(models, reduced="window", whole=True)
        return Sharded(models, reduced=sync if sync in ("window", "microbatch") else "auto")
    if sync == "all_reduce":
        return _replicas(models, device)
    if not groups:
        return _single_process(sync)
    return DDP(wrappers, device, in_buckets=in_buckets) if wrappers else Manual(group, device)


def _check_option(sync: object, *, wrapped: bool, part: str | None, per_microbatch: bool) -> None:
    """Check that a choice of `sync` fits the models.

    Args:
        sync: the choice.
        wrapped: whether the models are wrapped in DDP.
        part: result of `sharded_part`; None: no parameter is sharded.
        per_microbatch: whether sharded gradients can be reduced after each micro-batch.

    Raises:
        InputError: the choice does not fit.
    """
    if sync in ("auto", "warn") or (sync == "window" and (wrapped or part)):
        return
    # Only a sharded model can be reduced after each micro-batch.
    per_microbatch = per_microbatch and part is not None
    if sync == "microbatch" and per_microbatch:
        return
    if sync in (None, "all_reduce") and not wrapped and part is None:
        return
    if sync not in (None, "all_reduce", "window", "microbatch"):
        raise InputError(
            f'sync={sync!r} is not a choice of sync. Pass "auto", "window", "microbatch", "all_reduce" or '
            "None."
        )
    # The value is a choice of sync, but not one for this kind of model.
    what = part or (
        "The model is wrapped in DistributedDataParallel"
        if wrapped
        else "The model is not wrapped and not sharded"
    )
    if per_microbatch:
        fits = '"window" or "microbatch"'
    else:
        fits = '"window"' if wrapped or part else '"all_reduce" or None'
    raise InputError(f"{what}, so sync={sync!r} is not possible. Remove sync=, or pass {fits}.")


def _replicas(models: list[nn.Module], device: torch.device) -> Sync:
    """Return all ranks, each with an equal replica of the unwrapped models, or raise `InputError`."""
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError(
            'sync="all_reduce" needs a process group. Call torch.distributed.init_process_group() first.'
        )
    ranks = Manual(dist.group.WORLD, device)
    named = [each for model in models for each in model.named_parameters()]
    # Sums in float64 instead of all values, because they only have to show a different seed or checkpoint.
    of_each = ranks.gather([(name, tuple(p.shape), float(p.detach().double().sum())) for name, p in named])
    for first, *others in zip(*of_each, strict=False):
        if any(other != first for other in others) or len(set(map(len, of_each))) > 1:
            raise InputError(
                f'The parameter {first[0]!r} differs between ranks, but sync="all_reduce" only sums '
                "gradients. Make all ranks begin with equal parameters: use the same seed, or load one "
                "checkpoint."
            )
    return ranks


def _single_process(sync: object) -> Sync:
    """Return the `Sync` of a single process; with other ranks, ``"auto"`` raises and ``"warn"`` warns."""
    count = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if count > 1 and sync == "auto":
        raise InputError(
            f"{count} ranks are initialised, but the model is not wrapped and not sharded, so each rank "
            "would train apart. Pass the model wrapped in DistributedDataParallel (not its .module), or "
            "sharded by "
            'fully_shard, or pass sync="all_reduce" to sum gradients over the ranks, or sync=None to train '
            "each rank apart."
        )
    if count > 1 and sync == "warn":
        warn(
            f"{count} ranks are initialised, but the model is not wrapped in DistributedDataParallel, so "
            "each rank makes its own updates. Pass the wrapped model (not its .module) to share a batch "
            "over the ranks."
        )
    return Local()
