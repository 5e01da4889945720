"""Comparison of surveys: one recipe, the real batch, each split of it, several seeds each.

Two questions, two kinds of seeds. From the *same* weights and samples the curves must agree to rounding: for
a few seeds of every split the real batch is surveyed too. From *different* ones they agree as well as chance
lets them: every arm has seeds of its own, and two tests of equivalence compare it with the first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch

from superbatch.errors import InputError
from superbatch.results.survey import What
from superbatch.torch.tuning.dial import Dial, range_of
from superbatch.tuning.survey_ramp import from_axis, values_of

from ..recipes import Recipe, load_recipe
from ..report.surveys import PAIRED_TOLERANCES, SeededSurvey, SurveyArm, Surveys
from .on_torch import torch_threads
from .options import SurveyOptions as Options
from .setting import ArmPlan
from .shared_options import Interrupted, check_counts, check_positive, offered_optimizer
from .shared_options import Progress as Progress
from .splits import Split, parse_split, splits_of
from .survey_arms import HOW, Ramp, SurveySetting, train
from .survey_tests import DECADES, FACTOR, curve_test, decades_of, paired_difference, suggestion_test
from .versions import origin
from .workers import receiver, train_here

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
    setting = settle(loaded, options)
    # Behind the surveys of each arm stand the real batch's from the same seeds.
    found: list[list[SeededSurvey]] = [[] for _ in setting.arms * 2]
    names = [arm.name for arm in setting.arms] + [setting.arms[0].name] * len(setting.arms)
    paired = sum(arm.way == "accumulator" for arm in setting.arms) * setting.pairs
    total = (len(setting.arms) * options.repeats + paired) * options.updates
    receive = receiver(total, found, progress, names, lambda run: run.survey.suggestion)

    def report(*, partial: bool) -> Surveys:
        made = origin(loaded, options, start, partial=partial, torch=torch.__version__)
        return _report(options, setting, _arms(setting, found), made)

    try:
        with torch_threads(options.threads):
            # Seed by seed, so that an interrupted study has as many surveys of every arm.
            train_here(loaded, setting, range(options.repeats), receive, train=train)
    except KeyboardInterrupt:
        raise Interrupted(report(partial=True)) from None
    return report(partial=False)


def settle(recipe: Recipe, options: Options) -> SurveySetting:
    """Fill in what the options leave open, and refuse what cannot be."""
    _check(options)
    splits = splits_of(recipe, options.splits, options.batch_size, counts=(10, 20))
    if options.learning_rate is None:
        recipe.require("learning_rates", by="superbatch survey without --lr")
    name = offered_optimizer(recipe, options.optimizer)
    rate = options.learning_rate or recipe.learning_rates[name]
    optimizer = recipe.optimizers[name](recipe.model(0).parameters(), rate)
    Dial([optimizer], options.what)  # refuses an optimizer without the option
    low, high = range_of([optimizer], options.what)
    low, high = low if options.low is None else options.low, high if options.high is None else options.high
    ramp = Ramp(options.what, low, high, options.updates)
    values_of(*ramp)  # refuses what is no ramp
    return SurveySetting(
        arms=_plans(recipe, splits, include_wrong=options.include_wrong),
        repeats=options.repeats,
        pairs=min(PAIRS, options.repeats),
        ramp=ramp,
        dtype=options.dtype,
        optimizer=name,
        learning_rate=rate,
    )


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


def _plans(recipe: Recipe, splits: Sequence[Split], *, include_wrong: bool) -> tuple[ArmPlan, ...]:
    size = sum(splits[0].sizes)
    real = parse_split(f"1x{size}")
    parts = [split for split in splits if len(split.sizes) > 1]
    exact = recipe.coupled == "exact" or recipe.batchnorm == "error"
    plans = [
        ArmPlan(real, "real batch", "real"),
        ArmPlan(real, "again", "again"),
        *(ArmPlan(split, "accumulator", "exact" if exact else "inexact") for split in parts),
    ]
    if include_wrong:
        longest = max(parts, key=lambda split: len(split.sizes), default=parse_split(f"{size}x1"))
        if len(longest.sizes) > 1:
            plans.append(ArmPlan(longest, "missing 1/K", "wrong"))
        plans += [
            ArmPlan(parse_split(f"1x{other}"), "another batch", "wrong" if other < size // 2 else "other")
            for other in (size // 10, size // 2)
            if other
        ]
    return tuple(plans)


def _arms(setting: SurveySetting, found: Sequence[Sequence[SeededSurvey]]) -> tuple[SurveyArm, ...]:
    baseline = [run.survey for run in found[0]]
    arms: list[SurveyArm] = []
    for plan, own, real in zip(setting.arms, found, found[len(setting.arms) :], strict=False):
        surveys = [run.survey for run in own]
        decades = [value for value in decades_of(surveys) if value is not None]
        compared = plan.claim != "real" and min(len(surveys), len(baseline)) > 1
        pairs = zip(surveys, real, strict=False)  # the first surveys of an arm are those that have one
        arms.append(
            SurveyArm(
                name=plan.name,
                sizes=plan.split.sizes,
                claim=plan.claim,
                how=HOW[plan.way],
                runs=tuple(own),
                rate=from_axis(surveys[0].what, 10 ** statistics.fmean(decades)) if decades else None,
                decades=statistics.stdev(decades) if len(decades) > 1 else None,
                pairs=tuple(paired_difference(survey, other.survey) for survey, other in pairs),
                curve=curve_test(surveys, baseline) if compared else None,
                suggested=suggestion_test(surveys, baseline) if compared else None,
            )
        )
    return tuple(arms)


def _report(
    options: Options, setting: SurveySetting, arms: tuple[SurveyArm, ...], made: dict[str, Any]
) -> Surveys:
    return Surveys(
        **made,
        **setting.ramp._asdict(),
        optimizer=setting.optimizer,
        learning_rate=None if setting.ramp.what == "lr" else setting.learning_rate,
        dtype=setting.dtype,
        batch_size=sum(arms[0].sizes),
        repeats=options.repeats,
        factor=FACTOR,
        margin=DECADES,
        arms=arms,
        notes=(CAVEAT,),
    )
