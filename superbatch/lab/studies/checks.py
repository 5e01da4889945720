"""Checks of options that several commands share. Each raises `InputError`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from superbatch.errors import InputError

from ..recipes import Recipe


def check_counts(options: Any, *names: str) -> None:
    """Raise `InputError` unless each of these options is None or an integer of at least 1."""
    for name in names:
        value = getattr(options, name)
        # `type`, not `isinstance`: True is an int, too.
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"{name}={value!r} is not a positive integer. Give 1 or more.")


def check_positive(options: Any, *names: str) -> None:
    """Raise `InputError` unless each of these options is None or a finite number above 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise InputError(f"{name}={value!r} is not positive. Give a number above 0.")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise `InputError` unless the value of an option is one of the choices."""
    if value not in (choices := tuple(choices)):
        raise InputError(f"{name}={value!r} is not supported. Use one of {', '.join(choices)}.")


def check_workers(recipe: str | Recipe, options: Any) -> None:
    """Raise `InputError` for several worker processes with a `Recipe` object instead of a name."""
    # A recipe holds closures, which cannot be sent to another process; a name can.
    if options.workers > 1 and options.runs != 1 and not isinstance(recipe, str):
        raise InputError(
            f"workers={options.workers} with a Recipe object: each worker loads the recipe by its name. Pass "
            "package.module:function or file.py:function, or workers=1."
        )


def check_memory_device(device: str) -> None:
    """Raise `InputError` for a device whose memory is not measured, or which is not available."""
    import torch  # here, because a comparison on another framework runs without torch

    if device.split(":", maxsplit=1)[0] not in ("cpu", "cuda"):
        raise InputError(f"device={device!r}: memory is measured on CPU and CUDA only. Use cpu or cuda.")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device={device!r}, but torch finds no CUDA device. Use cpu.")


def offered_optimizer(recipe: Recipe, name: str | None) -> str:
    """Return the name of the optimizer, by default the recipe's; it must be one that the recipe offers."""
    found = name or recipe.default_optimizer
    if found not in recipe.offered:
        raise InputError(
            f"optimizer={found!r}: the recipe {recipe.name!r} does not offer it. Use one of "
            f"{', '.join(recipe.offered)}."
        )
    return found


def optimizer_and_rate(recipe: Recipe, options: Any, *, by: str) -> tuple[str, float]:
    """Return the optimizer and the learning rate of a training, by default the recipe's."""
    if options.learning_rate is None:
        recipe.require("learning_rates", by=f"{by} without --lr")
    name = offered_optimizer(recipe, options.optimizer)
    rate = recipe.learning_rates[name] if options.learning_rate is None else options.learning_rate
    if not 0 < rate < math.inf:  # nothing else checks a recipe's own rate
        raise InputError(f"learning_rate={rate!r} is not positive. Give a number above 0.")
    return name, rate
