"""Decay the learning rate, or grow the batch?

"Don't Decay the Learning Rate, Increase the Batch Size" (Smith, Kindermans, Ying and Le 2018,
arXiv:1711.00489): the noise of SGD goes with the rate over the batch, so that a rate that falls to f and a
batch that grows to 1/f cool a training alike, and the second makes fewer updates. The arithmetic is
`superbatch.tuning.growing.grow_batch`; only the window grows, the micro-batch and with it the memory stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from superbatch.errors import InputError, NonFiniteError
from superbatch.tuning.growing import GrowingBatch, grow_batch
from superbatch.window import Window

from ..recipes import Recipe
from ..report.study import StudyArm, StudyRun
from ..report.study_text import signed
from . import study_common as common
from .arms import cut
from .participants import accumulator
from .setting import Tick
from .study import Design, Findings, Options

MADE, QUICK_MADE, SHORTEST = 4000, 800, 100  # updates of the arm that decays the rate
PART_OF_BATCH = 6  # the first batch is a sixth of the recipe's: there is room to grow
# (share of the samples where a phase ends, factor of the rate in it).
PHASES = ((0.5, 1.0), (0.75, 1 / 5), (1.0, 1 / 25))
LOSS_MARGIN = 1.1  # a factor of the training loss that does not matter
CONSTANT, DECAY, GROW = "constant rate", "decay the rate", "grow the batch"
LIMIT = (
    "It does not show that fewer updates take less time, and it is for plain SGD: a rate that decays for "
    "another reason than noise has no batch in its place."
)


@dataclass(frozen=True)
class Setting:
    """The arms, named after what follows the schedule: nothing, the rate, or the batch."""

    arms: tuple[str, ...]
    samples: int  # that each run sees
    batch: int  # samples of the first update, and of each micro-batch
    learning_rate: float  # at that batch
    dataset: int  # training samples, from which batches are drawn without replacement
    looked_at: int  # training samples that losses are taken over


def design(recipe: Recipe, *, options: Options) -> Design:
    """Plan the three arms."""
    common.separable(recipe, "grow-batch")
    batch = options.batch_size or max(1, recipe.batch_size // PART_OF_BATCH)
    if 2 * batch > recipe.samples:
        raise InputError(
            f"batch_size={batch} with {recipe.samples} training samples: there is no room for the batch to "
            "grow. Give a smaller one."
        )
    setting = Setting(
        arms=(CONSTANT, DECAY, GROW),
        samples=options.samples or batch * (QUICK_MADE if options.quick else MADE),
        batch=batch,
        learning_rate=options.learning_rate or common.rate_of(recipe, batch),
        dataset=recipe.samples,
        looked_at=common.QUICK_LOSS_SAMPLES if options.quick else common.LOSS_SAMPLES,
    )
    metric = common.quantity_of_metric(recipe)
    return Design(
        arms=_arms(setting),
        setting=setting,
        train=train,
        ticks=len(setting.arms) * setting.samples,
        quantities=(common.column_of_metric(metric), *common.COLUMNS),
        headline=common.LOSS,
        fixed={"first batch": str(batch), "lr": f"{setting.learning_rate:.3g}"},
        find=partial(find, metric=metric, margin=options.margin or recipe.margin),
        curve_at=common.curve_points(setting.samples),
        samples=setting.samples,
        shortest=SHORTEST * batch,
    )


def _arms(setting: Setting) -> tuple[StudyArm, ...]:
    batch, samples = setting.batch, setting.samples
    schedule, at = schedule_of(setting), common.curve_points(samples)
    updates = schedule.updates(samples)
    sizes = sorted({schedule(update) * batch for update in range(updates)})
    steady = samples // batch, tuple(each / batch for each in at)
    grown = updates, tuple(float(schedule.updates(each)) for each in at)
    factors = ", ".join(f"{factor:g}" for _, factor in PHASES)
    arms = {
        CONSTANT: (f"batch {batch}, rate x 1", *steady),
        DECAY: (f"batch {batch}, rate x {factors}", *steady),
        GROW: (f"batch {', '.join(map(str, sizes))} in micro-batches of {batch}", *grown),
    }
    return tuple(
        StudyArm(
            name=name,
            how=how,
            facts={common.UPDATES: float(made), common.SEEN: float(samples)},
            runs=(),
            curve_updates=curve_updates,
        )
        for name, (how, made, curve_updates) in arms.items()
    )


def schedule_of(setting: Setting) -> GrowingBatch:
    """The rate's schedule as a schedule of accumulation steps; its own rate is what is left over."""
    return grow_batch(
        lambda samples: factor(samples / setting.samples),
        batch=setting.batch,
        microbatch=setting.batch,
        dataset=setting.dataset,
        form="exact",
        tail="drop",  # permutations run into each other: no window is cut at an epoch's end
    )


def factor(share: float) -> float:
    """The rate's factor after a share of the samples.

    Examples:
        >>> factor(0.0), factor(0.5), factor(0.9)
        (1.0, 0.2, 0.04)
    """
    return next((value for end, value in PHASES if share < end), PHASES[-1][1])


def train(recipe: Recipe, setting: Setting, seed: int, *, tick: Tick) -> common.Runs:
    """Train every arm from one seed, on the same samples in the same order."""
    yield from common.from_one_start(recipe, setting.arms, seed, partial(_train, recipe, setting, seed, tick))


def _train(recipe: Recipe, setting: Setting, seed: int, tick: Tick, arm: str, model: nn.Module) -> StudyRun:
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.learning_rate)
    accumulate = accumulator(recipe, model, optimizer)
    schedule = schedule_of(setting)
    # The last window may reach beyond the end, where the batch has grown.
    order = common.stream(recipe.samples, setting.samples + setting.dataset, seed)
    seen = update = 0
    curve: list[float] = []
    while seen < setting.samples:
        steps = schedule(update) if arm == GROW else 1
        # What whole micro-batches leave over of the schedule is in the rate of the arm that grows.
        decayed = factor(seen / setting.samples) if arm == DECAY else 1.0
        rate = schedule.rate(update) if arm == GROW else decayed
        optimizer.param_groups[0]["lr"] = setting.learning_rate * rate
        size = steps * setting.batch
        batch = recipe.batch(order[seen : seen + size])
        try:
            accumulate(Window(cut(batch, (setting.batch,) * steps)))
        except NonFiniteError:
            raise common.diverged(setting.learning_rate) from None
        seen, update = seen + size, update + 1
        tick(size)
        while len(curve) < common.POINTS and seen >= setting.samples * (len(curve) + 1) / common.POINTS:
            curve.append(common.training_loss(recipe, model, setting.looked_at))
    metric = float(recipe.evaluate(model))
    values = {
        common.quantity_of_metric(recipe): metric,
        common.LOSS: curve[-1],
        common.UPDATES: float(update),
    }
    return StudyRun(seed=seed, values=values, curve=tuple(curve))


def find(arms: tuple[StudyArm, ...], *, metric: str, margin: float) -> Findings:
    """Test and conclude: two tests of sameness, and one of the premise that the schedule matters."""
    constant, decay, grow = arms
    tests = (
        common.compared(grow, decay, common.LOSS, margin=LOSS_MARGIN, ratio=True),
        common.compared(grow, decay, metric, margin=margin),
        common.compared(constant, decay, common.LOSS, margin=LOSS_MARGIN, ratio=True),
    )
    loss, same, stays = tests
    made, instead = grow.mean(common.UPDATES) or math.nan, decay.mean(common.UPDATES) or math.nan
    if loss is None or same is None or stays is None:
        return Findings(tests=common.present(tests), conclusion=common.TOO_FEW, notes=(LIMIT,))
    said = (
        f"{made:,.0f} updates instead of {instead:,.0f}, training loss x {loss.difference:.3g} "
        f"({loss.low:.3g} to {loss.high:.3g}), {metric.partition(',')[0]} {signed(same.difference)}"
    )
    stayed = ""
    if stays.result.equivalent:
        stayed = "; here a rate that stays does the same, so the schedule hardly matters"
    conclusion = f"Growing the batch is decaying the rate, in fewer updates: {said}{stayed}."
    if not (loss.result.equivalent and same.result.equivalent and made < instead):
        conclusion = f"Not shown to be the same: growing the batch instead of decaying the rate made {said}."
    return Findings(tests=common.present(tests), conclusion=conclusion, notes=(LIMIT,))
