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
from .advise_options import WindowToJudge, given_noise, window_to_judge
from .arms import losses_and_noise
from .checks import check_choice, offered_optimizer
from .exchange import check_ranks, rank_and_count, with_exchange_time
from .fit import CAUTIOUS_MARGIN, busy
from .on_torch import torch_threads
from .options import AdviseOptions as Options
from .shared_options import Interrupted, Progress, Show, given_options, resolve_recipe, silent, versions
from .study_common import stream
from .trial_run import TrialRun, coupling_error, microbatches_to_time, prepare_trial

DEFAULTS = Options()
ROUNDS = 20  # windows that are timed
PARTS = 8  # micro-batches of the recipe's batch while its noise is measured


def advise(recipe: str | Recipe | None, options: Options = DEFAULTS, *, progress: Show = silent) -> Advice:
    """Judge whether accumulation shortens a training, of a recipe or with the numbers of the options."""
    start = time.monotonic()
    task = None if recipe is None else resolve_recipe(recipe, options)
    noise, command = given_noise(options), given_options(options)
    options = replace(options, ranks=check_ranks(options.ranks, rank_and_count()[1]))
    times = _given_times(options, noise) if task is None else None
    # `window_to_judge` raises here for unusable options, before anything is measured.
    measurements = _Measurements(options, window_to_judge(task, options), command, noise, times=times)
    if task is None:
        measurements.parameters = options.parameters
        return _report(measurements, None, start, partial=False)
    measurements.options, measurements.notes = with_exchange_time(task, options)
    with torch_threads(options.threads or torch.get_num_threads()), torch.random.fork_rng():
        try:
            _measure(measurements, task, progress)
        except KeyboardInterrupt:
            if measurements.times is None:
                raise
            raise Interrupted(_report(measurements, task, start, partial=True)) from None
    return _report(measurements, task, start, partial=False)


@dataclass
class _Measurements:
    """Options and measurements so far. A value that is None is not measured yet, or cannot be."""

    options: Options
    window: WindowToJudge
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


def _measure(measurements: _Measurements, recipe: Recipe, progress: Show) -> None:
    """Predict memory, time windows and measure the noise of a recipe."""
    options = measurements.options
    updates = options.updates or recipe.updates
    total = 1 + ROUNDS + (updates if measurements.noise is None else 0)
    recipe.require("learning_rates", by="superbatch advise")
    trial = prepare_trial(
        recipe,
        optimizer=offered_optimizer(recipe, options.optimizer),
        dtype="float32",
        device=options.device,
        samples=max(2, recipe.batch_size, options.batch_size or 0, options.microbatch_size or 0),
    )
    measurements.parameters = options.parameters or sum(each.numel() for each in trial.model.parameters())
    measurements.notes += tuple(busy())
    coupled = coupling_error(trial)
    if coupled is not None:
        trial = replace(trial, coupled=True)
    measurements.limit = limit = memory_limit(trial.device)

    def largest(samples: int) -> int:
        """Halve the samples until their peak fits into memory."""
        while samples > 1 and (_peak(trial, samples) or 0) > limit.bytes * (1 - CAUTIOUS_MARGIN):
            samples = -(-samples // 2)
        return samples

    measurements.window = window_to_judge(recipe, options, largest=largest)
    size = measurements.window.microbatch_size
    measurements.peak = _peak(trial, size)
    whole = size * measurements.window.accumulation_steps
    if whole <= trial.samples:
        measurements.whole = _peak(trial, whole)
    progress(Progress(1, total, "predicted memory"))
    measurements.times = _times(
        trial, size, options, lambda rounds: progress(Progress(1 + rounds, total, "timed windows"))
    )
    if measurements.noise is not None:
        return
    if coupled is not None:
        measurements.noise_from = "not measured"
        measurements.notes += (
            f"The noise scale was not measured, because samples influence each other: {coupled}",
        )
        return
    _measure_noise(measurements, trial, updates, progress, total=total)


def _peak(trial: TrialRun, samples: int) -> int | None:
    """Predict the bytes of an update of one micro-batch; None if they cannot be predicted."""
    try:
        return trial.predicted(predict_peak, samples).bytes
    except PredictionError:
        return None


def _times(trial: TrialRun, samples: int, options: Options, timed: Callable[[int], None]) -> Times:
    """Return the times of a window: those of the options, else the lower quartile over `ROUNDS` windows."""
    trainer, each, update, count = trial.trainer(), list[float](), list[float](), 2
    for number in range(ROUNDS):
        micro, rest = trainer.time(trial.window_of(samples, count=count))
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
        source=f"measured on {trial.device}" if None in given else "given",
    )


def _measure_noise(
    measurements: _Measurements, trial: TrialRun, updates: int, progress: Show, *, total: int
) -> None:
    """Train the recipe on its own batch until the updates are made or the time limit is over."""
    recipe, options, name = trial.recipe, measurements.options, trial.optimizer
    # A learning rate for another batch would not train this one.
    own = None if options.batch_stated else options.learning_rate
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = recipe.model(0).to(options.device)
    size = recipe.batch_size
    noises = losses_and_noise(
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
        measurements.noise = noise
        measurements.noise_from = f"measured over {update} updates of {size} samples"
        progress(Progress(1 + ROUNDS + update, total, f"update {update}"))
        if time.monotonic() > end:
            return


def _report(measurements: _Measurements, recipe: Recipe | None, start: float, *, partial: bool) -> Advice:
    """Judge the measurements, and add what was run to the report."""
    assert measurements.times is not None
    measured = measurements.noise
    noise = measured if isinstance(measured, NoiseRange) else noise_range(measured)
    notes, models = measurements.notes, ()
    if isinstance(measured, Noise):
        models = measured.models
        if measured.reason is not None:
            notes += (f"The noise scale was not determined: {measured.reason}.",)
    made_with = versions(torch=torch.__version__)
    report = judge(
        microbatch_size=measurements.window.microbatch_size,
        accumulation_steps=measurements.window.accumulation_steps,
        noise=noise,
        models=models,
        times=measurements.times,
        ranks=measurements.options.ranks,
        noise_from=measurements.noise_from,
        alternative=_alternative(measurements, recipe, noise),
        parameters=measurements.parameters,
        limit=measurements.limit,
        peak=measurements.peak,
        whole=measurements.whole,
    )
    return replace(
        report,
        versions={**made_with, "platform": f"{made_with['platform']}, {os.cpu_count()} cores"},
        command=measurements.command,
        notes=notes,
        recipe=None if recipe is None else recipe.name,
        seconds=time.monotonic() - start,
        partial=partial,
    )


def _alternative(measurements: _Measurements, recipe: Recipe | None, noise: NoiseRange) -> Scaling | None:
    """Return the optimizer's settings without accumulation, by `rescale`; None if they are not known."""
    options = measurements.options
    name, rate, factories = options.optimizer or "adamw", options.learning_rate, OPTIMIZERS
    if recipe is not None:
        name, factories = offered_optimizer(recipe, options.optimizer), recipe.optimizers
        rate = recipe.learning_rates[name]
    if rate is None:
        return None
    check_choice("optimizer", name, factories)
    optimizer = factories[name]([torch.nn.Parameter(torch.zeros(1))], rate)
    batch = measurements.window.microbatch_size * options.ranks
    large = measurements.window.accumulation_steps * batch
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
