"""Study of a high momentum with batch 1 in place of a large batch.

The U-Net was trained with batch 1 and momentum 0.99, "such that a large number of the previously seen
training samples determine the update" (arXiv:1505.04597). Heavy ball, v = m v + g, x -= lr v, on a quadratic
of curvature h with gradient noise of variance s^2 has the stationary variance

    Var = lr s^2 (1 + m) / (h (1 - m) (2 (1 + m) - lr h)),

which with lr = e (1 - m) tends to e s^2 / (2 h) for small e h, whatever m is. So at a fixed e = lr / (1 - m)
momentum does not lower the noise, though each update looks averaged over (1 + m)/(1 - m) batches: successive
updates share their errors. What counts is lr / (batch (1 - m)). The study looks whether a network does the
same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from superbatch.errors import InputError, NonFiniteError

from ..recipes import Recipe
from ..report.study import Quantity, StudyArm, StudyRun
from ..report.study_text import number, signed
from . import study_common as common
from .arms import plain_update
from .participants import accumulator
from .setting import Tick
from .study import Design, Findings, Options

SAMPLES, QUICK_SAMPLES = 40_000, 5_000
BATCH = 16
TAIL = 0.25  # share of a run, its last, whose weights are averaged
LOOKS = 16  # losses taken in the tail: one alone would be as noisy as the weights are
NOISE_MARGIN = 1.5  # a factor of the noise excess that does not matter: a batch of 16 changes it by 16
EXCESS, THEORY = "noise excess", "lr/(B(1-m)), relative"
A, B, C, D, E, F, G = "ABCDEFG"
LIMIT = (
    "It does not show that momentum is useless: where lr/(1-m) times the curvature nears 1, momentum keeps "
    "training stable. It shows one network on one task, with rates that were not tuned per arm."
)


@dataclass(frozen=True)
class Arm:
    """A batch, a momentum and a rate, for a number of updates."""

    name: str
    batch: int
    momentum: float
    learning_rate: float
    updates: int
    virtual: bool = False


@dataclass(frozen=True)
class Setting:
    """The arms, and the training samples that losses are taken over; it can be sent to another process."""

    arms: tuple[Arm, ...]
    looked_at: int


def heavy_ball_variance(learning_rate: float, momentum: float, curvature: float, noise: float) -> float:
    """Stationary variance of SGD with momentum on a quadratic with noisy gradients.

    ``lr s² (1 + m) / (h (1 - m) (2 (1 + m) - lr h))`` with the momentum m, the curvature h and the gradient's
    variance s², `noise`; infinite where it is unstable, from ``lr h = 2 (1 + m)`` on.

    Examples:
        >>> round(heavy_ball_variance(0.01, 0.0, 1.0, 1.0) / heavy_ball_variance(0.0001, 0.99, 1.0, 1.0), 3)
        1.005
    """
    lr, m, h = learning_rate, momentum, curvature
    room = 2 * (1 + m) - lr * h
    return lr * noise * (1 + m) / (h * (1 - m) * room) if room > 0 else math.inf


def design(recipe: Recipe, *, options: Options) -> Design:
    """Plan the seven arms."""
    common.separable(recipe, "momentum")
    samples = options.samples or (QUICK_SAMPLES if options.quick else SAMPLES)
    large = options.batch_size or BATCH
    if large < 2 or samples < LOOKS * large:
        raise InputError(
            f"samples={samples} with batch_size={large}: a large batch is more than one sample, and its "
            f"noise is measured over many updates. Give at least {LOOKS} batches of at least 2 samples."
        )
    rate = options.learning_rate or common.rate_of(recipe, large) / large
    arms = (
        Arm(A, 1, 0.0, rate, samples),
        Arm(B, 1, 0.9, rate / 10, samples),
        Arm(C, 1, 0.99, rate / 100, samples),
        Arm(D, large, 0.0, large * rate, samples // large, virtual=True),
        Arm(E, large, 0.0, rate, samples // large),
        Arm(F, large, 0.0, rate, samples),
        Arm(G, 1, 0.99, rate, samples),
    )
    metric = common.quantity_of_metric(recipe)
    return Design(
        arms=tuple(_planned(arm, rate) for arm in arms),
        setting=Setting(arms, common.QUICK_LOSS_SAMPLES if options.quick else common.LOSS_SAMPLES),
        train=train,
        ticks=sum(arm.updates for arm in arms),
        quantities=(
            common.column_of_metric(metric),
            common.COLUMNS[0],
            Quantity(name=EXCESS, meaning="what the noise of the updates costs in training loss", form=".2g"),
            *common.COLUMNS[1:],
            Quantity(name=THEORY, meaning="what the noise should be proportional to; arm A is 1", form=".3g"),
        ),
        headline=metric,
        fixed={"lr of batch 1": f"{rate:.3g}"},
        find=partial(find, metric=metric, margin=options.margin or recipe.margin, recipe=recipe),
        samples=samples,
        shortest=LOOKS * large,
    )


def _planned(arm: Arm, rate: float) -> StudyArm:
    virtual = ", accumulated one by one" if arm.virtual else ""
    return StudyArm(
        name=arm.name,
        how=f"batch {arm.batch}{virtual}, momentum {arm.momentum:g}, lr {arm.learning_rate:.3g}",
        facts={
            common.UPDATES: float(arm.updates),
            common.SEEN: float(arm.updates * arm.batch),
            THEORY: arm.learning_rate / (arm.batch * (1 - arm.momentum)) / rate,
        },
        runs=(),
    )


def train(recipe: Recipe, setting: Setting, seed: int, *, tick: Tick) -> common.Runs:
    """Train every arm from one seed: the same initial weights, the same samples first."""
    order = common.stream(recipe.samples, max(arm.batch * arm.updates for arm in setting.arms), seed)

    def one(arm: Arm, model: nn.Module) -> StudyRun:
        update = _update_function(recipe, arm, model)
        begin = round((1 - TAIL) * arm.updates)
        every = max(1, (arm.updates - begin) // 400)
        looks = {begin + (i + 1) * (arm.updates - begin) // LOOKS for i in range(LOOKS)}
        averaged, losses = AveragedModel(model), list[float]()
        for made in range(1, arm.updates + 1):
            loss = update(recipe.batch(order[(made - 1) * arm.batch : made * arm.batch]))
            if not math.isfinite(loss):
                tick(arm.updates - made + 1)
                break
            if made > begin and made % every == 0:
                averaged.update_parameters(model)
            if made in looks:
                losses.append(common.training_loss(recipe, model, setting.looked_at))
            tick(1)
        values = {
            common.quantity_of_metric(recipe): float(recipe.evaluate(model)),
            common.LOSS: common.training_loss(recipe, model, setting.looked_at),
        }
        if len(losses) == len(looks):  # it has not diverged, and was long enough to measure
            calm = common.training_loss(recipe, averaged.module, setting.looked_at)
            values[EXCESS] = statistics.fmean(losses) - calm
        return StudyRun(seed=seed, values=values)

    yield from common.from_one_start(recipe, setting.arms, seed, one)


def _update_function(recipe: Recipe, arm: Arm, model: nn.Module) -> Callable[[Any], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=arm.learning_rate, momentum=arm.momentum)
    if not arm.virtual:
        return plain_update(recipe, model, optimizer)
    accumulate = accumulator(recipe, model, optimizer, microbatch_size=1)

    def virtual(batch: Any) -> float:
        try:
            return accumulate(batch).loss
        except NonFiniteError:  # the other arms show it by their loss
            return math.nan

    return virtual


def find(arms: tuple[StudyArm, ...], *, metric: str, margin: float, recipe: Recipe) -> Findings:
    """Test and conclude; the arms are A to G."""
    of = {arm.name: arm for arm in arms}
    scores = [
        common.compared(of[x], of[y], metric, margin=margin, step=recipe.metric_step)
        for x, y in ((C, A), (D, A), (C, D))
    ]
    noises = [common.compared(of[x], of[A], EXCESS, margin=NOISE_MARGIN, ratio=True) for x in (B, C, D)]
    notes = [LIMIT]
    if recipe.weight is not None:
        notes.append(
            f"In a batch of one every sample counts the same; in a larger batch by its {recipe.counts}."
        )
    same, noise = scores[0], noises[1]
    conclusion = common.TOO_FEW
    if same is not None and noise is not None:
        times = of[C].facts[common.UPDATES] / of[D].facts[common.UPDATES]
        large = (of[F].mean(EXCESS) or math.nan) / (of[A].mean(EXCESS) or math.nan)
        verdict = "Undecided whether momentum 0.99 is a large batch"
        # On which side of the middle, by logarithms, between the noise of batch 1 and of the large batch?
        between = 1 / math.sqrt(times)
        if not large < between:
            verdict += f", for a batch of {times:.0f} has no clearly lower noise"
        elif noise.low > between and same.result.equivalent:
            verdict = "Momentum 0.99 with lr/(1-m) kept is the small batch, not a large one"
        elif noise.high < between:
            verdict = "Momentum 0.99 with lr/(1-m) kept acts like a large batch here"
        conclusion = (
            f"{verdict}: noise excess x {noise.difference:.2g} ({noise.low:.2g} to {noise.high:.2g}) and "
            f"{metric.partition(',')[0]} {signed(same.difference)} against batch 1 without momentum; noise "
            f"excess of batch {times:.0f} at that rate x {number(large, '.1g')}."
        )
    return Findings(tests=common.present([*scores, *noises]), conclusion=conclusion, notes=tuple(notes))
