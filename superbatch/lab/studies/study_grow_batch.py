"""Study of a growing batch in place of a decaying learning rate.

"Don't Decay the Learning Rate, Increase the Batch Size" (Smith, Kindermans, Ying and Le 2018,
arXiv:1711.00489): the noise of SGD is proportional to the learning rate over the batch size. To multiply the
rate by f, or the batch by 1/f, therefore has the same effect, and the larger batch makes fewer updates.
`superbatch.tuning.growing.grow_batch` computes the schedule. Only the number of micro-batches grows, so the
memory stays the same.
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
from ..report.study_text import signed_text
from . import study_common as common
from .arms import accumulator, cut
from .setting import Tick
from .study import Design, Options, StudyConclusions

DECAY_UPDATES, QUICK_DECAY_UPDATES, SHORTEST = 4000, 800, 100  # updates of the arm that decays the rate
PART_OF_BATCH = 6  # the first batch is a sixth of the recipe's, so that it can grow
PHASES = ((0.5, 1.0), (0.75, 1 / 5), (1.0, 1 / 25))  # (end as a share of the samples, factor of the rate)
LOSS_MARGIN = 1.1  # equivalence margin of the training loss, a factor
ARMS = CONSTANT, DECAY, GROW = "constant rate", "decay the rate", "grow the batch"
LIMIT = (
    "It does not show that fewer updates take less time. It is for plain SGD: a learning rate that decays "
    "for another reason than noise cannot be replaced by a larger batch."
)


@dataclass(frozen=True)
class GrowSetting:
    """Setting that all arms share."""

    samples: int  # samples that each run is trained on, with repeats
    batch: int  # samples of the first update, and of each micro-batch
    learning_rate: float  # at that batch size
    dataset: int  # number of training samples
    loss_samples: int  # training samples over which losses are computed


def design(recipe: Recipe, *, options: Options) -> Design:
    """Plan the three arms."""
    common.check_separable(recipe, "grow-batch")
    batch = options.batch_size or max(1, recipe.batch_size // PART_OF_BATCH)
    if 2 * batch > recipe.samples:
        raise InputError(
            f"batch_size={batch} with {recipe.samples} training samples: the batch cannot grow. Give a "
            "smaller one."
        )
    setting = GrowSetting(
        samples=options.samples or batch * (QUICK_DECAY_UPDATES if options.quick else DECAY_UPDATES),
        batch=batch,
        learning_rate=options.learning_rate or common.rate_of(recipe, batch),
        dataset=recipe.samples,
        loss_samples=common.QUICK_LOSS_SAMPLES if options.quick else common.LOSS_SAMPLES,
    )
    metric = common.column_of_metric(recipe)
    return Design(
        arms=_arms(setting),
        train=partial(train, setting=setting),
        ticks=len(ARMS) * setting.samples,
        quantities=(metric, *common.COLUMNS),
        progress_quantity=common.LOSS,
        fixed={"first batch": str(batch), "lr": f"{setting.learning_rate:.3g}"},
        notes=(LIMIT,),
        conclude=partial(conclude, metric=metric.name, margin=options.margin or recipe.margin),
        curve_at=common.curve_points(setting.samples),
        samples=setting.samples,
        shortest=SHORTEST * batch,
    )


def _arms(setting: GrowSetting) -> tuple[StudyArm, ...]:
    batch, samples = setting.batch, setting.samples
    schedule, at = schedule_of(setting), common.curve_points(samples)
    updates = schedule.updates(samples)
    sizes = sorted({schedule(update) * batch for update in range(updates)})
    factors = ", ".join(f"{factor:g}" for _, factor in PHASES)
    arms = {
        CONSTANT: f"batch {batch}, rate x 1",
        DECAY: f"batch {batch}, rate x {factors}",
        GROW: f"batch {', '.join(map(str, sizes))} in micro-batches of {batch}",
    }
    return tuple(
        StudyArm(
            name=name,
            how=how,
            facts={
                common.UPDATES: float(updates if name == GROW else samples // batch),
                common.SEEN: float(samples),
            },
            runs=(),
            curve_updates=tuple(float(schedule.updates(n) if name == GROW else n / batch) for n in at),
        )
        for name, how in arms.items()
    )


def schedule_of(setting: GrowSetting) -> GrowingBatch:
    """Return the schedule of accumulation steps that replaces the decay of the learning rate.

    Steps are whole numbers; the rate of the schedule makes up for the rounding.
    """
    return grow_batch(
        lambda samples: factor(samples / setting.samples),
        batch=setting.batch,
        microbatch=setting.batch,
        dataset=setting.dataset,
        form="exact",
        tail="drop",  # permutations are concatenated, so no window is cut at the end of an epoch
    )


def factor(share: float) -> float:
    """Return the factor of the learning rate after a share of the samples.

    Examples:
        >>> factor(0.0), factor(0.5), factor(0.9)
        (1.0, 0.2, 0.04)
    """
    return next((value for end, value in PHASES if share < end), PHASES[-1][1])


def train(recipe: Recipe, seed: int, *, setting: GrowSetting, tick: Tick) -> common.Runs:
    """Train every arm from one seed, on the same samples in the same order."""
    yield from common.from_one_start(recipe, ARMS, seed, partial(_train, recipe, setting, seed, tick))


def _train(
    recipe: Recipe, setting: GrowSetting, seed: int, tick: Tick, arm: str, model: nn.Module
) -> StudyRun:
    """Train one arm."""
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.learning_rate)
    accumulate = accumulator(recipe, model, optimizer)
    schedule = schedule_of(setting)
    # A grown batch may reach beyond the planned samples, by less than the training set.
    order = common.stream(recipe.samples, setting.samples + setting.dataset, seed)
    seen = update = 0
    curve: list[float] = []
    while seen < setting.samples:
        steps = schedule(update) if arm == GROW else 1
        # The growing arm changes its rate, too: that makes up for a whole number of micro-batches.
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
            curve.append(common.training_loss(recipe, model, setting.loss_samples))
    values = {
        common.column_of_metric(recipe).name: float(recipe.evaluate(model)),
        common.LOSS: curve[-1],
        common.UPDATES: float(update),
    }
    return StudyRun(seed=seed, values=values, curve=tuple(curve))


def conclude(arms: tuple[StudyArm, ...], *, metric: str, margin: float) -> StudyConclusions:
    """Test that growing equals decaying, and the premise that the schedule matters; conclude."""
    constant, decay, grow = arms
    tests = (
        common.equivalence_test(grow, decay, common.LOSS, margin=LOSS_MARGIN, ratio=True),
        common.equivalence_test(grow, decay, metric, margin=margin),
        common.equivalence_test(constant, decay, common.LOSS, margin=LOSS_MARGIN, ratio=True),
    )
    loss, same, stays = tests
    if loss is None or same is None or stays is None:
        return StudyConclusions(tests=tests)
    grow_updates, decay_updates = (arm.mean(common.UPDATES) or math.nan for arm in (grow, decay))
    numbers = (
        f"{grow_updates:,.0f} updates instead of {decay_updates:,.0f}, training loss "
        f"x {loss.difference:.3g} ({loss.low:.3g} to {loss.high:.3g}), "
        f"{metric.partition(',')[0]} {signed_text(same.difference)}"
    )
    stayed = ""
    if stays.result.equivalent:
        stayed = "; here a constant rate does the same, so the schedule hardly matters"
    conclusion = f"Growing the batch acts like decaying the rate, in fewer updates: {numbers}{stayed}."
    if not (loss.result.equivalent and same.result.equivalent and grow_updates < decay_updates):
        conclusion = (
            f"Not shown to be the same: growing the batch instead of decaying the rate made {numbers}."
        )
    return StudyConclusions(tests=tests, conclusion=conclusion)
