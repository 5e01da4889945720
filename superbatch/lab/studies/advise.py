"""Advice on accumulation: measure times and noise of a recipe, and let `superbatch.tuning.advice` judge them.

1. Predict the peak of a micro-batch, and compare it with the memory.
2. Time windows of the micro-batches to judge.
3. Train the recipe with its own batch and learning rate, and measure the noise scale.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from superbatch.errors import InputError, OptimizerError
from superbatch.results.advice import Advice
from superbatch.results.memory import Limit
from superbatch.results.noise import Noise
from superbatch.results.scaling import Scaling
from superbatch.torch.memory.limits import memory_limit
from superbatch.torch.sizes.predict import PredictionError, predict_peak
from superbatch.torch.tuning.scaling import rescale
from superbatch.tuning.advice import Times
from superbatch.tuning.advice import advise as judge
from superbatch.tuning.noise_range import NoiseRange, noise_range
from superbatch.tuning.search import time_per_sample

from ..recipes import OPTIMIZERS, Recipe
from .advise_question import Question, given_noise, question
from .arms import measured
from .checks import check_choice, offered_optimizer
from .exchange import check_ranks, exchanged, started_on
from .fit import CARE, busy
from .on_torch import torch_threads
from .options import AdviseOptions as Options
from .rehearsal import Rehearsal, microbatches_to_time, prepare, refusal
from .shared_options import Interrupted, Progress, Show, asked, loaded, silent, versions
from .study_common import stream

DEFAULTS = Options()
ROUNDS = 20  # windows that are timed
PARTS = 8  # micro-batches of the recipe's batch while its noise is measured


def advise(recipe: str | Recipe | None, options: Options = DEFAULTS, *, progress: Show = silent) -> Advice:
    """Judge whether accumulation shortens a training, of a recipe or with the numbers of the options."""
    start = time.monotonic()
    task = None if recipe is None else loaded(recipe, options)
    noise, command = given_noise(options), asked(options)
    options = replace(options, ranks=check_ranks(options.ranks, started_on()[1]))
    times = _given_times(options, noise) if task is None else None
    # `question` raises here for unusable options, before anything is measured.
    found = _Found(options, question(task, options), command, noise, times=times)
    if task is None:
        found.parameters = options.parameters
        return _report(found, None, start, partial=False)
    found.options, found.notes = exchanged(task, options)
    with torch_threads(options.threads or torch.get_num_threads()), torch.random.fork_rng():
        try:
            _measure(found, task, progress)
        except KeyboardInterrupt:
            if found.times is None:
                raise
            raise Interrupted(_report(found, task, start, partial=True)) from None
    return _report(found, task, start, partial=False)


@dataclass
class _Found:
    """Options and measurements so far. A value that is None is not measured yet, or cannot be."""

    options: Options
    question: Question
    command: dict[str, str]  # the options as the user gave them
    noise: Noise | NoiseRange | None
    notes: tuple[str, ...] = ()
    noise_from: str = "given"
    times: Times | None = None
    parameters: int | None = None
    limit: Limit | None = None
    peak: int | None = None  # bytes of an update of one micro-batch
    whole: int | None = None  # bytes of an update of the whole batch in one piece


def _given_times(options: Options, noise: NoiseRange | None) -> Times:
    """Return the times that the options give; raise `InputError` if one, or the noise scale, is missing."""
    for flag, value in (
        ("--noise (or --noise-low)", noise),
        ("--micro-seconds", options.microbatch_seconds),
        ("--update-seconds", options.update_seconds),
    ):
        if value is None:
            raise InputError(f"Without a recipe {flag} cannot be measured. Give {flag}, or a recipe.")
    assert options.microbatch_seconds is not None and options.update_seconds is not None
    return Times(
        microbatch=options.microbatch_seconds,
        update=options.update_seconds,
        all_reduce=options.all_reduce_seconds or 0.0,
    )


def _measure(found: _Found, recipe: Recipe, progress: Show) -> None:
    """Predict memory, time windows and measure the noise of a recipe."""
    options = found.options
    updates = options.updates or recipe.updates
    total = 1 + ROUNDS + (updates if found.noise is None else 0)
    recipe.require("learning_rates", by="superbatch advise")
    rehearsal = prepare(
        recipe,
        optimizer=offered_optimizer(recipe, options.optimizer),
        dtype="float32",
        device=options.device,
        samples=max(2, recipe.batch_size, options.batch_size or 0, options.microbatch_size or 0),
    )
    found.parameters = options.parameters or sum(each.numel() for each in rehearsal.model.parameters())
    found.notes += tuple(busy())
    coupled = refusal(rehearsal)
    if coupled is not None:
        rehearsal = replace(rehearsal, coupled=True)
    found.limit = limit = memory_limit(rehearsal.device)

    def largest(samples: int) -> int:
        """Halve the samples until their peak fits into memory."""
        while samples > 1 and (_peak(rehearsal, samples) or 0) > limit.bytes * (1 - CARE):
            samples = -(-samples // 2)
        return samples

    found.question = question(recipe, options, largest=largest)
    size = found.question.microbatch_size
    found.peak = _peak(rehearsal, size)
    whole = size * found.question.accumulation_steps
    if whole <= rehearsal.samples:
        found.whole = _peak(rehearsal, whole)
    progress(Progress(1, total, "predicted memory"))
    found.times = _times(
        rehearsal, size, options, lambda rounds: progress(Progress(1 + rounds, total, "timed windows"))
    )
    if found.noise is not None:
        return
    if coupled is not None:
        found.noise_from = "not measured"
        found.notes += (f"The noise scale was not measured, because samples influence each other: {coupled}",)
        return
    _measure_noise(found, rehearsal, updates, progress, total=total)


def _peak(rehearsal: Rehearsal, samples: int) -> int | None:
    """Predict the bytes of an update of one micro-batch; None if they cannot be predicted."""
    try:
        return rehearsal.predicted(predict_peak, samples).bytes
    except PredictionError:
        return None


def _times(rehearsal: Rehearsal, samples: int, options: Options, timed: Callable[[int], None]) -> Times:
    """Return the times of a window: those of the options, else the lower quartile over `ROUNDS` windows."""
    trainer, each, update, count = rehearsal.trainer(), list[float](), list[float](), 2
    for number in range(ROUNDS):
        micro, rest = trainer.time(rehearsal.window_of(samples, count=count))
        each.append(micro)
        update.append(rest)
        if number == 1:  # the first window is a warm-up
            count = microbatches_to_time(micro)
        timed(number + 1)
    given = (options.microbatch_seconds, options.update_seconds)
    return Times(
        microbatch=time_per_sample(each) if given[0] is None else given[0],
        update=time_per_sample(update) if given[1] is None else given[1],
        all_reduce=options.all_reduce_seconds or 0.0,
        source=f"measured on {rehearsal.device}" if None in given else "given",
    )


def _measure_noise(found: _Found, rehearsal: Rehearsal, updates: int, progress: Show, *, total: int) -> None:
    """Train the recipe on its own batch until the updates are made or the time limit is over."""
    recipe, options, name = rehearsal.recipe, found.options, rehearsal.optimizer
    # A learning rate for another batch would not train this one.
    own = None if options.batch_stated else options.learning_rate
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = recipe.model(0).to(options.device)
    size = recipe.batch_size
    noises = measured(
        recipe,
        model,
        recipe.optimizers[name](model.parameters(), own or recipe.learning_rates[name]),
        stream(recipe.samples, updates * size, seed=0).split(size),
        microbatch_size=-(-size // PARTS),
        # The average is over half of the run: a longer run narrows the interval, and the start, where the
        # signal is strongest, has little weight.
        beta=max(0.98, 1 - 4 / updates),
        preconditioned=True,
    )
    end = time.monotonic() + options.seconds
    for update, (_, noise) in enumerate(noises, start=1):
        found.noise = noise
        found.noise_from = f"measured over {update} updates of {size} samples"
        progress(Progress(1 + ROUNDS + update, total, f"update {update}"))
        if time.monotonic() > end:
            return


def _report(found: _Found, recipe: Recipe | None, start: float, *, partial: bool) -> Advice:
    """Judge the measurements, and add what was run to the report."""
    assert found.times is not None
    noise = found.noise if isinstance(found.noise, NoiseRange) else noise_range(found.noise)
    notes, models = found.notes, ()
    if isinstance(found.noise, Noise):
        models = found.noise.models
        if found.noise.reason is not None:
            notes += (f"The noise scale was not determined: {found.noise.reason}.",)
    made_with = versions(torch=torch.__version__)
    report = judge(
        microbatch_size=found.question.microbatch_size,
        accumulation_steps=found.question.accumulation_steps,
        noise=noise,
        models=models,
        times=found.times,
        ranks=found.options.ranks,
        noise_from=found.noise_from,
        alternative=_alternative(found, recipe, noise),
        parameters=found.parameters,
        limit=found.limit,
        peak=found.peak,
        whole=found.whole,
    )
    return replace(
        report,
        versions={**made_with, "platform": f"{made_with['platform']}, {os.cpu_count()} cores"},
        command=found.command,
        notes=notes,
        recipe=None if recipe is None else recipe.name,
        seconds=time.monotonic() - start,
        partial=partial,
    )


def _alternative(found: _Found, recipe: Recipe | None, noise: NoiseRange) -> Scaling | None:
    """Return the optimizer's settings without accumulation, by `rescale`; None if they are not known."""
    options = found.options
    name, rate, factories = options.optimizer or "adamw", options.learning_rate, OPTIMIZERS
    if recipe is not None:
        name, factories = offered_optimizer(recipe, options.optimizer), recipe.optimizers
        rate = recipe.learning_rates[name]
    if rate is None:
        return None
    check_choice("optimizer", name, factories)
    optimizer = factories[name]([torch.nn.Parameter(torch.zeros(1))], rate)
    batch = found.question.microbatch_size * options.ranks
    large = found.question.accumulation_steps * batch
    scale = noise.value or None
    try:
        # Values of the options are for the recipe's batch, unless the options state the batch to judge.
        if not options.batch_stated:
            _set_given(optimizer, options)
        if recipe is not None:
            rescale(optimizer, recipe.batch_size, large, scale)
        if options.batch_stated:
            _set_given(optimizer, options)
        (scaling, *_) = rescale(optimizer, large, batch, scale)
    except OptimizerError:  # an optimizer of the user's own, which has no scaling rule
        return None
    return scaling


def _set_given(optimizer: torch.optim.Optimizer, options: Options) -> None:
    """Set the optimizer's values that the options give."""
    for group in optimizer.param_groups:
        if options.learning_rate is not None:
            group["lr"] = options.learning_rate
        if options.beta2 is not None and "betas" in group:
            group["betas"] = (group["betas"][0], options.beta2)
        if options.weight_decay is not None and "weight_decay" in group:
            group["weight_decay"] = options.weight_decay
