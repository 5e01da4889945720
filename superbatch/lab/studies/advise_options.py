"""Options of an advice, and the numbers of micro-batches and of their samples in question."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch

from superbatch.errors import InputError
from superbatch.tuning.noise_range import NoiseRange

from ..recipes import Recipe

STEPS = 8
"""Accumulation steps in question, where nothing is said."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an advice; those that are None are measured on the recipe, or taken from it.

    Attributes:
        microbatch_size: samples of a micro-batch on one rank.
        accumulation_steps: in question.
        batch_size: samples of an update in question, on all ranks.
        ranks: that work at the same time.
        noise: the noise scale in samples.
        noise_low: lower end of its range; `noise` where that is given.
        noise_high: upper end; `noise` where that is given, else infinite.
        microbatch_seconds: forward and backward of one micro-batch.
        update_seconds: of the optimizer and what else happens once per update.
        all_reduce_seconds: of the exchange of gradients over ranks, once per update; None: measured if the
            command was started on several ranks, and else none.
        parameters: of the model.
        optimizer: one that the recipe allows; without a recipe sgd, momentum, adam or adamw.
        learning_rate: for the batch in question, where that is stated (see `Options.batch_stated`) or there
            is no recipe; else for the recipe's.
        beta2: likewise, of Adam.
        weight_decay: likewise.
        device: ``"cpu"`` or ``"cuda"``.
        threads: of torch.
        updates: over which the noise is measured, at most.
        seconds: for measuring the noise, roughly.
        data: folder of data, for a recipe that reads one.
    """

    microbatch_size: int | None = None
    accumulation_steps: int | None = None
    batch_size: int | None = None
    ranks: int = 1
    noise: float | None = None
    noise_low: float | None = None
    noise_high: float | None = None
    microbatch_seconds: float | None = None
    update_seconds: float | None = None
    all_reduce_seconds: float | None = None
    parameters: int | None = None
    optimizer: str | None = None
    learning_rate: float | None = None
    beta2: float | None = None
    weight_decay: float | None = None
    device: str = "cpu"
    threads: int | None = None
    updates: int | None = None
    seconds: float = 60.0
    data: str | Path | None = None

    @property
    def batch_stated(self) -> bool:
        """True if these options alone determine the batch in question."""
        return self.batch_size is not None or None not in (self.microbatch_size, self.accumulation_steps)


COUNTS = ("microbatch_size", "accumulation_steps", "batch_size", "ranks", "parameters", "updates", "threads")


def check_options(options: Options) -> None:
    """Refuse numbers that cannot be used, before anything is measured.

    Args:
        options: what was asked.

    Raises:
        InputError: with what was given, what is wrong with it and what to do.

    Examples:
        >>> check_options(Options(beta2=0.95, learning_rate=1e-3))
    """
    for name in COUNTS:
        value = getattr(options, name)
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"{name}={value!r} is no count. Give a positive int.")
    for names, fine, do in (
        (
            ("learning_rate", "microbatch_seconds", "seconds"),
            lambda value: 0 < value < math.inf,
            "more than 0",
        ),
        (
            ("update_seconds", "all_reduce_seconds", "weight_decay"),
            lambda value: 0 <= value < math.inf,
            "0 or more",
        ),
        (("beta2",), lambda value: 0 < value < 1, "a number between 0 and 1"),
    ):
        for name in names:
            value = getattr(options, name)
            if value is not None and not fine(value):
                raise InputError(f"{name}={value!r} is out of range. Give {do}.")
    if options.device.split(":")[0] not in ("cpu", "cuda"):
        raise InputError(
            f"device={options.device!r}: memory is counted on CPU and CUDA only. Use cpu or cuda."
        )
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device={options.device!r}, but torch sees no CUDA device here. Use cpu.")


class Question(NamedTuple):
    """Number of micro-batches, and of the samples of each."""

    microbatch_size: int
    accumulation_steps: int


def question(recipe: Recipe | None, options: Options, *, largest: Callable[[int], int] = int) -> Question:
    """Settle what is in question: of micro-batch, accumulation steps and batch two say the third.

    Where nothing is said: a micro-batch as large as the recipe's batch, and eight of them; or, where that
    does not fit, as many as make the batch.

    Args:
        recipe: what is trained.
        options: what was asked.
        largest: the largest micro-batch of at most this many samples that fits.

    Returns:
        The numbers.

    Raises:
        InputError: too little is said, or what is said contradicts itself.

    Examples:
        >>> question(None, Options(microbatch_size=4, batch_size=512, ranks=8))
        Question(microbatch_size=4, accumulation_steps=16)
    """
    check_options(options)
    size, steps, batch = options.microbatch_size, options.accumulation_steps, options.batch_size
    if None not in (size, steps, batch):
        raise InputError(
            f"microbatch_size={size}, accumulation_steps={steps} and batch_size={batch}: "
            "two of them say the third. "
            "Leave one out."
        )
    if recipe is None and [size, steps, batch].count(None) > 1:
        raise InputError(
            "An advice without a recipe: "
            "it is not known how many micro-batches of how many samples are in question. "
            "Give --microbatch-size, and --accumulation-steps or --batch-size."
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
            f"A batch of {batch} in one micro-batch of {size} on each rank: "
            "that is no accumulation, and nothing is in question. "
            "Give smaller micro-batches, a larger batch, or --accumulation-steps."
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
    """The noise scale that was given, as a range.

    Args:
        options: what was asked.

    Returns:
        The range; None: nothing was given, it is to be measured.

    Raises:
        InputError: the numbers are not positive, or not in order.

    Examples:
        >>> given_noise(Options(noise=1500, noise_high=3000))
        NoiseRange(value=1500, low=1500, high=3000)
        >>> given_noise(Options(noise_low=200))
        NoiseRange(value=None, low=200, high=inf)
    """
    value, low, high = options.noise, options.noise_low, options.noise_high
    if value is None and low is None and high is None:
        return None
    low = (0.0 if value is None else value) if low is None else low
    high = (math.inf if value is None else value) if high is None else high
    middle = low if value is None else value
    if not (0 <= low <= middle <= high and high > 0) or (value is not None and not 0 < value < math.inf):
        raise InputError(
            f"noise={value!r} between {low!r} and {high!r}: "
            "a noise scale is a number of samples, between the ends of its range. "
            "Give --noise-low <= --noise <= --noise-high."
        )
    return NoiseRange(value, low, high)


def asked(options: Options) -> dict[str, str]:
    """The options as a report keeps them.

    Args:
        options: what was asked.

    Returns:
        Name -> value, as text, without those that were left out.

    Examples:
        >>> asked(Options(noise=1500, updates=20))["noise"]
        '1500'
    """
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    return {name: str(value) for name, value in values.items() if value is not None}
