"""Checks of options that several commands share, the options as a report keeps them, and the interruption."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from superbatch.errors import InputError

from ..recipes import Recipe


@dataclass(frozen=True)
class Progress:
    """Progress of a command: pieces of work done, of all that are planned, and the latest of them."""

    done: int
    total: int
    # A text, or what a comparison or a survey has just completed: (seed, arm, value); None between.
    finished: Any = None


class Interrupted(KeyboardInterrupt):
    """A study was interrupted by Ctrl-C; what it had measured by then is in `report`, marked as partial."""

    def __init__(self, report: Any) -> None:
        self.report = report


def asked(options: Any) -> dict[str, str]:
    """Return the options that were given, as text."""
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    if isinstance(values.get("splits"), Sequence) and not isinstance(values["splits"], str):
        values["splits"] = ",".join(values["splits"])
    return {name: str(value) for name, value in values.items() if value is not None}


def check_counts(options: Any, *names: str) -> None:
    """Refuse options that must be None or an integer of at least 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"{name}={value!r} is no count. Give an integer of at least 1.")


def check_positive(options: Any, *names: str) -> None:
    """Refuse options that must be None or a finite number above 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise InputError(f"{name}={value!r} is not positive. Give a number above 0.")


def check_memory_device(device: str) -> None:
    """Refuse a device whose memory is not counted, and one that is not here."""
    import torch  # a comparison on another framework needs the other checks without it

    if device.split(":", maxsplit=1)[0] not in ("cpu", "cuda"):
        raise InputError(f"device={device!r}: memory is counted on CPU and CUDA only. Use cpu or cuda.")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device={device!r}, but torch sees no CUDA device here. Use cpu.")


def offered_optimizer(recipe: Recipe, name: str | None) -> str:
    """Return the optimizer that was asked for, by default the recipe's own; refuse one it does not offer."""
    found = name or recipe.default_optimizer
    if found not in recipe.offered:
        raise InputError(
            f"optimizer={found!r}: the recipe {recipe.name!r} does not offer it. Use one of "
            f"{', '.join(recipe.offered)}."
        )
    return found
