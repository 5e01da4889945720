"""The arms of a survey study: each a way to survey one recipe from one seed.

The real batch and the wrong ways are surveyed by a loop of their own, in plain PyTorch, so that the splits -
`torch.tuning.lr_survey` with an Accumulator - are compared with something that shares only the ramp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from superbatch.results.survey import What
from superbatch.torch.tuning.dial import Dial
from superbatch.torch.tuning.lr_survey import lr_survey
from superbatch.tuning.survey import Sweep
from superbatch.window import Window

from ..recipes import Recipe
from ..report.surveys import SeededSurvey
from .arms import accumulator_of, cut, update_function
from .on_torch import cast_batch, orders
from .setting import ArmPlan, Setting, Tick, Way

HOW: Mapping[Way, str] = {
    "real batch": "the whole batch at once, plain PyTorch",
    "again": "the same from other seeds: what chance does",
    "accumulator": "superbatch.torch.tuning.lr_survey with an Accumulator",
    "missing 1/K": "wrong: gradients of the micro-batches are added up, not averaged",
    "another batch": "a real batch of another size, plain PyTorch",
}


class Ramp(NamedTuple):
    """Values that a survey takes in turn."""

    what: What  # the option that is surveyed
    low: float  # its first value
    high: float  # its last value
    updates: int  # points


@dataclass(frozen=True)
class SurveySetting:
    """Setting common to all surveys of a study."""

    arms: tuple[ArmPlan, ...]  # the real batch first
    repeats: int  # surveys of each arm
    pairs: int  # of those of a split, how many have the real batch's survey beside them
    ramp: Ramp
    dtype: str  # name of a torch dtype
    optimizer: str  # one of the recipe's
    learning_rate: float  # of the optimizer, where another option is surveyed


def train(
    recipe: Recipe, setting: SurveySetting, repeat: int, *, tick: Tick
) -> Iterator[tuple[int, SeededSurvey]]:
    """Survey every arm once, each from a seed of its own.

    The real batch's survey beside that of a split has the index of the split's arm, counted on behind the
    arms.
    """
    for index, arm in enumerate(setting.arms):
        seed = index * setting.repeats + repeat
        yield index, survey_seed(recipe, setting, arm, seed, tick)
        if arm.way == "accumulator" and repeat < setting.pairs:
            yield len(setting.arms) + index, survey_seed(recipe, setting, setting.arms[0], seed, tick)


def survey_seed(recipe: Recipe, setting: SurveySetting, arm: ArmPlan, seed: int, tick: Tick) -> SeededSurvey:
    """Survey one arm from one seed."""
    made = 0

    def point(*_: int) -> None:
        nonlocal made
        made += 1
        tick(1)

    with torch.random.fork_rng(devices=[]):
        model = recipe.model(seed).to(getattr(torch, setting.dtype))
        optimizer = recipe.optimizers[setting.optimizer](model.parameters(), setting.learning_rate)
        torch.manual_seed(seed)  # a model that draws (dropout) starts every arm from the same state
        batches = partial(_batches, recipe, setting, arm, seed)
        if arm.way == "accumulator":
            accumulate = accumulator_of(arm.split, recipe, model, optimizer)
            found = lr_survey(accumulate, batches, **setting.ramp._asdict(), progress=point)
        else:
            sweep, dial = Sweep(*setting.ramp), Dial([optimizer], setting.ramp.what)
            update = update_function(arm, recipe, model, optimizer)
            for value, batch in zip(sweep.values, batches(), strict=True):
                dial.turn(value)
                go_on = sweep.add(update(batch))
                point()
                if not go_on:
                    break
            found = sweep.report(ratios=dial.ratios)
    tick(setting.ramp.updates - made)  # a survey that stops early counts as whole
    return SeededSurvey(seed=seed, survey=found)


def _batches(recipe: Recipe, setting: SurveySetting, arm: ArmPlan, seed: int) -> Iterator[Any]:
    """As many batches as the ramp has points: those of every arm with this seed and batch size."""
    drawn = Setting(setting.ramp.updates, sum(arm.split.sizes), setting.optimizer, setting.learning_rate)
    for indices in orders(recipe.samples, drawn, seed):
        batch = cast_batch(recipe.batch(indices), setting.dtype)
        unequal = arm.way == "accumulator" and not arm.split.equal
        yield Window(cut(batch, arm.split.sizes)) if unequal else batch
