"""Decay the learning rate, or grow the batch?

"Don't Decay the Learning Rate, Increase the Batch Size" (Smith, Kindermans, Ying and Le 2018,
arXiv:1711.00489): the noise of SGD goes with the rate over the batch, so that a rate that falls to f and a
batch that grows to 1/f cool a training alike, and the second makes fewer updates. The arithmetic is
`superbatch.tuning.growing.grow_batch`; only the window grows, the micro-batch and with it the memory stays.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from superbatch.errors import InputError, NonFiniteError
from superbatch.torch import Accumulator
from superbatch.tuning.growing import GrowingBatch, grow_batch
from superbatch.window import Window

from ..recipes import Recipe
from ..report.study import Quantity, Study, StudyArm, StudyRun, StudyTest
from ..report.study_text import signed
from .arms import cut
from .participants import participants_of
from .study import ArmSetting, Design, Findings, Options, Show, run_design
from .study_common import (
    LOSS_SAMPLES,
    QUICK_LOSS_SAMPLES,
    compared,
    diverged,
    present,
    quantity_of_metric,
    rate_of,
    separable,
    stream,
    training_loss,
)

NAME = "grow-batch"
UPDATES, QUICK_UPDATES, SHORTEST = 4000, 800, 100
"""Of the arm that decays the rate."""

PART_OF_BATCH = 6
"""The first batch is a sixth of the recipe's: there is room to grow."""

PHASES = ((0.5, 1.0), (0.75, 1 / 5), (1.0, 1 / 25))
"""(share of the samples where a phase ends, factor of the rate in it)."""

POINTS = 40
LOSS_MARGIN = 1.1
"""A factor of the training loss that does not matter."""

CONSTANT, DECAY, GROW = "constant rate", "decay the rate", "grow the batch"
LOSS, MADE, SEEN = "training loss", "updates", "samples"


@dataclass(frozen=True)
class Arm:
    """Arm, named after what follows the schedule: nothing, the rate, or the batch."""

    name: str


@dataclass(frozen=True)
class Setting:
    """The arms; it can be sent to another process."""

    arms: tuple[Arm, ...]  # what follows the schedule
    samples: int  # that each run sees
    batch: int  # samples of the first update, and of each micro-batch
    learning_rate: float  # at that batch
    dataset: int  # training samples, from which batches are drawn without replacement
    looked_at: int  # training samples that losses are taken over


def run(recipe: str | Recipe, options: Options, progress: Show) -> Study:
    """Run the study."""
    return run_design(NAME, recipe, options, design, progress)


def design(recipe: Recipe, *, options: Options) -> Design:
    """The three arms of the study."""
    separable(recipe, NAME)
    batch = options.batch_size or max(1, recipe.batch_size // PART_OF_BATCH)
    if 2 * batch > recipe.samples:
        raise InputError(
            f"batch_size={batch} with {recipe.samples} training samples: "
            "there is no room for the batch to grow. "
            "Give a smaller one."
        )
    setting = Setting(
        arms=tuple(map(Arm, (CONSTANT, DECAY, GROW))),
        samples=options.samples or batch * (QUICK_UPDATES if options.quick else UPDATES),
        batch=batch,
        learning_rate=options.learning_rate or rate_of(recipe, batch),
        dataset=recipe.samples,
        looked_at=QUICK_LOSS_SAMPLES if options.quick else LOSS_SAMPLES,
    )
    schedule = schedule_of(setting)
    at = tuple(setting.samples * (point + 1) / POINTS for point in range(POINTS))
    metric = quantity_of_metric(recipe)
    updates = {CONSTANT: setting.samples // batch, DECAY: setting.samples // batch}
    updates[GROW] = schedule.updates(setting.samples)
    return Design(
        arms=tuple(
            ArmSetting(
                name=arm.name,
                how=_how(arm, setting, schedule),
                facts={MADE: updates[arm.name], SEEN: setting.samples},
                curve_updates=tuple(
                    float(schedule.updates(each)) if arm.name == GROW else each / batch for each in at
                ),
            )
            for arm in setting.arms
        ),
        setting=setting,
        train=train,
        ticks=len(setting.arms) * setting.samples,
        quantities=_quantities(metric),
        headline=LOSS,
        fixed={"first batch": str(batch), "lr": f"{setting.learning_rate:.3g}"},
        find=partial(find, metric=metric, margin=options.margin or recipe.margin),
        curve_at=at,
        samples=setting.samples,
        shortest=SHORTEST * batch,
    )


def schedule_of(setting: Setting) -> GrowingBatch:
    """The rate's schedule as a schedule of accumulation steps."""
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


def train(
    recipe: Recipe, setting: Setting, seed: int, *, tick: Callable[[int], None]
) -> Iterator[tuple[int, StudyRun]]:
    """Train every arm from one seed: the same initial weights, the same samples in the same order."""
    initial = recipe.model(seed)
    for index, arm in enumerate(setting.arms):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield index, _train(recipe, setting, arm, copy.deepcopy(initial), seed, tick)


def _train(
    recipe: Recipe, setting: Setting, arm: Arm, model: nn.Module, seed: int, tick: Callable[[int], None]
) -> StudyRun:
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.learning_rate)
    accumulate = Accumulator(
        model,
        optimizer,
        recipe.loss_fn(model),
        reduction=recipe.reduction,
        weight=recipe.weight,
        participants=participants_of(recipe.batchnorm),
    )
    schedule = schedule_of(setting)
    # The last window may reach beyond the end, where the batch has grown.
    order = stream(recipe.samples, setting.samples + setting.dataset, seed)
    seen = update = 0
    curve: list[float] = []
    while seen < setting.samples:
        steps = schedule(update) if arm.name == GROW else 1
        rate = {CONSTANT: 1.0, DECAY: factor(seen / setting.samples)}.get(arm.name)
        optimizer.param_groups[0]["lr"] = setting.learning_rate * (
            schedule.rate(update) if rate is None else rate
        )
        size = steps * setting.batch
        batch = recipe.batch(order[seen : seen + size])
        try:
            accumulate(Window(cut(batch, (setting.batch,) * steps)))
        except NonFiniteError:
            raise diverged(setting.learning_rate) from None
        seen, update = seen + size, update + 1
        tick(size)
        while len(curve) < POINTS and seen >= setting.samples * (len(curve) + 1) / POINTS:
            curve.append(training_loss(recipe, model, setting.looked_at))
    values = {quantity_of_metric(recipe): float(recipe.evaluate(model)), LOSS: curve[-1], MADE: float(update)}
    return StudyRun(seed=seed, values=values, curve=tuple(curve))


def find(arms: tuple[StudyArm, ...], *, metric: str, margin: float) -> Findings:
    """Test and conclude."""
    of = {arm.name: arm for arm in arms}
    tests = present(
        [
            compared(of[GROW], of[DECAY], LOSS, margin=LOSS_MARGIN, ratio=True),
            compared(of[GROW], of[DECAY], metric, margin=margin),
            compared(of[CONSTANT], of[DECAY], LOSS, margin=LOSS_MARGIN, ratio=True),
        ]
    )
    notes = (
        "Runs of a seed share initial weights and the order of samples, so tests are made on pairs. The arm "
        f'"{CONSTANT}" is there to show that the schedule matters: where it does no harm, "the same loss" '
        "would say nothing about schedules.",
        "The batch grows by the exact form, lr (1/B - 1/N) for batches drawn without replacement from N "
        "samples; what whole micro-batches leave over is in the rate.",
        "It does not show that fewer updates take less time: on one device the samples cost what they cost. "
        "It is for plain SGD; a rate that decays for another reason than noise has no batch in its place.",
    )
    return Findings(tests=tests, conclusion=conclude(of, tests, metric), notes=notes)


def conclude(of: dict[str, StudyArm], tests: tuple[StudyTest, ...], metric: str) -> str:
    """One sentence, from the tests."""
    found = {(test.first, test.quantity): test for test in tests}
    loss, same, constant = found.get((GROW, LOSS)), found.get((GROW, metric)), found.get((CONSTANT, LOSS))
    if loss is None or same is None or constant is None:
        return "Too few runs were finished to conclude anything."
    words, _, _ = metric.partition(",")
    made, instead = of[GROW].mean(MADE) or math.nan, of[DECAY].mean(MADE) or math.nan
    said = (
        f"{made:,.0f} updates instead of {instead:,.0f}, training loss x {loss.difference:.3g} "
        f"({loss.low:.3g} to {loss.high:.3g}), {words} {signed(same.difference)}"
    )
    if not (loss.result.equivalent and same.result.equivalent and made < instead):
        return f"Not shown to be the same: growing the batch instead of decaying the rate made {said}."
    beside = f"a rate that stays ends at x {constant.difference:.2g}"
    if constant.result.equivalent:
        beside = "but here a rate that stays does the same, so that the schedule hardly matters"
    elif constant.low < 1 < constant.high:
        beside += ", which is not shown to be another loss"
    return f"Growing the batch is decaying the rate, in fewer updates: {said}; {beside}."


def _how(arm: Arm, setting: Setting, schedule: GrowingBatch) -> str:
    if arm.name == GROW:
        updates = schedule.updates(setting.samples)
        sizes = sorted({schedule(update) * setting.batch for update in range(updates)})
        return f"batch {', '.join(map(str, sizes))} in micro-batches of {setting.batch}"
    factors = ", ".join(f"{value:g}" for _, value in PHASES) if arm.name == DECAY else "1"
    return f"batch {setting.batch}, rate x {factors}"


def _quantities(metric: str) -> tuple[Quantity, ...]:
    form = ".2f" if metric.endswith("%") else ".4g"
    return (
        Quantity(name=metric, meaning="of held-out data, after the last update", form=form),
        Quantity(name=LOSS, meaning="mean over the training set after the last update", form=".4f"),
        Quantity(name=MADE, meaning="of each run", form=",.0f"),
        Quantity(name=SEEN, meaning="that each run has seen", form=",.0f"),
    )
