"""Errors for models whose gradients are sharded, or are not reduced by a sum over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from superbatch.errors import InputError

INSTEAD = "or wrap the model in DistributedDataParallel"


def sharded_part(models: Iterable[nn.Module]) -> str | None:
    """Return a clause that names the first sharded module or parameter; None if nothing is sharded.

    Raises:
        InputError: the gradients of a module cannot be accumulated, because it is a FullyShardedDataParallel
            (FSDP1) or a stage of a pipeline.

    Examples:
        >>> sharded_part([nn.Linear(1, 1)]) is None
        True

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    # Not returned at once, because a later module may raise.
    found: str | None = None
    for model in models:
        for path, module in model.named_modules():
            where = f"at {path!r} " if path else ""
            # By name, because importing these classes takes longer than importing this library.
            names = {kind.__name__ for kind in type(module).__mro__}
            if "FullyShardedDataParallel" in names:
                raise InputError(
                    f"The model {where}is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters "
                    f"cannot be accumulated here. Use torch.distributed.fsdp.fully_shard (FSDP2), {INSTEAD}."
                )
            if type(module).__module__.startswith("torch.distributed.pipelining"):
                raise pipelined(module)
            if "FSDPModule" in names:
                found = found or f"The model {where}is sharded by fully_shard (FSDP2)"
        for name, parameter in model.named_parameters():
            # By attribute, because importing DTensor takes longer than importing this library.
            if hasattr(parameter, "device_mesh"):
                found = found or f"The parameter {name!r} is a DTensor (tensor parallel)"
    return found


def pipelined(model: object) -> InputError:
    """Return the error for a stage or a schedule of a pipeline."""
    return InputError(
        f"{type(model).__name__} is part of a pipeline, which itself cuts each batch into micro-batches and "
        "runs their backward passes. Call its step() with the whole batch, or use fully_shard or tensor "
        "parallelism instead."
    )


def refuse_comm_hooks(wrappers: Iterable[DistributedDataParallel]) -> None:
    """Raise `InputError` for DDP wrappers with communication hooks, which a window would not call.

    Examples:
        >>> refuse_comm_hooks([])

    Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
    """
    for wrapper in wrappers:
        hook = _hook_of(wrapper)
        if hook is not None:
            raise InputError(
                f"DistributedDataParallel has the communication hook {hook!r}, which is not called: a window "
                "sums gradients over ranks itself. Remove the call of register_comm_hook()."
            )


def refuse_static_graphs(wrappers: Iterable[DistributedDataParallel]) -> None:
    """Raise `InputError` for a DDP wrapper with ``static_graph=True``: a second backward would fail.

    Examples:
        >>> refuse_static_graphs([])
    """
    # The reducer counts the hooks of the first backward, and expects the same number in each.
    if any(wrapper.static_graph for wrapper in wrappers):
        raise InputError(
            "DistributedDataParallel(static_graph=True) does not work with micro-batches, because it counts "
            "backward passes that run under no_sync(). Remove static_graph=True."
        )


def _hook_of(wrapper: Any) -> str | None:
    hooks = getattr(wrapper, "_comm_hooks", ())
    # The entry of a Python hook is (callable, state).
    if hooks:
        return getattr(hooks[0][0], "__qualname__", repr(hooks[0][0]))
    # Only the C++ logger has the name of a built-in hook.
    return wrapper._get_ddp_logging_data().get("comm_hook") or None
