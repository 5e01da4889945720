"""Comparison of surveys: one recipe, the real batch, each split of it, several seeds each.

Two questions, two kinds of seeds. From the *same* weights and samples the curves must agree to rounding: for
a few seeds of every split the real batch is surveyed too. From *different* ones they agree as well as chance
lets them: every arm has seeds of its own, and two tests of equivalence compare it with the first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import get_args

import torch

from superbatch.errors import InputError
from superbatch.results.survey import What
from superbatch.torch.tuning.dial import Dial, range_of
from superbatch.tuning.survey_ramp import from_axis, values_of

from ..recipes import Recipe, load_recipe
from ..report.surveys import PAIRED_TOLERANCES, SeededSurvey, SurveyArm, Surveys
from .on_torch import torch_threads
from .options import SurveyOptions as Options
from .shared_options import Interrupted, asked, check_counts, check_positive, offered_optimizer
from .shared_options import Progress as Progress
from .splits import Split, parse_splits, splits_of
from .survey_arms import HOW, SurveyArmPlan, SurveySetting, survey_seed
from .survey_tests import DECADES, FACTOR, curve_test, decades_of, paired_difference, suggestion_test
from .versions import versions

DEFAULTS = Options()
PAIRS = 2  # seeds of each split for which the real batch is surveyed from the same weights and samples

CAVEAT = (
    "Coinciding curves are weak evidence. With a fixed number of points a curve depends on the size of the "
    "batch through noise alone, so that half the batch looks much the same. The pairs are the real test."
)


def survey(
    recipe: str | Recipe,
    options: Options = DEFAULTS,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Surveys:
    """Survey a recipe with the real batch and with each split, and say whether they can be told apart."""
    start = time.monotonic()
    loaded = load_recipe(recipe, data=options.data) if isinstance(recipe, str) else recipe
    setting, plans = settle(loaded, options)
    runs: list[list[SeededSurvey]] = [[] for _ in plans]
    pairs: list[list[float]] = [[] for _ in plans]
    count = _Count(_surveys(plans, options) * options.updates, options.updates, progress)

    def report(*, partial: bool) -> Surveys:
        arms = _arms(plans, runs, pairs)
        return _report(loaded, options, setting, arms, time.monotonic() - start, partial=partial)

    try:
        with torch_threads(options.threads):
            # Seed by seed, so that an interrupted study has as many surveys of every arm.
            for repeat in range(options.repeats):
                for index, arm in enumerate(plans):
                    seed = index * options.repeats + repeat
                    found = survey_seed(loaded, setting, arm, seed, tick=count.tick)
                    runs[index].append(SeededSurvey(seed=seed, survey=found))
                    count.finish(seed, arm.name, found.suggestion)
                    if arm.way == "accumulator" and repeat < PAIRS:
                        real = survey_seed(loaded, setting, plans[0], seed, tick=count.tick)
                        pairs[index].append(paired_difference(found, real))
                        count.finish(seed, plans[0].name, real.suggestion)
    except KeyboardInterrupt:
        raise Interrupted(report(partial=True)) from None
    return report(partial=False)


def settle(recipe: Recipe, options: Options) -> tuple[SurveySetting, list[SurveyArmPlan]]:
    """Fill in what the options leave open, and refuse what cannot be."""
    _check(options)
    splits = splits_of(recipe, options.splits, options.batch_size, default=_some_splits)
    if options.learning_rate is None:
        recipe.require("learning_rates", by="superbatch survey without --lr")
    name = offered_optimizer(recipe, options.optimizer)
    rate = options.learning_rate or recipe.learning_rates[name]
    optimizer = recipe.optimizers[name](recipe.model(0).parameters(), rate)
    Dial([optimizer], options.what)  # refuses an optimizer without the option
    low, high = range_of([optimizer], options.what)
    low, high = low if options.low is None else options.low, high if options.high is None else options.high
    values_of(options.what, low, high, options.updates)  # refuses what is no ramp
    setting = SurveySetting(options.what, low, high, options.updates, options.dtype, name, rate)
    return setting, _plans(recipe, splits, include_wrong=options.include_wrong)


def _check(options: Options) -> None:
    if options.what not in get_args(What):
        raise InputError(
            f"--what {options.what}: that cannot be surveyed. Give one of {', '.join(get_args(What))}."
        )
    check_counts(options, "repeats", "updates", "threads", "batch_size")
    if options.dtype not in PAIRED_TOLERANCES:
        raise InputError(
            f"dtype={options.dtype!r}: paired curves are held to the rounding of their dtype. Use one of "
            f"{', '.join(PAIRED_TOLERANCES)}."
        )
    check_positive(options, "learning_rate")


def _some_splits(size: int) -> list[Split]:
    """Into 10 and 20 micro-batches, or as many samples."""
    counts = [count for count in (10, 20) if count <= size and size % count == 0] or [size]
    return parse_splits([f"{count}x{size // count}" for count in counts])


def _plans(recipe: Recipe, splits: Sequence[Split], *, include_wrong: bool) -> list[SurveyArmPlan]:
    size = sum(splits[0].sizes)
    real = _whole(size)
    parts = [split for split in splits if len(split.sizes) > 1]
    exact = recipe.coupled == "exact" or recipe.batchnorm == "error"
    plans = [
        SurveyArmPlan(real, "real batch", "real"),
        SurveyArmPlan(real, "real batch again", "again"),
        *(SurveyArmPlan(split, "accumulator", "exact" if exact else "inexact") for split in parts),
    ]
    if include_wrong:
        longest = max(parts, key=lambda split: len(split.sizes), default=Split(f"{size}x1", (1,) * size))
        if len(longest.sizes) > 1:
            plans.append(SurveyArmPlan(longest, "missing 1/K", "wrong"))
        plans += [
            SurveyArmPlan(_whole(other), "another batch", "wrong" if other < size // 2 else "other")
            for other in (size // 10, size // 2)
            if other
        ]
    return plans


def _whole(size: int) -> Split:
    return Split(f"1x{size}", (size,))


def _surveys(plans: Sequence[SurveyArmPlan], options: Options) -> int:
    paired = sum(arm.way == "accumulator" for arm in plans) * min(PAIRS, options.repeats)
    return len(plans) * options.repeats + paired


class _Count:
    """Points done; a survey that stops early counts as whole."""

    def __init__(self, total: int, updates: int, progress: Callable[[Progress], None]) -> None:
        self._total, self._updates, self._progress = total, updates, progress
        self._surveys = self._points = 0

    def tick(self) -> None:
        self._points += 1
        self._progress(Progress(self._done(), self._total))

    def finish(self, seed: int, arm: str, suggestion: float | None) -> None:
        self._surveys, self._points = self._surveys + 1, 0
        self._progress(Progress(self._done(), self._total, (seed, arm, suggestion)))

    def _done(self) -> int:
        return self._surveys * self._updates + self._points


def _arms(
    plans: Sequence[SurveyArmPlan], runs: Sequence[Sequence[SeededSurvey]], pairs: Sequence[Sequence[float]]
) -> tuple[SurveyArm, ...]:
    baseline = [run.survey for run in runs[0]]
    arms: list[SurveyArm] = []
    for plan, own, differences in zip(plans, runs, pairs, strict=True):
        surveys = [run.survey for run in own]
        decades = [value for value in decades_of(surveys) if value is not None]
        compared = plan.claim != "real" and min(len(surveys), len(baseline)) > 1
        arms.append(
            SurveyArm(
                name=plan.name,
                sizes=plan.split.sizes,
                claim=plan.claim,
                how=HOW[plan.way],
                runs=tuple(own),
                rate=from_axis(surveys[0].what, 10 ** statistics.fmean(decades)) if decades else None,
                decades=statistics.stdev(decades) if len(decades) > 1 else None,
                pairs=tuple(differences),
                curve=curve_test(surveys, baseline) if compared else None,
                suggested=suggestion_test(surveys, baseline) if compared else None,
            )
        )
    return tuple(arms)


def _report(
    recipe: Recipe,
    options: Options,
    setting: SurveySetting,
    arms: tuple[SurveyArm, ...],
    seconds: float,
    *,
    partial: bool,
) -> Surveys:
    return Surveys(
        recipe=recipe.name,
        description=recipe.description,
        what=setting.what,
        optimizer=setting.optimizer,
        learning_rate=None if setting.what == "lr" else setting.learning_rate,
        dtype=setting.dtype,
        batch_size=sum(arms[0].sizes),
        low=setting.low,
        high=setting.high,
        updates=setting.updates,
        repeats=options.repeats,
        factor=FACTOR,
        margin=DECADES,
        arms=arms,
        seconds=seconds,
        partial=partial,
        versions=versions(torch=torch.__version__),
        command=asked(options),
        notes=(CAVEAT,),
    )
