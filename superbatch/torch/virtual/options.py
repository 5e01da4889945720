"""Options of `virtual_batch`, and their checks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from superbatch.errors import InputError

from .run.log import OnGather

RandomNumbers = Literal["microbatch", "batch"]


class Options(NamedTuple):
    """Checked options of `virtual_batch`.

    Attributes:
        size: micro-batch size, as `microbatch_size` of `virtual_batch`.
        device, rng, device_budget, on_gather, paranoid, compile, group: as in `virtual_batch`.
        reduces: average gradients over the ranks at the end of the block; False if its caller does.
    """

    size: int | Literal["auto"]
    device: torch.device
    rng: RandomNumbers
    device_budget: int | None
    on_gather: OnGather
    paranoid: bool
    compile: bool
    group: Any
    reduces: bool = True


def device_of(parameters: Iterable[Tensor]) -> torch.device:
    """Return the device of the parameters; the CPU if there are none."""
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def checked_models(model: Any) -> list[nn.Module]:
    """Return the models as a list; raise `InputError` if the argument is no module or list of modules."""
    models = (
        [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, (list, tuple)) else []
    )
    if not models or not all(isinstance(one, nn.Module) for one in models):
        raise InputError(
            f"model={model!r} is not an nn.Module or a list of modules. Pass an nn.Module, or a list of them."
        )
    return models


def checked_device(device: Any, parameters: Iterable[Tensor]) -> torch.device:
    """Return the device of the computation: the given one, or that of the parameters.

    Raises:
        InputError: the device is unknown, missing on this machine, or the meta device.
    """
    if device is None:
        return device_of(parameters)
    try:
        # An allocation, because torch.device("cuda:7") needs no such GPU. It also gives "cuda" its index.
        available = torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise InputError(
            f"device={device!r} is not available: {why}. Pass a device that torch has on this machine."
        ) from error
    if available.type == "meta":
        raise InputError(f"device={device!r} computes shapes only. Pass a CPU or accelerator device.")
    return available


def check(
    rng: Any, on_gather: Any, device_budget: Any, *, paranoid: bool, compile: bool, group: Any = None
) -> None:
    """Raise `InputError` if an option of `virtual_batch` has an unknown value, or two exclude each other."""
    for name, value, allowed in (
        ("rng", rng, ("microbatch", "batch")),
        ("on_gather", on_gather, ("ok", "warn", "error")),
    ):
        if value not in allowed:
            raise InputError(f"{name}={value!r} is unknown. Use one of {', '.join(allowed)}.")
    # A bool is an int in Python, so device_budget=True would be one byte.
    number = isinstance(device_budget, int) and not isinstance(device_budget, bool)
    if device_budget is not None and not (number and device_budget >= 0):
        raise InputError(
            f"device_budget={device_budget!r} is not a number of bytes. Pass an int of at least 0, or None."
        )
    for name, value in (("paranoid", paranoid), ("compile", compile)):
        if not isinstance(value, bool):
            raise InputError(f"{name}={value!r} is not a bool. Pass True or False.")
    # By attribute, because builds of torch without distributed have no ProcessGroup class.
    if group is not None and not hasattr(group, "size"):
        raise InputError(
            f"group={group!r} is not a process group. Pass the result of torch.distributed.new_group()."
        )
    if paranoid and compile:
        raise InputError(
            "paranoid=True checks single operations, so it cannot be combined with compile=True. "
            "Check once with paranoid=True alone, then train with compile=True."
        )
