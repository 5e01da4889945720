"""Study of the noise of a recipe's gradient: train it while measuring, and judge a larger batch.

1. Train with an accumulator that measures every window; note its noise scale some forty times.
2. Time micro-batches and updates of the same sizes, on weights that are thrown away.
3. Combine both: the time to a target loss with K micro-batches per update, against one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from superbatch.errors import InputError
from superbatch.noise.meter import noise_over_run, relative_time
from superbatch.results.noise import Independence
from superbatch.tuning.noise_range import noise_range_of

from ..recipes import Recipe, load_recipe
from ..report.noise_study import AtSteps, NoiseAt, NoiseStudy
from .fit import busy
from .on_torch import orders, torch_threads
from .options import NoiseOptions as Options
from .participants import measured
from .rehearsal import prepare
from .setting import Setting
from .shared_options import Interrupted, Progress, check_counts, offered_optimizer
from .versions import origin

POINTS = 40
MICROBATCHES = 8  # micro-batches of a window, unless their size is stated

MOST_STEPS = 64
TIMED_WINDOWS = 12

# Remark at points whose number is withheld; a note has the whole sentence.
SHARED = "micro-batches share noise"


DEFAULTS = Options()


@dataclass
class _Found:
    """Measurements made so far."""

    points: list[NoiseAt] = field(default_factory=list)
    updates: int = 0
    microbatch_seconds: float = 0.0
    update_seconds: float = 0.0
    independence: Independence | None = None


def noise(
    recipe: str | Recipe,
    options: Options = DEFAULTS,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
) -> NoiseStudy:
    """Train a recipe while measuring how noisy its gradient is."""
    start = time.monotonic()
    loaded = load_recipe(recipe, data=options.data) if isinstance(recipe, str) else recipe
    setting, size = _checked(loaded, options)
    notes = busy()
    found = _Found()

    def report(*, partial: bool) -> NoiseStudy:
        made = origin(loaded, options, start, partial=partial, torch=torch.__version__)
        return _report(loaded, setting, size, options, found, notes, made)

    with torch_threads(options.threads or torch.get_num_threads()), torch.random.fork_rng():
        try:
            _train(loaded, setting, size, options.seed, found, progress)
            _time(loaded, setting, size, found)
        except KeyboardInterrupt:
            if not found.points:
                raise
            raise Interrupted(report(partial=True)) from None
        return report(partial=False)


def _checked(recipe: Recipe, options: Options) -> tuple[Setting, int]:
    """Return the setting of the training, and the samples of a micro-batch."""
    if recipe.coupled == "exact":
        raise InputError(
            f"The recipe {recipe.name!r}, whose samples are coupled: noise is estimated from the gradients "
            "of micro-batches, and there a micro-batch has none of its own. Give a recipe of separate "
            "samples: a model without BatchNorm, a loss without pairs."
        )
    check_counts(options, "batch_size", "microbatch_size", "updates", "threads")
    batch = options.batch_size or recipe.batch_size
    if batch < 2 or batch > recipe.samples:
        raise InputError(
            f"A batch of {batch} samples: it is drawn from {recipe.samples} samples and cut into two "
            f"micro-batches or more. Give a batch size between 2 and {recipe.samples}."
        )
    size = options.microbatch_size or math.ceil(batch / min(batch, MICROBATCHES))
    if size >= batch:
        raise InputError(
            f"Micro-batches of {size} samples in a batch of {batch}: "
            "noise is seen by the differences between micro-batches, of which there must be two. "
            "Give a smaller microbatch size, or a larger batch."
        )
    if options.learning_rate is None:
        recipe.require("learning_rates", by="superbatch noise without --lr")
    optimizer = offered_optimizer(recipe, options.optimizer)
    rate = recipe.learning_rates[optimizer] if options.learning_rate is None else options.learning_rate
    if not 0 < rate < math.inf:  # a recipe's own rate is checked nowhere else
        raise InputError(f"learning_rate={rate!r} is not positive. Give a number above 0.")
    if not -(2**63) <= options.seed < 2**64:
        raise InputError(f"seed={options.seed}: it is a number of 64 bits. Give a smaller one, such as 0.")
    return Setting(options.updates or recipe.updates, batch, optimizer, rate), size


def _train(
    recipe: Recipe,
    setting: Setting,
    size: int,
    seed: int,
    found: _Found,
    progress: Callable[[Progress], None],
) -> None:
    model = recipe.model(seed)
    torch.manual_seed(seed)
    # The average remembers about a tenth of the run, and 20 windows at least.
    beta = max(0.9, 1 - 20 / (setting.updates + 10))
    optimizer = recipe.optimizers[setting.optimizer](model.parameters(), setting.learning_rate)
    batches = orders(recipe.samples, setting, seed)
    trained = measured(
        recipe, model, optimizer, batches, microbatch_size=size, beta=beta, preconditioned=True
    )
    losses: list[float] = []
    every = math.ceil(setting.updates / POINTS)
    for loss, now in trained:
        losses.append(loss)
        found.updates += 1
        if found.updates % every and found.updates < setting.updates:
            continue
        found.independence = now.independence
        found.points.append(
            NoiseAt(
                update=found.updates,
                samples=found.updates * setting.batch_size,
                loss=statistics.fmean(losses),
                batch_size=now.batch_size,
                low=now.low,
                high=now.high,
                reason=now.reason,
                by_model=tuple(noise_range_of(each).value for each in now.models),
            )
        )
        losses.clear()
        progress(Progress(found.updates, setting.updates, f"update {found.updates}"))


def _time(recipe: Recipe, setting: Setting, size: int, found: _Found) -> None:
    rehearsal = prepare(
        recipe, optimizer=setting.optimizer, dtype="float32", device="cpu", samples=setting.batch_size
    )
    trainer = rehearsal.trainer()
    window = rehearsal.window_of(size, count=max(2, setting.batch_size // size))
    times = [trainer.time(window) for _ in range(2 + TIMED_WINDOWS)][2:]
    found.microbatch_seconds, found.update_seconds = map(statistics.median, zip(*times, strict=True))


def _over_run(found: _Found, batch_size: int) -> tuple[float | None, float, float]:
    """One noise scale for the run, and its interval.

    Where the signal was lost again the noise scale is mostly larger than where it was seen: such points have
    no number, but the upper end must not leave them out.
    """
    known = [each for each in found.points if each.batch_size]
    if not known:
        return None, max((each.low for each in found.points), default=0.0), math.inf

    def mean(values: list[float]) -> float:
        return noise_over_run([max(value, 1e-9) for value in values], batch_size=batch_size)

    since = found.points[found.points.index(known[0]) :]
    low, high = mean([each.low for each in known]), mean([each.high for each in since])
    return mean([each.batch_size or 0.0 for each in known]), low, high


def _by_model(found: _Found, batch_size: int, run: float | None) -> tuple[float | None, ...]:
    """The noise scale of the run under each model of Adam's preconditioner.

    As much above the plain one as at the points that have both: those that have one differ.
    """
    count = max((len(each.by_model) for each in found.points), default=0)

    def scale(model: int) -> float | None:
        both = [(each.by_model[0], each.by_model[model]) for each in found.points if each.by_model]
        known = [(plain, own) for plain, own in both if plain and own]
        if run is None or not known:
            return None
        plain, own = (noise_over_run(each, batch_size=batch_size) for each in zip(*known, strict=True))
        return run * own / plain

    return tuple(map(scale, range(count)))


def _steps(
    found: _Found, size: int, run: tuple[float | None, float, float], models: tuple[float | None, ...]
) -> tuple[AtSteps, ...]:
    if not found.microbatch_seconds:
        return ()
    time_with = partial(
        relative_time,
        microbatch_size=size,
        microbatch_seconds=found.microbatch_seconds,
        update_seconds=found.update_seconds,
    )
    scale, low, high = run
    return tuple(
        AtSteps(
            accumulation_steps=k,
            batch=k * size,
            time=None if scale is None else time_with(k, noise=scale),
            low=time_with(k, noise=high),
            high=time_with(k, noise=low),
            by_model=tuple(None if each is None else time_with(k, noise=each) for each in models),
        )
        for k in (1 << power for power in range(MOST_STEPS.bit_length()))
    )


def _checked_assumption(found: _Found) -> list[str]:
    """Withhold numbers that shared noise has made too small, and say what speaks against the assumption."""
    test = found.independence
    if test is None or test.text is None:
        return []
    if test.verdict == "shared":
        # The points before the verdict are of the same windows.
        found.points = [
            replace(each, batch_size=None, high=math.inf, reason=SHARED, by_model=()) for each in found.points
        ]
    return [f"{test.text[0].upper()}{test.text[1:]}."]


def _report(
    recipe: Recipe,
    setting: Setting,
    size: int,
    options: Options,
    found: _Found,
    notes: list[str],
    made: dict[str, Any],
) -> NoiseStudy:
    notes = [*notes, *_checked_assumption(found)]
    run = _over_run(found, setting.batch_size)
    models = _by_model(found, setting.batch_size, run[0])
    unknown = sum(each.batch_size is None for each in found.points)
    if unknown and unknown < len(found.points):
        notes.append(
            f"At {unknown} of {len(found.points)} points of the run the noise scale was not determined: the "
            "number for the whole run is of the others; its upper end takes those that came later as without "
            "end."
        )
    return NoiseStudy(
        **made,
        optimizer=setting.optimizer,
        learning_rate=setting.learning_rate,
        batch_size=setting.batch_size,
        microbatch_size=size,
        updates=found.updates,
        seed=options.seed,
        threads=options.threads or torch.get_num_threads(),
        data_size=recipe.samples,
        points=tuple(found.points),
        noise=run[0],
        low=run[1],
        high=run[2],
        microbatch_seconds=found.microbatch_seconds,
        update_seconds=found.update_seconds,
        steps=_steps(found, size, run, models),
        models=models,
        notes=tuple(notes),
    )
