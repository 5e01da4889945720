"""Comparison of surveys of a hyperparameter: one recipe, the real batch, each split of it, several seeds.

From the *same* weights and samples the curves must agree to rounding: for a few seeds of each split the real
batch is surveyed, too. From *different* ones they differ by chance: each arm has its own seeds, and two tests
of equivalence compare it with the first arm.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import torch

from superbatch.results.survey import What
from superbatch.torch.tuning.lr_survey import lr_survey
from superbatch.torch.tuning.option_setter import OptionSetter, range_of
from superbatch.tuning.survey import Sweep
from superbatch.tuning.survey_ramp import from_axis, values_of
from superbatch.window import Window

from ..recipes import Recipe
from ..report.surveys import PAIRED_TOLERANCES, SeededSurvey, SurveyArm, Surveys
from .arms import accumulator_of, cut, update_function
from .checks import check_choice, check_counts, optimizer_and_rate
from .on_torch import cast_batch, torch_threads
from .options import SurveyOptions as Options
from .setting import ArmSpec, Method, Split, Tick, parse_split, splits_of
from .shared_options import Interrupted, Show, report_fields, resolve_recipe, silent
from .study_common import stream
from .survey_tests import DECADES, FACTOR, curve_test, decades_of, paired_difference, suggestion_test
from .workers import Receiver, train_here

DEFAULTS = Options()
PAIRS = 2  # seeds of each split for which the real batch is surveyed, too

CAVEAT = (
    "Coinciding curves are weak evidence. With a fixed number of points a curve depends on the batch size "
    "through noise alone, so half the batch has a similar curve. The pairs are the real test."
)

HOW: Mapping[Method, str] = {
    "real batch": "the whole batch at once, plain PyTorch",
    "again": "the same from other seeds: the effect of chance",
    "accumulator": "superbatch.torch.tuning.lr_survey with an Accumulator",
    "missing 1/K": "wrong: gradients of the micro-batches are added up, not averaged",
    "another batch": "a real batch of another size, plain PyTorch",
}


class Ramp(NamedTuple):
    """Values of the surveyed hyperparameter, from the first to the last."""

    what: What  # the hyperparameter
    low: float  # its first value
    high: float  # its last value
    updates: int  # points


@dataclass(frozen=True)
class SurveySetting:
    """Setting that all surveys share."""

    arms: tuple[ArmSpec, ...]  # the real batch first
    repeats: int  # surveys of each arm
    ramp: Ramp
    dtype: str  # name of a torch dtype
    optimizer: str  # one of the recipe's
    learning_rate: float  # of the optimizer, if another hyperparameter is surveyed


def survey(recipe: str | Recipe, options: Options = DEFAULTS, *, progress: Show = silent) -> Surveys:
    """Survey a recipe with the real batch and with each split, and test whether the curves are equivalent."""
    start = time.monotonic()
    task = resolve_recipe(recipe, options)
    setting = setting_from(task, options)
    # Lists of runs: those of each arm, then for each arm those of the real batch from the same seeds.
    names = [arm.name for arm in setting.arms] + [setting.arms[0].name] * len(setting.arms)
    paired = sum(arm.method == "accumulator" for arm in setting.arms) * min(PAIRS, options.repeats)
    total = (len(setting.arms) * options.repeats + paired) * options.updates
    receiver = Receiver(names, total, progress, lambda run: run.survey.suggestion)

    def report(*, partial: bool) -> Surveys:
        return Surveys(
            **report_fields(task, options, start, partial=partial, torch=torch.__version__),
            **setting.ramp._asdict(),
            optimizer=setting.optimizer,
            learning_rate=None if options.what == "lr" else setting.learning_rate,
            dtype=setting.dtype,
            batch_size=sum(setting.arms[0].split.sizes),
            repeats=options.repeats,
            factor=FACTOR,
            margin=DECADES,
            arms=_arms(setting, receiver.runs),
            notes=(CAVEAT,),
        )

    try:
        with torch_threads(options.threads):
            # Seed by seed, so that after an interruption all arms have about as many surveys.
            train_here(task, partial(train, setting=setting), range(options.repeats), receiver)
    except KeyboardInterrupt:
        raise Interrupted(report(partial=True)) from None
    return report(partial=False)


def setting_from(recipe: Recipe, options: Options) -> SurveySetting:
    """Return the setting of all surveys: the options, with the recipe's values for those that are None."""
    check_choice("what", options.what, get_args(What))
    check_counts(options, "repeats", "updates", "threads", "batch_size")
    check_choice("dtype", options.dtype, PAIRED_TOLERANCES)
    splits = splits_of(recipe, options.splits, options.batch_size, counts=(10, 20))
    name, rate = optimizer_and_rate(recipe, options, by="superbatch survey")
    optimizer = recipe.optimizers[name](recipe.model(0).parameters(), rate)
    OptionSetter([optimizer], options.what)  # raises for an optimizer without this hyperparameter
    low, high = range_of([optimizer], options.what)
    low, high = low if options.low is None else options.low, high if options.high is None else options.high
    ramp = Ramp(options.what, low, high, options.updates)
    values_of(*ramp)  # raises for ends that make no ramp
    return SurveySetting(
        arms=_arm_specs(recipe, splits, include_wrong=options.include_wrong),
        repeats=options.repeats,
        ramp=ramp,
        dtype=options.dtype,
        optimizer=name,
        learning_rate=rate,
    )


def _arm_specs(recipe: Recipe, splits: Sequence[Split], *, include_wrong: bool) -> tuple[ArmSpec, ...]:
    """Return the arms: the real batch twice, each split, and with `include_wrong` arms that must differ."""
    size = sum(splits[0].sizes)
    real = parse_split(f"1x{size}")
    parts = [split for split in splits if len(split.sizes) > 1]
    exact = recipe.coupled == "exact" or recipe.batchnorm == "error"
    specs = [
        ArmSpec(real, "real batch", "real"),
        ArmSpec(real, "again", "again"),
        *(ArmSpec(split, "accumulator", "exact" if exact else "inexact") for split in parts),
    ]
    if include_wrong:
        longest = max(parts, key=lambda split: len(split.sizes), default=parse_split(f"{size}x1"))
        if len(longest.sizes) > 1:
            specs.append(ArmSpec(longest, "missing 1/K", "wrong"))
        specs += [
            # Half the batch has a similar curve, so it is not required to fail.
            ArmSpec(parse_split(f"1x{other}"), "another batch", "wrong" if other < size // 2 else "other")
            for other in (size // 10, size // 2)
            if other
        ]
    return tuple(specs)


def _arms(setting: SurveySetting, runs: Sequence[Sequence[SeededSurvey]]) -> tuple[SurveyArm, ...]:
    """Return the report of each arm; `runs` has those of the arms, then those of the real batch."""
    baseline = [run.survey for run in runs[0]]
    arms: list[SurveyArm] = []
    for spec, own, real in zip(setting.arms, runs, runs[len(setting.arms) :], strict=False):
        surveys = [run.survey for run in own]
        decades = [value for value in decades_of(surveys) if value is not None]
        compared = spec.claim != "real"
        pairs = zip(surveys, real, strict=False)  # only the first surveys of an arm have a pair
        arms.append(
            SurveyArm(
                name=spec.name,
                sizes=spec.split.sizes,
                claim=spec.claim,
                how=HOW[spec.method],
                runs=tuple(own),
                rate=from_axis(surveys[0].what, 10 ** statistics.fmean(decades)) if decades else None,
                decades=statistics.stdev(decades) if len(decades) > 1 else None,
                pairs=tuple(paired_difference(survey, other.survey) for survey, other in pairs),
                curve=curve_test(surveys, baseline) if compared else None,
                suggested=suggestion_test(surveys, baseline) if compared else None,
            )
        )
    return tuple(arms)


def train(
    recipe: Recipe, seed: int, *, setting: SurveySetting, tick: Tick
) -> Iterator[tuple[int, SeededSurvey]]:
    """Survey every arm once, and yield its index and its survey.

    A survey of the real batch that is paired with a split has the index of the split's arm plus the number of
    arms.
    """
    for index, arm in enumerate(setting.arms):
        own = index * setting.repeats + seed  # other seeds in each arm, so that arms are independent
        yield index, survey_seed(recipe, setting, arm, own, tick)
        if arm.method == "accumulator" and seed < PAIRS:
            yield len(setting.arms) + index, survey_seed(recipe, setting, setting.arms[0], own, tick)


def survey_seed(recipe: Recipe, setting: SurveySetting, arm: ArmSpec, seed: int, tick: Tick) -> SeededSurvey:
    """Survey one arm from one seed."""
    points = 0  # points of the ramp

    def count_point(*_: int) -> None:
        nonlocal points
        points += 1
        tick(1)

    with torch.random.fork_rng(devices=[]):
        model = recipe.model(seed).to(getattr(torch, setting.dtype))
        optimizer = recipe.optimizers[setting.optimizer](model.parameters(), setting.learning_rate)
        torch.manual_seed(seed)  # random layers (dropout) start every arm from the same state
        batches = partial(_batches, recipe, setting, arm, seed)
        if arm.method == "accumulator":
            accumulate = accumulator_of(arm.split, recipe, model, optimizer)
            result = lr_survey(accumulate, batches, **setting.ramp._asdict(), progress=count_point)
        else:
            sweep, setter = Sweep(*setting.ramp), OptionSetter([optimizer], setting.ramp.what)
            update = update_function(arm, recipe, model, optimizer)
            for value, batch in zip(sweep.values, batches(), strict=True):
                setter.set(value)
                go_on = sweep.add(update(batch))
                count_point()
                if not go_on:
                    break
            result = sweep.report(ratios=setter.ratios)
    tick(setting.ramp.updates - points)  # the progress counts the rest of an early stop as done
    return SeededSurvey(seed=seed, survey=result)


def _batches(recipe: Recipe, setting: SurveySetting, arm: ArmSpec, seed: int) -> Iterator[Any]:
    """Yield a batch for each point of the ramp; they depend on the seed and the batch size only."""
    size = sum(arm.split.sizes)
    for indices in stream(recipe.samples, setting.ramp.updates * size, seed).split(size):
        batch = cast_batch(recipe.batch(indices), setting.dtype)
        unequal = arm.method == "accumulator" and not arm.split.equal
        yield Window(cut(batch, arm.split.sizes)) if unequal else batch
