"""Options of a fit, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from superbatch.errors import InputError

from ..recipes import Recipe
from .shared_options import check_counts, check_memory_device, offered_optimizer

DTYPES = ("float32", "float64", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a fit; None stands for the recipe's own value."""

    batch_size: int | None = None  # samples of one update
    limit: int | None = None  # bytes that may be used beyond what is in use; None: what the device has
    optimizer: str | None = None  # one that the recipe allows
    dtype: str = "float32"  # "float32", "float64" or "bfloat16"
    # of the micro-batches to measure; None: the largest that fits and its halves
    sizes: Sequence[int] | None = None
    device: str = "cpu"  # "cpu" or "cuda" (not run on a GPU yet)
    threads: int | None = None  # of torch; None: as many as torch takes
    seconds: float = 30.0  # for measuring, roughly; what has not been measured by then stays predicted
    data: str | Path | None = None  # folder of data, for a recipe that reads one


def check_options(recipe: Recipe, options: Options) -> None:
    """Refuse values that cannot be used."""
    check_counts(options, "batch_size", "limit", "threads")
    if not options.seconds > 0:
        raise InputError(f"seconds={options.seconds!r}: nothing is measured in that time. Give more.")
    if options.dtype not in DTYPES:
        raise InputError(f"dtype={options.dtype!r} cannot be fitted. Use one of {', '.join(DTYPES)}.")
    offered_optimizer(recipe, options.optimizer)
    check_memory_device(options.device)
    batch_size = options.batch_size or recipe.batch_size
    for size in options.sizes or ():
        if type(size) is not int or not 1 <= size <= batch_size:
            raise InputError(
                f"A micro-batch of {size!r} samples: the batch has {batch_size}, and a micro-batch is a part "
                f"of it. Give sizes from 1 to {batch_size}, or a larger batch_size."
            )
