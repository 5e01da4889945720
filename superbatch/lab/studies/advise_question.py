"""Checks of the options of an advice, and the numbers of micro-batches and samples in question."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from superbatch.errors import InputError
from superbatch.tuning.noise_range import NoiseRange

from ..recipes import Recipe
from .options import AdviseOptions as Options
from .shared_options import check_counts, check_memory_device, check_positive

STEPS = 8  # accumulation steps in question, where nothing is said
COUNTS = ("microbatch_size", "accumulation_steps", "batch_size", "ranks", "parameters", "updates", "threads")


def check_options(options: Options) -> None:
    """Refuse numbers that cannot be used, before anything is measured."""
    check_counts(options, *COUNTS)
    check_positive(options, "learning_rate", "microbatch_seconds", "seconds")
    for name in ("update_seconds", "all_reduce_seconds", "weight_decay"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < math.inf:
            raise InputError(f"{name}={value!r} is out of range. Give 0 or more.")
    if options.beta2 is not None and not 0 < options.beta2 < 1:
        raise InputError(f"beta2={options.beta2!r} is out of range. Give a number between 0 and 1.")
    check_memory_device(options.device)


class Question(NamedTuple):
    """Number of micro-batches, and of the samples of each."""

    microbatch_size: int
    accumulation_steps: int


def question(recipe: Recipe | None, options: Options, *, largest: Callable[[int], int] = int) -> Question:
    """Settle what is in question: of micro-batch, accumulation steps and batch two say the third.

    Where nothing is said: a micro-batch as large as the recipe's batch, and eight of them; or, where that
    does not fit, as many as make the batch.
    """
    check_options(options)
    size, steps, batch = options.microbatch_size, options.accumulation_steps, options.batch_size
    if None not in (size, steps, batch):
        raise InputError(
            f"microbatch_size={size}, accumulation_steps={steps} and batch_size={batch}: two of them say the "
            "third. Leave one out."
        )
    if recipe is None and [size, steps, batch].count(None) > 1:
        raise InputError(
            "An advice without a recipe: it is not known how many micro-batches of how many samples are in "
            "question. Give --microbatch-size, and --accumulation-steps or --batch-size."
        )
    if size is None:
        size = _size(recipe, options, largest)
    if steps is None:
        per_rank = math.ceil(batch / options.ranks) if batch else _of_recipe(recipe)
        steps = math.ceil(per_rank / size)
        if batch is None and steps == 1:
            steps = STEPS
    if steps < 2:
        raise InputError(
            f"A batch of {batch} in one micro-batch of {size} on each rank: that is no accumulation, and "
            "nothing is in question. Give smaller micro-batches, a larger batch, or --accumulation-steps."
        )
    return Question(size, steps)


def _size(recipe: Recipe | None, options: Options, largest: Callable[[int], int]) -> int:
    """The samples of a micro-batch, where they are not said."""
    steps, batch = options.accumulation_steps, options.batch_size
    if batch is None:
        return largest(_of_recipe(recipe))
    if steps is None:
        return largest(math.ceil(batch / options.ranks))
    return max(1, batch // (steps * options.ranks))


def _of_recipe(recipe: Recipe | None) -> int:
    assert recipe is not None
    return recipe.batch_size


def given_noise(options: Options) -> NoiseRange | None:
    """The noise scale that was given, as a range; None: it is to be measured."""
    value, low, high = options.noise, options.noise_low, options.noise_high
    if value is None and low is None and high is None:
        return None
    if value is not None and not 0 < value < math.inf:
        raise InputError(f"noise={value!r} is not a positive number of samples. Give a number above 0.")
    low = (0.0 if value is None else value) if low is None else low
    high = (math.inf if value is None else value) if high is None else high
    middle = low if value is None else value
    if not (0 <= low <= middle <= high and high > 0):
        raise InputError(
            f"The noise scale {middle:g} is outside of its interval, {low:g} to {high:g}. "
            "Give 0 <= --noise-low <= --noise <= --noise-high."
        )
    return NoiseRange(value, low, high)
