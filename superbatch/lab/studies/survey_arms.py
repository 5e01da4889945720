"""The arms of a survey study: each a way to survey one recipe from one seed.

The real batch and the wrong ways are surveyed by a loop of their own, in plain PyTorch, so that the splits -
`torch.tuning.lr_survey` with an Accumulator - are compared with something that shares only the ramp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from superbatch.results.survey import Survey, What
from superbatch.torch.tuning.dial import Dial
from superbatch.torch.tuning.lr_survey import lr_survey
from superbatch.tuning.survey import Sweep
from superbatch.window import Window

from ..recipes import Recipe
from ..report.surveys import SurveyClaim
from .arms import UpdateFunction, accumulator_of, cut, mean_and_weight
from .arms import update_function as update_of_comparison
from .on_torch import cast_batch, orders
from .setting import ArmPlan, Setting
from .splits import Split

Tick = Callable[[], None]
SurveyWay = Literal["real batch", "real batch again", "accumulator", "missing 1/K", "another batch"]

HOW: dict[SurveyWay, str] = {
    "real batch": "the whole batch at once, plain PyTorch",
    "real batch again": "the same from other seeds: what chance does",
    "accumulator": "superbatch.torch.tuning.lr_survey with an Accumulator",
    "missing 1/K": "wrong: gradients of the micro-batches are added up, not averaged",
    "another batch": "a real batch of another size, plain PyTorch",
}


@dataclass(frozen=True)
class SurveyArmPlan:
    """A split, and how it is surveyed."""

    split: Split  # of the batch of one update
    way: SurveyWay  # how updates are made
    claim: SurveyClaim  # what the arm says of itself

    @property
    def name(self) -> str:
        """The split, and the way where the split does not say it."""
        said = {"real batch again": " again", "missing 1/K": " missing 1/K"}
        return self.split.name + said.get(self.way, "")

    @property
    def batch_size(self) -> int:
        """Samples of one update."""
        return sum(self.split.sizes)


@dataclass(frozen=True)
class SurveySetting:
    """Setting common to all surveys of a study."""

    what: What  # the option that is surveyed
    low: float  # its first value
    high: float  # its last value
    updates: int  # points
    dtype: str  # name of a torch dtype
    optimizer: str  # one of the recipe's
    learning_rate: float  # of the optimizer, where another option is surveyed


def survey_seed(
    recipe: Recipe, setting: SurveySetting, arm: SurveyArmPlan, seed: int, *, tick: Tick = lambda: None
) -> Survey:
    """Survey one arm from one seed."""
    with torch.random.fork_rng(devices=[]):
        model = recipe.model(seed).to(getattr(torch, setting.dtype))
        optimizer = recipe.optimizers[setting.optimizer](model.parameters(), setting.learning_rate)
        torch.manual_seed(seed)  # a model that draws (dropout) starts every arm from the same state
        if arm.way == "accumulator":
            return lr_survey(
                accumulator_of(arm.split, recipe, model, optimizer),
                lambda: _batches(recipe, setting, arm, seed),
                what=setting.what,
                low=setting.low,
                high=setting.high,
                updates=setting.updates,
                progress=lambda done, total: tick(),
            )
        return _plain(recipe, setting, arm, seed, (model, optimizer), tick)


def _plain(
    recipe: Recipe,
    setting: SurveySetting,
    arm: SurveyArmPlan,
    seed: int,
    trained: tuple[nn.Module, torch.optim.Optimizer],
    tick: Tick,
) -> Survey:
    model, optimizer = trained
    sweep = Sweep(setting.what, setting.low, setting.high, setting.updates)
    dial = Dial([optimizer], setting.what)
    if arm.way == "missing 1/K":
        update = _missing_divisor(recipe, arm.split, model, optimizer)
    else:
        update = update_of_comparison(ArmPlan(arm.split, "real batch", "real"), recipe, model, optimizer)
    for value, batch in zip(sweep.values, _batches(recipe, setting, arm, seed), strict=True):
        dial.turn(value)
        go_on = sweep.add(update(batch))
        tick()
        if not go_on:
            break
    return sweep.report(ratios=dial.ratios)


def _missing_divisor(
    recipe: Recipe, split: Split, model: nn.Module, optimizer: torch.optim.Optimizer
) -> UpdateFunction:
    loss_fn = recipe.loss_fn(model)

    def update(batch: Any) -> float:
        reported = weights = 0.0
        for microbatch in cut(batch, split.sizes):
            loss, weight = mean_and_weight(recipe, loss_fn, microbatch)
            loss.backward()
            reported, weights = reported + weight * loss.item(), weights + weight
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return reported / weights

    return update


def _batches(recipe: Recipe, setting: SurveySetting, arm: SurveyArmPlan, seed: int) -> Iterator[Any]:
    """As many batches as the ramp has points: those of every arm with this seed and batch size."""
    drawn = Setting(setting.updates, arm.batch_size, setting.optimizer, setting.learning_rate)
    for indices in orders(recipe.samples, drawn, seed):
        batch = cast_batch(recipe.batch(indices), setting.dtype)
        unequal = arm.way == "accumulator" and not arm.split.equal
        yield Window(cut(batch, arm.split.sizes)) if unequal else batch
