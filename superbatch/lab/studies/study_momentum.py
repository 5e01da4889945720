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

import copy
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.errors import InputError, NonFiniteError
from superbatch.torch import Accumulator

from ..recipes import Recipe
from ..report.study import Quantity, Study, StudyArm, StudyRun, StudyTest
from ..report.study_text import number, signed
from .participants import participants_of
from .study import ArmSetting, Design, Findings, Options, Show, run_design
from .study_common import (
    LOSS_SAMPLES,
    QUICK_LOSS_SAMPLES,
    compared,
    mean_loss,
    parameters_apart,
    present,
    quantity_of_metric,
    rate_of,
    separable,
    stream,
    training_loss,
)

NAME = "momentum"
SAMPLES, QUICK_SAMPLES = 40_000, 5_000
BATCH = 16
TAIL = 0.25
"""Share of a run, its last, whose weights are averaged."""

LOOKS = 16
"""Losses taken in the tail: one alone would be as noisy as the weights are."""

NOISE_MARGIN = 1.5
"""A factor of the noise excess that does not matter: a batch of 16 changes it by 16."""

EXCESS, LOSS, UPDATES, SEEN, THEORY = (
    "noise excess",
    "training loss",
    "updates",
    "samples",
    "lr/(B(1-m)), relative",
)
A, B, C, D, E, F, G = "ABCDEFG"


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

    ``lr s² (1 + m) / (h (1 - m) (2 (1 + m) - lr h))``, stable below ``lr h = 2 (1 + m)``.

    Examples:
        >>> round(heavy_ball_variance(0.01, 0.0, 1.0, 1.0) / heavy_ball_variance(0.0001, 0.99, 1.0, 1.0), 3)
        1.005
    """
    lr, m, h = learning_rate, momentum, curvature
    room = 2 * (1 + m) - lr * h
    return lr * noise * (1 + m) / (h * (1 - m) * room) if room > 0 else math.inf


def run(recipe: str | Recipe, options: Options, progress: Show) -> Study:
    """Run the study."""
    return run_design(NAME, recipe, options, design, progress)


def design(recipe: Recipe, *, options: Options) -> Design:
    """The seven arms of the study."""
    separable(recipe, NAME)
    samples = options.samples or (QUICK_SAMPLES if options.quick else SAMPLES)
    large = options.batch_size or BATCH
    if large < 2 or samples < LOOKS * large:
        raise InputError(
            f"samples={samples} with batch_size={large}: "
            "a large batch is more than one sample, and its noise is looked at over many updates. "
            f"Give at least {LOOKS} batches of at least 2 samples."
        )
    rate = options.learning_rate or rate_of(recipe, large) / large
    arms = (
        Arm(A, 1, 0.0, rate, samples),
        Arm(B, 1, 0.9, rate / 10, samples),
        Arm(C, 1, 0.99, rate / 100, samples),
        Arm(D, large, 0.0, large * rate, samples // large, virtual=True),
        Arm(E, large, 0.0, rate, samples // large),
        Arm(F, large, 0.0, rate, samples),
        Arm(G, 1, 0.99, rate, samples),
    )
    metric = quantity_of_metric(recipe)
    return Design(
        arms=tuple(ArmSetting(name=arm.name, how=_how(arm), facts=_facts(arm, rate)) for arm in arms),
        setting=Setting(arms, QUICK_LOSS_SAMPLES if options.quick else LOSS_SAMPLES),
        train=train,
        ticks=sum(arm.updates for arm in arms),
        quantities=_quantities(metric),
        headline=metric,
        fixed={"lr of batch 1": f"{rate:.3g}"},
        find=partial(find, metric=metric, margin=options.margin or recipe.margin, recipe=recipe),
        samples=samples,
        shortest=LOOKS * large,
    )


def train(
    recipe: Recipe, setting: Setting, seed: int, *, tick: Callable[[int], None]
) -> Iterator[tuple[int, StudyRun]]:
    """Train every arm from one seed: the same initial weights, the same samples first."""
    initial = recipe.model(seed)
    order = stream(recipe.samples, max(arm.batch * arm.updates for arm in setting.arms), seed)
    for index, arm in enumerate(setting.arms):
        model = copy.deepcopy(initial)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            values = _train(recipe, setting, arm, model, order, tick)
        yield index, StudyRun(seed=seed, values=values)


def _train(
    recipe: Recipe,
    setting: Setting,
    arm: Arm,
    model: nn.Module,
    order: Tensor,
    tick: Callable[[int], None],
) -> dict[str, float]:
    update = _update_function(recipe, arm, model)
    begin = round((1 - TAIL) * arm.updates)
    every = max(1, (arm.updates - begin) // 400)
    looks = {begin + (i + 1) * (arm.updates - begin) // LOOKS for i in range(LOOKS)}
    mean, averaged, losses = [torch.zeros_like(each) for each in parameters_apart(model)], 0, list[float]()
    for made in range(1, arm.updates + 1):
        loss = update(recipe.batch(order[(made - 1) * arm.batch : made * arm.batch]))
        if not math.isfinite(loss):
            tick(arm.updates - made + 1)
            break
        if made > begin and made % every == 0:
            averaged += 1
            for total, parameter in zip(mean, parameters_apart(model), strict=True):
                total += (parameter - total) / averaged
        if made in looks:
            losses.append(training_loss(recipe, model, setting.looked_at))
        tick(1)
    values = {
        quantity_of_metric(recipe): float(recipe.evaluate(model)),
        LOSS: training_loss(recipe, model, setting.looked_at),
    }
    if len(losses) < len(looks):  # it has diverged, or was too short to measure
        return values
    calm = copy.deepcopy(model)
    for parameter, value in zip(parameters_apart(calm), mean, strict=True):
        parameter.copy_(value)
    return {**values, EXCESS: statistics.fmean(losses) - training_loss(recipe, calm, setting.looked_at)}


def _update_function(recipe: Recipe, arm: Arm, model: nn.Module) -> Callable[[Any], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=arm.learning_rate, momentum=arm.momentum)
    loss_fn = recipe.loss_fn(model)
    if arm.virtual:
        make_update = Accumulator(
            model,
            optimizer,
            loss_fn,
            microbatch_size=1,
            reduction=recipe.reduction,
            weight=recipe.weight,
            participants=participants_of(recipe.batchnorm),
        )

        def virtual(batch: Any) -> float:
            try:
                return make_update(batch).loss
            except NonFiniteError:  # what the other arms tell by their loss
                return math.nan

        return virtual

    def update(batch: Any) -> float:
        loss = mean_loss(recipe, loss_fn, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return update


def find(arms: tuple[StudyArm, ...], *, metric: str, margin: float, recipe: Recipe) -> Findings:
    """Test and conclude."""
    of = {arm.name: arm for arm in arms}
    tests = present(
        [
            *(
                compared(of[x], of[y], metric, margin=margin, step=recipe.metric_step)
                for x, y in ((C, A), (D, A), (C, D))
            ),
            *(compared(of[x], of[A], EXCESS, margin=NOISE_MARGIN, ratio=True) for x in (B, C, D)),
        ]
    )
    notes = [
        f"{EXCESS}: the mean training loss of the weights over the last quarter of a run, less the training "
        "loss of the average of those weights: what the noise of the updates costs. Runs of a seed share "
        "initial weights and the order of samples, so tests are made on pairs.",
        "The conclusion asks on which side of the middle (by logarithms) between batch 1 and the large batch "
        "at the same rate the interval of the noise of momentum 0.99 lies; whether it is equal to that of "
        "batch 1 is another question, which the table of tests answers.",
        "It does not show that momentum is useless: where lr/(1-m) times the curvature nears 1, momentum "
        "keeps training stable. It shows one network on one task, with rates that were not tuned per arm.",
    ]
    if recipe.weight is not None:
        notes.append(
            f"In a batch of one every sample counts the same; in a larger batch by its {recipe.counts}."
        )
    return Findings(tests=tests, conclusion=conclude(of, tests, metric), notes=tuple(notes))


def conclude(of: dict[str, StudyArm], tests: tuple[StudyTest, ...], metric: str) -> str:
    """One sentence, from the tests."""
    found = {(test.first, test.second, test.quantity): test for test in tests}
    noise, same, scaled = found.get((C, A, EXCESS)), found.get((C, A, metric)), found.get((D, A, metric))
    if noise is None or same is None or scaled is None:
        return "Too few runs were finished to conclude anything."
    metric, _, _ = metric.partition(",")
    times = of[C].facts[UPDATES] / of[D].facts[UPDATES]
    large = (of[F].mean(EXCESS) or math.nan) / (of[A].mean(EXCESS) or math.nan)
    measured = (
        f"its noise excess is x {noise.difference:.2g} that of batch 1 ({noise.low:.2g} to "
        f"{noise.high:.2g}; a batch of {times:.0f} at the rate of batch 1: x {number(large, '.1g')}), its "
        f"{metric} differs by {signed(same.difference)}"
    )
    # Half way, by logarithms, between the noise of batch 1 and that of the large batch.
    between = 1 / math.sqrt(times)
    if not large < between:
        return (
            f"Undecided whether momentum 0.99 is a large batch: here a batch of {times:.0f} at the rate of "
            f"batch 1 has no clearly lower noise, so that noise does not tell them apart: {measured}."
        )
    if noise.low > between and same.result.equivalent:
        reached = "reaches" if scaled.result.equivalent else "is not shown to reach"
        return (
            f"Momentum 0.99 with lr/(1-m) kept is the small batch, not a large one: {measured}, and the "
            f"batch of {times:.0f} with {times:.0f} times the rate {reached} the same {metric} in "
            f"{times:.0f} times fewer updates."
        )
    if noise.high < between:
        return f"Momentum 0.99 with lr/(1-m) kept acts like a large batch here: {measured}."
    verdict = "equivalent" if same.result.equivalent else "not shown to be equivalent"
    return f"Undecided whether momentum 0.99 is a large batch: {measured} ({verdict})."


def _how(arm: Arm) -> str:
    batch = "batch 1" if arm.batch == 1 else f"batch {arm.batch}"
    virtual = ", accumulated one by one" if arm.virtual else ""
    return f"{batch}{virtual}, momentum {arm.momentum:g}, lr {arm.learning_rate:.3g}"


def _facts(arm: Arm, rate: float) -> dict[str, float]:
    theory = arm.learning_rate / (arm.batch * (1 - arm.momentum)) / rate
    return {UPDATES: arm.updates, SEEN: arm.updates * arm.batch, THEORY: theory}


def _quantities(metric: str) -> tuple[Quantity, ...]:
    form = ".2f" if metric.endswith("%") else ".4g"
    return (
        Quantity(name=metric, meaning="of held-out data, after the last update", form=form),
        Quantity(name=LOSS, meaning="mean over the training set after the last update", form=".4f"),
        Quantity(name=EXCESS, meaning="what the noise of the updates costs in training loss", form=".2g"),
        Quantity(name=UPDATES, meaning="of each run", form=",.0f"),
        Quantity(name=SEEN, meaning="that each run has seen", form=",.0f"),
        Quantity(name=THEORY, meaning="what the noise should be proportional to; arm A is 1", form=".3g"),
    )
