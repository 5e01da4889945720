"""Checks of the options of an advice, and the numbers of micro-batches and samples to judge."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from superbatch.errors import InputError
from superbatch.tuning.noise_range import NoiseRange

from ..recipes import Recipe
from .checks import check_counts, check_memory_device, check_positive
from .options import AdviseOptions as Options

STEPS = 8  # accumulation steps to judge by default
COUNTS = ("microbatch_size", "accumulation_steps", "batch_size", "ranks", "parameters", "updates", "threads")


def check_options(options: Options) -> None:
    """Raise `InputError` for options that cannot be used, before anything is measured."""
    check_counts(options, *COUNTS)
    check_positive(options, "learning_rate", "microbatch_seconds", "seconds")
    for name in ("update_seconds", "all_reduce_seconds", "weight_decay"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < math.inf:
            raise InputError(f"{name}={value!r} is out of range. Give 0 or more.")
    if options.beta2 is not None and not 0 < options.beta2 < 1:
        raise InputError(f"beta2={options.beta2!r} is out of range. Give a number between 0 and 1.")
    check_memory_device(options.device)


class WindowToJudge(NamedTuple):
    """Accumulation to judge: the samples of a micro-batch and the number of micro-batches."""

    microbatch_size: int
    accumulation_steps: int


def window_to_judge(
    recipe: Recipe | None, options: Options, *, largest: Callable[[int], int] = int
) -> WindowToJudge:
    """Return the accumulation to judge: of micro-batch, steps and batch, two determine the third.

    By default the micro-batch is the recipe's batch and there are eight of them. If that does not fit into
    memory, the batch is the recipe's. `largest` returns the largest micro-batch of at most a given size that
    fits.
    """
    check_options(options)
    size, steps, batch = options.microbatch_size, options.accumulation_steps, options.batch_size
    if None not in (size, steps, batch):
        raise InputError(
            f"microbatch_size={size}, accumulation_steps={steps} and batch_size={batch}: two of them "
            "determine the third. Leave one out."
        )
    if recipe is None and [size, steps, batch].count(None) > 1:
        raise InputError(
            "Without a recipe the accumulation to judge is not known. Give --microbatch-size, and "
            "--accumulation-steps or --batch-size."
        )
    own = 0 if recipe is None else recipe.batch_size  # 0 is not used: without a recipe the options suffice
    if size is None:
        size = _size(own, options, largest)
    if steps is None:
        per_rank = math.ceil(batch / options.ranks) if batch else own
        steps = math.ceil(per_rank / size)
        if batch is None and steps == 1:  # the recipe's batch fits
            steps = STEPS
    if steps < 2:
        raise InputError(
            f"A batch of {batch} is one micro-batch of {size} on each rank, so there is no accumulation to "
            "judge. Give smaller micro-batches, a larger batch, or --accumulation-steps."
        )
    return WindowToJudge(size, steps)


def _size(own: int, options: Options, largest: Callable[[int], int]) -> int:
    """Return the samples of a micro-batch if the options do not state them; `own` is the recipe's batch."""
    steps, batch = options.accumulation_steps, options.batch_size
    if batch is None:
        return largest(own)
    if steps is None:
        return largest(math.ceil(batch / options.ranks))
    return max(1, batch // (steps * options.ranks))


def given_noise(options: Options) -> NoiseRange | None:
    """Return the range of the noise scale that the options give; None if it is to be measured."""
    value, low, high = options.noise, options.noise_low, options.noise_high
    if value is None and low is None and high is None:
        return None
    check_positive(options, "noise")
    low = (0.0 if value is None else value) if low is None else low
    high = (math.inf if value is None else value) if high is None else high
    middle = low if value is None else value
    if not (0 <= low <= middle <= high and high > 0):
        raise InputError(
            f"The noise scale {middle:g} is outside of its interval, {low:g} to {high:g}. "
            "Give 0 <= --noise-low <= --noise <= --noise-high."
        )
    return NoiseRange(value, low, high)
