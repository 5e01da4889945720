"""Refusals of models whose gradients are sharded, or reduced by other rules than a sum over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from superbatch.errors import InputError

INSTEAD = "Or wrap the model in DistributedDataParallel"


def sharded_part(models: Iterable[nn.Module]) -> str | None:
    """Return a name of the first part of models that is sharded over ranks; None where all of it is whole.

    Args:
        models: of an accumulator.

    Raises:
        InputError: a module is of a kind whose gradients cannot be accumulated: FullyShardedDataParallel
            (FSDP1), or a stage of a pipeline.

    Examples:
        >>> sharded_part([nn.Linear(1, 1)]) is None
        True

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    # Not returned at once: a later module may be of a kind that is refused.
    found: str | None = None
    for model in models:
        for path, module in model.named_modules():
            where = f"at {path!r} " if path else ""
            # By name: importing these modules takes longer than importing this library.
            names = {kind.__name__ for kind in type(module).__mro__}
            if "FullyShardedDataParallel" in names:
                raise InputError(
                    f"The model {where}is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters "
                    f"cannot be accumulated here. Use torch.distributed.fsdp.fully_shard (FSDP2). {INSTEAD}."
                )
            if type(module).__module__.startswith("torch.distributed.pipelining"):
                raise pipelined(module)
            if "FSDPModule" in names:
                found = found or f"The model {where}is sharded by fully_shard (FSDP2)"
        for name, parameter in model.named_parameters():
            # By the attribute: importing DTensor takes longer than importing this library.
            if hasattr(parameter, "device_mesh"):
                found = found or f"The parameter {name!r} is a DTensor (tensor parallel)"
    return found


def pipelined(model: object) -> InputError:
    """Return the error for a stage of a pipeline, or its schedule."""
    return InputError(
        f"{type(model).__name__} is part of a pipeline, whose schedule cuts each batch into micro-batches "
        "itself and runs their backward passes. Call its step() with the whole batch, or shard the model by "
        "fully_shard or tensor parallel."
    )


def refuse_comm_hooks(wrappers: Iterable[DistributedDataParallel]) -> None:
    """Check that DDP wrappers reduce gradients by a plain mean, which a window replaces by one sum.

    Args:
        wrappers: of the models.

    Raises:
        InputError: a wrapper has a communication hook, which would not be called.

    Examples:
        >>> refuse_comm_hooks([])

    Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
    """
    for wrapper in wrappers:
        hook = _hook_of(wrapper)
        if hook is not None:
            raise InputError(
                f"DistributedDataParallel has the communication hook {hook!r}, which a window would not "
                "call: it sums gradients itself, once. Leave out register_comm_hook()."
            )


def refuse_static_graphs(wrappers: Iterable[DistributedDataParallel]) -> None:
    """Check that no DDP wrapper relies on a static graph.

    Args:
        wrappers: of the models.

    Raises:
        InputError: a wrapper has static_graph=True, whose reducer fails in a second backward under no_sync.

    Examples:
        >>> refuse_static_graphs([])
    """
    # The reducer of a static graph counts hooks of the first backward and expects as many in each.
    if any(wrapper.static_graph for wrapper in wrappers):
        raise InputError(
            "DistributedDataParallel(static_graph=True) cannot be accumulated: its reducer counts the "
            "backward "
            "passes that no_sync() leaves out. Leave out static_graph=True."
        )


def _hook_of(wrapper: Any) -> str | None:
    hooks = getattr(wrapper, "_comm_hooks", ())
    # A Python hook; the entry is (callable, state).
    if hooks:
        return getattr(hooks[0][0], "__qualname__", repr(hooks[0][0]))
    # A built-in one is known to the C++ logger alone.
    return wrapper._get_ddp_logging_data().get("comm_hook") or None
