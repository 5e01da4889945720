"""Study of the noise of a recipe's gradient: measure it in a training, and predict times of larger batches.

1. Train with an accumulator that measures the noise scale of every window; record it at up to 40 points.
2. Time micro-batches and updates of the same sizes, on another copy of the model.
3. From both, compute the time to a target loss with K micro-batches per update, relative to one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from superbatch.errors import InputError
from superbatch.noise.meter import noise_over_run
from superbatch.results.noise import Independence
from superbatch.tuning.advice import Times, steps_at
from superbatch.tuning.noise_range import NoiseRange, noise_range_of

from ..recipes import Recipe
from ..report.noise_study import NoiseAt, NoiseStudy
from .arms import losses_and_noise
from .checks import check_counts, optimizer_and_rate
from .fit import busy
from .on_torch import torch_threads
from .options import NoiseOptions as Options
from .shared_options import Interrupted, Progress, Show, report_fields, resolve_recipe, silent
from .study_common import stream
from .trial_run import prepare_trial

POINTS = 40  # points of the run, at most
MICROBATCHES = 8  # micro-batches of a window by default
MOST_STEPS = 64  # largest number of micro-batches per update whose gain is predicted
WARM_UP, TIMED_WINDOWS = 2, 12
SHARED = "micro-batches share noise"  # reason at points whose noise scale is withheld; a note explains it

DEFAULTS = Options()


def noise(recipe: str | Recipe, options: Options = DEFAULTS, *, progress: Show = silent) -> NoiseStudy:
    """Train a recipe while measuring the noise scale of its gradient."""
    start = time.monotonic()
    noise_run = _NoiseRun(resolve_recipe(recipe, options), options)
    with torch_threads(options.threads or torch.get_num_threads()), torch.random.fork_rng():
        try:
            noise_run.train(progress)
            noise_run.measure_times()
        except KeyboardInterrupt:
            if not noise_run.points:
                raise
            raise Interrupted(noise_run.report(start, partial=True)) from None
        return noise_run.report(start, partial=False)


class _NoiseRun:
    """The training and the timing, with the results so far."""

    def __init__(self, recipe: Recipe, options: Options) -> None:
        self.recipe, self.options = recipe, options
        self.batch_size, self.size = _sizes(recipe, options)
        self.optimizer, self.rate = optimizer_and_rate(recipe, options, by="superbatch noise")
        self.updates = 0
        self.points: list[NoiseAt] = []
        self.independence: Independence | None = None
        self.microbatch_seconds = self.update_seconds = 0.0
        self.notes = busy()

    def train(self, progress: Show) -> None:
        """Train, and record the noise scale at the points of the run."""
        recipe, seed = self.recipe, self.options.seed
        updates = self.options.updates or recipe.updates
        model = recipe.model(seed)
        torch.manual_seed(seed)
        trained = losses_and_noise(
            recipe,
            model,
            recipe.optimizers[self.optimizer](model.parameters(), self.rate),
            stream(recipe.samples, updates * self.batch_size, seed).split(self.batch_size),
            microbatch_size=self.size,
            beta=max(0.9, 1 - 20 / (updates + 10)),  # averages over a tenth of the run or 20 windows
            preconditioned=True,
        )
        losses: list[float] = []
        every = math.ceil(updates / POINTS)
        for loss, now in trained:
            losses.append(loss)
            self.updates += 1
            if self.updates % every and self.updates < updates:
                continue
            self.independence = now.independence
            self.points.append(
                NoiseAt(
                    update=self.updates,
                    samples=self.updates * self.batch_size,
                    loss=statistics.fmean(losses),
                    batch_size=now.batch_size,
                    low=now.low,
                    high=now.high,
                    reason=now.reason,
                    by_model=tuple(noise_range_of(each).value for each in now.models),
                )
            )
            losses.clear()
            progress(Progress(self.updates, updates, f"update {self.updates}"))

    def measure_times(self) -> None:
        """Measure the median times of a micro-batch and of an update."""
        trial = prepare_trial(
            self.recipe, optimizer=self.optimizer, dtype="float32", device="cpu", samples=self.batch_size
        )
        trainer = trial.trainer()
        window = trial.window_of(self.size, count=max(2, self.batch_size // self.size))
        times = [trainer.time(window) for _ in range(WARM_UP + TIMED_WINDOWS)][WARM_UP:]
        self.microbatch_seconds, self.update_seconds = map(statistics.median, zip(*times, strict=True))

    def report(self, start: float, *, partial: bool) -> NoiseStudy:
        """Make the report."""
        test = self.independence
        if test is not None and test.text is not None:
            self.notes.append(f"{test.text[0].upper()}{test.text[1:]}.")
            if test.verdict == "shared":  # the noise scale is too small at all points, so it is withheld
                withheld: dict[str, Any] = {"batch_size": None, "high": math.inf, "by_model": ()}
                self.points = [replace(each, reason=SHARED, **withheld) for each in self.points]
        unknown = sum(each.batch_size is None for each in self.points)
        if 0 < unknown < len(self.points):
            self.notes.append(
                f"At {unknown} of {len(self.points)} points the noise scale was not determined. The run's "
                "is computed from the others; in its upper end, later undetermined points count as infinite."
            )
        run = _over_run(self.points, self.batch_size)
        models = _by_model(self.points, self.batch_size, run[0])
        times = Times(microbatch=self.microbatch_seconds, update=self.update_seconds)
        counts = [1 << power for power in range(MOST_STEPS.bit_length())] if self.microbatch_seconds else []
        return NoiseStudy(
            **report_fields(self.recipe, self.options, start, partial=partial, torch=torch.__version__),
            optimizer=self.optimizer,
            learning_rate=self.rate,
            batch_size=self.batch_size,
            microbatch_size=self.size,
            updates=self.updates,
            seed=self.options.seed,
            threads=self.options.threads or torch.get_num_threads(),
            data_size=self.recipe.samples,
            points=tuple(self.points),
            noise=run[0],
            low=run[1],
            high=run[2],
            microbatch_seconds=self.microbatch_seconds,
            update_seconds=self.update_seconds,
            steps=tuple(steps_at(k, self.size, NoiseRange(*run), times, models) for k in counts),
            models=models,
            notes=tuple(self.notes),
        )


def _sizes(recipe: Recipe, options: Options) -> tuple[int, int]:
    """Return the samples of a batch and of a micro-batch; raise `InputError` for unusable options."""
    if recipe.coupled == "exact":
        raise InputError(
            f"The samples of the recipe {recipe.name!r} are coupled, so a micro-batch has no gradient of its "
            "own to estimate noise from. Use a recipe without BatchNorm or contrastive loss."
        )
    check_counts(options, "batch_size", "microbatch_size", "updates", "threads")
    batch = options.batch_size or recipe.batch_size
    if batch < 2 or batch > recipe.samples:
        raise InputError(
            f"A batch of {batch} samples cannot be drawn from {recipe.samples} samples and split into "
            f"micro-batches. Give a batch size between 2 and {recipe.samples}."
        )
    size = options.microbatch_size or math.ceil(batch / min(batch, MICROBATCHES))
    if size >= batch:
        raise InputError(
            f"Micro-batches of {size} samples in a batch of {batch}: noise is estimated from the differences "
            "between at least two micro-batches. Give a smaller microbatch size, or a larger batch."
        )
    if not -(2**63) <= options.seed < 2**64:
        raise InputError(f"seed={options.seed} does not fit into 64 bits. Give a smaller one, such as 0.")
    return batch, size


def _over_run(points: Sequence[NoiseAt], batch_size: int) -> tuple[float | None, float, float]:
    """Return one noise scale for the run, None if it is not determined, and the ends of its interval."""
    known = [each for each in points if each.batch_size]
    if not known:
        return None, max((each.low for each in points), default=0.0), math.inf

    def mean(values: list[float]) -> float:
        return noise_over_run([max(value, 1e-9) for value in values], batch_size=batch_size)

    # A later point without a noise scale has too little signal, so its noise scale is probably larger. The
    # mean of the upper ends therefore includes it, with an infinite upper end.
    since = points[points.index(known[0]) :]
    low, high = mean([each.low for each in known]), mean([each.high for each in since])
    return mean([each.batch_size or 0.0 for each in known]), low, high


def _by_model(points: Sequence[NoiseAt], batch_size: int, run: float | None) -> tuple[float | None, ...]:
    """Return the noise scale of the run under each model of Adam's preconditioner.

    It is `run` times the ratio of the model's mean to the plain mean, over the points that have both values.
    """
    count = max((len(each.by_model) for each in points), default=0)

    def scale(model: int) -> float | None:
        both = [(each.by_model[0], each.by_model[model]) for each in points if each.by_model]
        known = [(plain, own) for plain, own in both if plain and own]
        if run is None or not known:
            return None
        plain, own = (noise_over_run(each, batch_size=batch_size) for each in zip(*known, strict=True))
        return run * own / plain

    return tuple(map(scale, range(count)))
