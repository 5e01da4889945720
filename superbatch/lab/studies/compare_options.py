"""Options of a comparison, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from superbatch.errors import InputError

from ..recipes import Recipe
from ..report.comparison import TOLERANCES
from .backends import check_backend
from .shared_options import check_counts, check_positive


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a comparison; None stands for the recipe's own value."""

    # "5x20,80/15/5" or a sequence of such; the real batch is added where it is missing
    splits: str | Sequence[str] | None = None
    updates: int | None = None  # of each run
    runs: int = 10  # seeds 0, 1, ...
    dtype: str = "float32"  # "float32" or "float64"
    optimizer: str | None = None  # one that the recipe allows
    learning_rate: float | None = None  # positive
    batch_size: int | None = None  # samples of one update; by default what the splits make
    include_wrong: bool = False  # add the wrong ways beside the right one, and a tail to each epoch
    margin: float | None = None  # a difference of the metric that does not matter, in its unit
    # "torch"; or "jax", "tensorflow", "keras", which train the digits task
    backend: str = "torch"
    threads: int = 1  # of torch, in each process
    workers: int = 1  # processes; 1 trains in this one
    data: str | Path | None = None  # folder of data, for a recipe that reads one


def check_options(recipe: str | Recipe, options: Options) -> None:
    """Refuse values that no recipe can take."""
    check_counts(options, "updates", "runs", "batch_size", "threads", "workers")
    check_positive(options, "margin", "learning_rate")
    if options.dtype not in TOLERANCES:
        raise InputError(
            f"dtype={options.dtype!r}: a comparison needs to know how far rounding can go. Use one of "
            f"{', '.join(TOLERANCES)}."
        )
    check_backend(options.backend, recipe, data=options.data, threads=options.threads)
    if options.workers > 1 and options.runs > 1 and not isinstance(recipe, str):
        raise InputError(
            f"workers={options.workers} with a Recipe object: a worker process loads the recipe by its name. "
            "Pass the name, such as package.module:function or file.py:function, or workers=1."
        )
