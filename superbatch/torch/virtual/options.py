"""Options of `virtual_batch`, and their checks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from superbatch.errors import InputError, explain

from .run.log import OnGather

RandomNumbers = Literal["microbatch", "batch"]


class Options(NamedTuple):
    """Options of `virtual_batch`, checked.

    Attributes:
        reduces: gradients are averaged over the ranks when the block ends; False: by whoever opened it.
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
    """Return the modules.

    Raises:
        InputError: there are none.
    """
    models = (
        [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, (list, tuple)) else []
    )
    if not models or not all(isinstance(one, nn.Module) for one in models):
        raise InputError(
            explain(
                f"model={model!r}",
                "it is no module and no list of modules",
                "give an nn.Module, or a list of them",
            )
        )
    return models


def checked_device(device: Any, parameters: Iterable[Tensor]) -> torch.device:
    """Return the device to compute on: the one given, or that of the parameters.

    Raises:
        InputError: it is no device, one that is not there, or one without memory.
    """
    if device is None:
        return device_of(parameters)
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise InputError(explain(f"device={device!r}", why, "give a device that torch has here")) from error
    if found.type == "meta":
        raise InputError(explain(f"device={device!r}", "it computes no numbers", "give another device"))
    return found


def check(
    rng: Any, on_gather: Any, device_budget: Any, *, paranoid: bool, compile: bool, group: Any = None
) -> None:
    """Check what is chosen among few.

    Raises:
        InputError: an option is unknown, or two do not go together.
    """
    for name, value, known in (
        ("rng", rng, ("microbatch", "batch")),
        ("on_gather", on_gather, ("ok", "warn", "error")),
    ):
        if value not in known:
            raise InputError(explain(f"{name}={value!r}", "it is unknown", f"use one of {', '.join(known)}"))
    number = isinstance(device_budget, int) and not isinstance(device_budget, bool)
    if device_budget is not None and not (number and device_budget >= 0):
        raise InputError(
            explain(f"device_budget={device_budget!r}", "it is no number of bytes", "give an int, 0 or more")
        )
    for name, value in (("paranoid", paranoid), ("compile", compile)):
        if not isinstance(value, bool):
            raise InputError(explain(f"{name}={value!r}", "it is no bool", "give True or False"))
    if group is not None and not hasattr(group, "size"):
        raise InputError(
            explain(f"group={group!r}", "it is no process group", "give one of torch.distributed")
        )
    if paranoid and compile:
        raise InputError(
            explain(
                "paranoid=True with compile=True",
                "paranoid mode works out each operation alone, which is not what would be compiled",
                "look with paranoid=True alone, and compile in the training",
            )
        )
