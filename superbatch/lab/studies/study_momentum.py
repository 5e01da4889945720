"""Study of a high momentum with batch 1 in place of a large batch.

The U-Net was trained with batch 1 and momentum 0.99, "such that a large number of the previously seen
training samples determine the update" (arXiv:1505.04597). Heavy ball is v = m v + g, x -= lr v. On a
quadratic of curvature h with gradient noise of variance s^2, x has the stationary variance

    Var = lr s^2 (1 + m) / (h (1 - m) (2 (1 + m) - lr h)).

With lr = e (1 - m) and a small e h it tends to e s^2 / (2 h), for every m. So at a fixed e = lr / (1 - m)
momentum does not lower the noise. Each update averages (1 + m)/(1 - m) batches, but successive updates share
their errors. The noise depends on lr / (batch (1 - m)). The study tests whether this holds for a network.
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
from ..report.study_text import float_text, signed_text
from . import study_common as common
from .arms import accumulator, plain_update
from .setting import Tick
from .study import Design, Options, StudyConclusions

SAMPLES, QUICK_SAMPLES = 40_000, 5_000  # of each run
BATCH = 16  # samples of the large batch
TAIL = 0.25  # share of a run, at its end, over which weights and losses are averaged
TAIL_LOSSES = 16  # losses that are measured in the tail: a single one would be as noisy as the weights
NOISE_MARGIN = 1.5  # equivalence margin of the noise excess, a factor; a batch of 16 changes it by 16
MOST_AVERAGED = 400  # approximate number of weights that are averaged: more would only take time
EXCESS, THEORY = "noise excess", "lr/(B(1-m)), relative"
A, B, C, D, E, F, G = "ABCDEFG"
LIMIT = (
    "It does not show that momentum is useless: where lr/(1-m) times the curvature nears 1, momentum keeps "
    "training stable. It shows one network on one task, with rates that were not tuned per arm."
)


@dataclass(frozen=True)
class Arm:
    """Batch size, momentum and learning rate of a training with plain SGD."""

    name: str
    batch: int
    momentum: float
    learning_rate: float
    updates: int
    virtual: bool = False  # accumulate the batch in micro-batches of one sample


def heavy_ball_variance(learning_rate: float, momentum: float, curvature: float, noise: float) -> float:
    """Return the stationary variance of SGD with momentum on a quadratic with noisy gradients.

    ``lr s² (1 + m) / (h (1 - m) (2 (1 + m) - lr h))``, where m is the momentum, h the curvature and s² the
    variance of the gradient (`noise`). Infinite if SGD is unstable: ``lr h >= 2 (1 + m)``.

    Examples:
        >>> round(heavy_ball_variance(0.01, 0.0, 1.0, 1.0) / heavy_ball_variance(0.0001, 0.99, 1.0, 1.0), 3)
        1.005
    """
    lr, m, h = learning_rate, momentum, curvature
    room = 2 * (1 + m) - lr * h
    return lr * noise * (1 + m) / (h * (1 - m) * room) if room > 0 else math.inf


def design(recipe: Recipe, *, options: Options) -> Design:
    """Plan the seven arms."""
    common.check_separable(recipe, "momentum")
    samples = options.samples or (QUICK_SAMPLES if options.quick else SAMPLES)
    large = options.batch_size or BATCH
    if large < 2 or samples < TAIL_LOSSES * large:
        raise InputError(
            f"samples={samples} with batch_size={large}: the large batch needs more than one sample, and its "
            f"noise is measured over many updates. Give at least {TAIL_LOSSES} batches of at least 2 samples."
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
    metric = common.column_of_metric(recipe)
    loss_samples = common.QUICK_LOSS_SAMPLES if options.quick else common.LOSS_SAMPLES
    counts = ()
    if recipe.weight is not None:
        counts = (
            f"In batches of one, all samples have equal weight; in larger ones, "
            f"the weight is the number of {recipe.counts}.",
        )
    return Design(
        arms=tuple(_planned(arm, rate) for arm in arms),
        train=partial(train, arms=arms, loss_samples=loss_samples),
        ticks=sum(arm.updates for arm in arms),
        quantities=(
            metric,
            common.COLUMNS[0],
            Quantity(name=EXCESS, meaning="training loss above that of the averaged weights", form=".2g"),
            *common.COLUMNS[1:],
            Quantity(name=THEORY, meaning="by theory proportional to the noise; arm A is 1", form=".3g"),
        ),
        progress_quantity=metric.name,
        fixed={"lr of batch 1": f"{rate:.3g}"},
        notes=(LIMIT, *counts),
        conclude=partial(conclude, metric=metric.name, margin=options.margin or recipe.margin, recipe=recipe),
        samples=samples,
        shortest=TAIL_LOSSES * large,
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


def train(recipe: Recipe, seed: int, *, arms: tuple[Arm, ...], loss_samples: int, tick: Tick) -> common.Runs:
    """Train every arm from one seed: from the same weights, on the same order of samples."""
    order = common.stream(recipe.samples, max(arm.batch * arm.updates for arm in arms), seed)

    def train_one(arm: Arm, model: nn.Module) -> StudyRun:
        update = _update_function(recipe, arm, model)
        begin = round((1 - TAIL) * arm.updates)
        every = max(1, (arm.updates - begin) // MOST_AVERAGED)
        measured_at = {begin + (i + 1) * (arm.updates - begin) // TAIL_LOSSES for i in range(TAIL_LOSSES)}
        averaged, losses = AveragedModel(model), list[float]()
        for number in range(1, arm.updates + 1):
            loss = update(recipe.batch(order[(number - 1) * arm.batch : number * arm.batch]))
            if not math.isfinite(loss):
                tick(arm.updates - number + 1)  # the progress counts the rest as done
                break
            if number > begin and number % every == 0:
                averaged.update_parameters(model)
            if number in measured_at:
                losses.append(common.training_loss(recipe, model, loss_samples))
            tick(1)
        values = {
            common.column_of_metric(recipe).name: float(recipe.evaluate(model)),
            common.LOSS: common.training_loss(recipe, model, loss_samples),
        }
        if len(losses) == len(measured_at):  # False after divergence
            # The averaged weights have next to no noise, so their loss is the part that noise does not cause.
            without_noise = common.training_loss(recipe, averaged.module, loss_samples)
            values[EXCESS] = statistics.fmean(losses) - without_noise
        return StudyRun(seed=seed, values=values)

    yield from common.from_one_start(recipe, arms, seed, train_one)


def _update_function(recipe: Recipe, arm: Arm, model: nn.Module) -> Callable[[Any], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=arm.learning_rate, momentum=arm.momentum)
    if not arm.virtual:
        return plain_update(recipe, model, optimizer)
    accumulate = accumulator(recipe, model, optimizer, microbatch_size=1)

    def virtual(batch: Any) -> float:
        try:
            return accumulate(batch).loss
        except NonFiniteError:  # plain updates return a loss that is not finite instead
            return math.nan

    return virtual


def conclude(arms: tuple[StudyArm, ...], *, metric: str, margin: float, recipe: Recipe) -> StudyConclusions:
    """Compare the arms A to G, and conclude."""
    of = {arm.name: arm for arm in arms}
    scores = [
        common.equivalence_test(of[x], of[y], metric, margin=margin, step=recipe.metric_step)
        for x, y in ((C, A), (D, A), (C, D))
    ]
    noises = [
        common.equivalence_test(of[x], of[A], EXCESS, margin=NOISE_MARGIN, ratio=True) for x in (B, C, D)
    ]
    same, noise = scores[0], noises[1]
    if same is None or noise is None:
        return StudyConclusions(tests=(*scores, *noises))
    times = of[C].facts[common.UPDATES] / of[D].facts[common.UPDATES]
    large = (of[F].mean(EXCESS) or math.nan) / (of[A].mean(EXCESS) or math.nan)
    verdict = "Undecided whether momentum 0.99 acts like a large batch"
    # Geometric mean of the noise excess of batch 1, which is 1 here, and of the large batch by theory.
    between = 1 / math.sqrt(times)
    if not large < between:
        verdict += f", because a batch of {times:.0f} has no clearly lower noise"
    elif noise.low > between and same.result.equivalent:
        verdict = "Momentum 0.99 with lr/(1-m) kept acts like the small batch, not like a large one"
    elif noise.high < between:
        verdict = "Momentum 0.99 with lr/(1-m) kept acts like a large batch here"
    conclusion = (
        f"{verdict}: noise excess x {noise.difference:.2g} ({noise.low:.2g} to {noise.high:.2g}) and "
        f"{metric.partition(',')[0]} {signed_text(same.difference)} against batch 1 without momentum; batch "
        f"{times:.0f} at that rate has a noise excess of x {float_text(large, '.1g')}."
    )
    return StudyConclusions(tests=(*scores, *noises), conclusion=conclusion)
