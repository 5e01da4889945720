"""Options of a comparison, and their checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from superbatch.errors import InputError

from ..recipes import Recipe
from ..report.comparison import TOLERANCES
from .backends import check_backend


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a comparison; None stands for the recipe's own value.

    Attributes:
        splits: ``"5x20,80/15/5"`` or a sequence of such; the real batch is added where it is missing.
        updates: of each run.
        runs: seeds 0, 1, ...
        dtype: ``"float32"`` or ``"float64"``.
        optimizer: one that the recipe allows.
        learning_rate: positive.
        batch_size: samples of one update; by default what the splits make.
        include_wrong: add the wrong ways beside the right one, and a tail to each epoch.
        margin: a difference of the metric that does not matter, in its unit.
        backend: ``"torch"``; or ``"jax"``, ``"tensorflow"``, ``"keras"``, which train the digits task.
        threads: of torch, in each process.
        workers: processes; 1 trains in this one.
        data: folder of data, for a recipe that reads one.

    Examples:
        >>> Options(runs=2, dtype="float64").runs
        2
    """

    splits: str | Sequence[str] | None = None
    updates: int | None = None
    runs: int = 10
    dtype: str = "float32"
    optimizer: str | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    include_wrong: bool = False
    margin: float | None = None
    backend: str = "torch"
    threads: int = 1
    workers: int = 1
    data: str | Path | None = None


def check_options(recipe: str | Recipe, options: Options) -> None:
    """Refuse values that no recipe can take.

    Args:
        recipe: a name or a recipe.
        options: what was asked.

    Raises:
        InputError: with what was given, what is wrong with it and what to do.
    """
    for name in ("updates", "runs", "batch_size", "threads", "workers"):
        value = getattr(options, name)
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"{name}={value!r} is no count. Give an integer of at least 1.")
    for name in ("margin", "learning_rate"):
        value = getattr(options, name)
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            raise InputError(f"{name}={value!r} is not positive. Give a number above 0.")
    if options.dtype not in TOLERANCES:
        raise InputError(
            f"dtype={options.dtype!r}: "
            "a comparison needs to know how far rounding can go. "
            f"Use one of {', '.join(TOLERANCES)}."
        )
    check_backend(options.backend, recipe, data=options.data, threads=options.threads)
    if options.workers > 1 and options.runs > 1 and not isinstance(recipe, str):
        raise InputError(
            f"workers={options.workers} with a Recipe object: "
            "a worker process loads the recipe by its name. "
            "Pass the name, such as package.module:function or file.py:function, or workers=1."
        )


def asked(options: Options) -> dict[str, str]:
    """Return the options as a report keeps them.

    Args:
        options: of a comparison.

    Returns:
        Name of an option -> its value, without those that were left to the recipe.

    Examples:
        >>> asked(Options(splits=["5x20", "80/15/5"]))["splits"]
        '5x20,80/15/5'
    """
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    values["splits"] = options.splits if isinstance(options.splits, str | None) else ",".join(options.splits)
    return {name: str(value) for name, value in values.items() if value is not None}
