"""Study of the gain from accumulation: measures times and noise of a recipe, for `tuning.advice` to judge.

1. Predict the peak of a micro-batch, to say whether it fits.
2. Time windows of the micro-batches in question.
3. Train the recipe with its own batch and rate, in micro-batches, and measure the noise scale on the way.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
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

from ..recipes import OPTIMIZERS, Recipe, load_recipe
from .advise_question import Question, given_noise, question
from .exchange import check_ranks, exchanged, started_on
from .fit import CARE, busy
from .on_torch import orders, torch_threads
from .options import AdviseOptions as Options
from .participants import measured
from .rehearsal import Rehearsal, microbatches_to_time, prepare, refusal
from .setting import Setting
from .shared_options import Interrupted, asked, offered_optimizer
from .shared_options import Progress as Progress
from .versions import versions

DEFAULTS = Options()

ROUNDS = 20  # windows that are timed

PARTS = 8  # micro-batches that a batch is cut into while its noise is measured


def advise(
    recipe: str | Recipe | None,
    options: Options = DEFAULTS,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Advice:
    """Find out whether accumulation pays for a recipe, or for numbers of a machine that is elsewhere."""
    start = time.monotonic()
    loaded = load_recipe(recipe, data=options.data) if isinstance(recipe, str) else recipe
    given, stated = given_noise(options), options
    options = replace(options, ranks=check_ranks(options.ranks, started_on()[1]))
    if loaded is None:
        return _report(_given(options, given), start, partial=False)
    question(loaded, options)  # what cannot be used is said before anything is measured
    options, notes = exchanged(loaded, options)
    found = _Found(loaded, options, stated=stated, noise=given, notes=notes)
    with torch_threads(options.threads or torch.get_num_threads()), torch.random.fork_rng():
        try:
            _measure(found, progress)
        except KeyboardInterrupt:
            if found.times is None:
                raise
            raise Interrupted(_report(found, start, partial=True)) from None
    return _report(found, start, partial=False)


@dataclass
class _Found:
    """Measurements made so far."""

    recipe: Recipe | None
    options: Options
    stated: Options | None = None  # before anything was measured
    noise: Noise | NoiseRange | None = None
    noise_from: str = "given"
    times: Times | None = None
    parameters: int | None = None
    limit: Limit | None = None
    peak: int | None = None
    whole: int | None = None
    asked_for: Question | None = None
    notes: tuple[str, ...] = ()


def _given(options: Options, noise: NoiseRange | None) -> _Found:
    """Without a recipe there is nothing to measure."""
    for flag, value in (
        ("--noise (or --noise-low)", noise),
        ("--micro-seconds", options.microbatch_seconds),
        ("--update-seconds", options.update_seconds),
    ):
        if value is None:
            raise InputError(f"Without a recipe {flag} cannot be measured. Give {flag}, or a recipe.")
    assert options.microbatch_seconds is not None and options.update_seconds is not None
    times = Times(
        microbatch=options.microbatch_seconds,
        update=options.update_seconds,
        all_reduce=options.all_reduce_seconds or 0.0,
    )
    return _Found(
        None,
        options,
        noise=noise,
        times=times,
        parameters=options.parameters,
        asked_for=question(None, options),
    )


def _measure(found: _Found, progress: Callable[[Progress], None]) -> None:
    recipe, options = found.recipe, found.options
    assert recipe is not None
    updates = options.updates or recipe.updates
    total = 1 + ROUNDS + (updates if found.noise is None else 0)
    rehearsal = prepare(
        recipe,
        optimizer=_optimizer(recipe, options),
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
    found.asked_for = asked_for = question(
        recipe, options, largest=lambda samples: _largest(rehearsal, samples, limit)
    )
    found.peak = _peak(rehearsal, asked_for.microbatch_size)
    whole = asked_for.microbatch_size * asked_for.accumulation_steps
    if whole <= rehearsal.samples:
        found.whole = _peak(rehearsal, whole)
    progress(Progress(1, total, "predicted memory"))

    def timed(rounds: int) -> None:
        progress(Progress(1 + rounds, total, "timed windows"))

    found.times = _times(rehearsal, asked_for.microbatch_size, options, timed)
    if found.noise is not None:
        return
    if coupled is not None:
        found.noise_from = "not measured"
        found.notes += (f"The noise scale was not measured, for samples influence each other: {coupled}",)
        return
    for update, noise in enumerate(_noise(recipe, options, updates), start=1):
        found.noise = noise
        found.noise_from = f"measured over {update} updates of {recipe.batch_size} samples"
        progress(Progress(1 + ROUNDS + update, total, f"update {update}"))


def _optimizer(recipe: Recipe, options: Options) -> str:
    recipe.require("learning_rates", by="superbatch advise")
    return offered_optimizer(recipe, options.optimizer)


def _largest(rehearsal: Rehearsal, samples: int, limit: Limit) -> int:
    """The largest micro-batch that should fit: `samples`, or a half of them, or a half of that, ..."""
    while samples > 1 and (_peak(rehearsal, samples) or 0) > limit.bytes * (1 - CARE):
        samples = -(-samples // 2)
    return samples


def _peak(rehearsal: Rehearsal, samples: int) -> int | None:
    try:
        return rehearsal.predicted(predict_peak, samples).bytes
    except PredictionError:
        return None


def _times(rehearsal: Rehearsal, samples: int, options: Options, timed: Callable[[int], None]) -> Times:
    """Times that were given count; the others are measured, the lower quartile over windows."""
    trainer, each, update, count = rehearsal.trainer(), list[float](), list[float](), 2
    for number in range(ROUNDS):
        micro, rest = trainer.time(rehearsal.window_of(samples, count=count))
        each.append(micro)
        update.append(rest)
        if number == 1:
            count = microbatches_to_time(micro)
        timed(number + 1)
    known = (options.microbatch_seconds, options.update_seconds)
    return Times(
        microbatch=time_per_sample(each) if known[0] is None else known[0],
        update=time_per_sample(update) if known[1] is None else known[1],
        all_reduce=options.all_reduce_seconds or 0.0,
        source=f"measured on {rehearsal.device}" if None in known else "given",
    )


def _noise(recipe: Recipe, options: Options, updates: int) -> Iterator[Noise]:
    """Train as the recipe does, and say what is known of the noise after each update.

    The average remembers half of the run: to measure longer narrows the interval, and the start, where the
    signal is strongest, has next to no weight.
    """
    name = _optimizer(recipe, options)
    # A rate that is for another batch would not train this one.
    own = None if options.batch_stated else options.learning_rate
    rate = own or recipe.learning_rates[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = recipe.model(0).to(options.device)
    optimizer = recipe.optimizers[name](model.parameters(), rate)
    batches = orders(recipe.samples, Setting(updates, recipe.batch_size, name, rate), seed=0)
    size, beta = -(-recipe.batch_size // PARTS), max(0.98, 1 - 4 / updates)
    end = time.monotonic() + options.seconds
    for _, noise in measured(
        recipe, model, optimizer, batches, microbatch_size=size, beta=beta, preconditioned=True
    ):
        yield noise
        if time.monotonic() > end:
            return


def _report(found: _Found, start: float, *, partial: bool) -> Advice:
    assert found.times is not None and found.asked_for is not None
    options, asked_for = found.options, found.asked_for
    noise = found.noise if isinstance(found.noise, NoiseRange) else noise_range(found.noise)
    alternative = _alternative(found, asked_for, noise)
    notes = found.notes
    if isinstance(found.noise, Noise) and found.noise.reason is not None:
        notes += (f"No noise scale was found: {found.noise.reason}.",)
    made_with = versions(torch=torch.__version__)
    report = judge(
        microbatch_size=asked_for.microbatch_size,
        accumulation_steps=asked_for.accumulation_steps,
        noise=noise,
        models=found.noise.models if isinstance(found.noise, Noise) else (),
        times=found.times,
        ranks=options.ranks,
        noise_from=found.noise_from,
        alternative=alternative,
        parameters=found.parameters,
        limit=found.limit,
        peak=found.peak,
        whole=found.whole,
    )
    return replace(
        report,
        versions={**made_with, "platform": f"{made_with['platform']}, {os.cpu_count()} cores"},
        command=asked(found.stated or options),
        notes=notes,
        recipe=None if found.recipe is None else found.recipe.name,
        seconds=time.monotonic() - start,
        partial=partial,
    )


def _alternative(found: _Found, asked_for: Question, noise: NoiseRange) -> Scaling | None:
    """The settings without accumulation, by `rescale` on an optimizer of its own."""
    recipe, options = found.recipe, found.options
    name, rate = options.optimizer or "adamw", options.learning_rate
    factories = OPTIMIZERS
    if recipe is not None:
        name, factories = _optimizer(recipe, options), recipe.optimizers
        rate = recipe.learning_rates[name]
    if rate is None:
        return None
    if name not in factories:
        raise InputError(f"optimizer={name!r} is unknown. Use {', '.join(factories)}.")
    optimizer = factories[name]([torch.nn.Parameter(torch.zeros(1))], rate)
    batch = asked_for.microbatch_size * options.ranks
    large = asked_for.accumulation_steps * batch
    known = noise.value or None
    # What is the recipe's own is for its own batch; what was given with a batch is for that.
    given_last = options.batch_stated
    try:
        if not given_last:
            _set_given(optimizer, options)
        if recipe is not None:
            rescale(optimizer, recipe.batch_size, large, known)
        if given_last:
            _set_given(optimizer, options)
        (scaling, *_) = rescale(optimizer, large, batch, known)
    except OptimizerError:  # an optimizer of the user's own, for which no rule is known
        return None
    return scaling


def _set_given(optimizer: torch.optim.Optimizer, options: Options) -> None:
    for group in optimizer.param_groups:
        if options.learning_rate is not None:
            group["lr"] = options.learning_rate
        if options.beta2 is not None and "betas" in group:
            group["betas"] = (group["betas"][0], options.beta2)
        if options.weight_decay is not None and "weight_decay" in group:
            group["weight_decay"] = options.weight_decay
