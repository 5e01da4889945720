"""What `virtual_batch` is given, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError, explain


def device_of(parameters: Sequence[Tensor]) -> torch.device:
    """Return where the parameters are; the CPU if there are none."""
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
                f"model={model!r}", "it is no module and no list of modules", "give an nn.Module or several"
            )
        )
    return models


def check(rng: Any, on_gather: Any, device_budget: Any, *, paranoid: bool, compile: bool) -> None:
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
    if device_budget is not None and (isinstance(device_budget, bool) or not isinstance(device_budget, int)):
        raise InputError(
            explain(f"device_budget={device_budget!r}", "it is no number of bytes", "give an int")
        )
    if paranoid and compile:
        raise InputError(
            explain(
                "paranoid=True with compile=True",
                "paranoid mode works out each operation alone, which is not what would be compiled",
                "look with paranoid=True alone, and compile in the training",
            )
        )
