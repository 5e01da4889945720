"""Study of the critical batch: the largest one that wastes no samples, and its prediction by the noise scale.

Train to a checkpoint with a small batch. From there, continue in branches: on the same samples in the same
order, with a batch of k times the size and the optimizer rescaled by `superbatch.torch.tuning.rescale`. The
critical batch *by branching* (Merrill et al. 2025, arXiv:2505.23971) is the largest whose smoothed loss still
equals that of the small batch. The noise scale at the checkpoint predicts it: a batch B needs 1 + B/B_noise
times the samples of a tiny batch (McCandlish et al. 2018, arXiv:1812.06162).
"""

from __future__ import annotations

import copy
import math
import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn

from superbatch.errors import InputError
from superbatch.results.noise import ASSUMPTION, Noise
from superbatch.torch.tuning.scaling import rescale

from ..recipes import Recipe
from ..report.study import Quantity, StudyArm, StudyRun, StudyTest
from . import study_common as common
from .arms import losses_and_noise, plain_update
from .checks import optimizer_and_rate
from .setting import Tick
from .study import TOO_FEW, Design, Options, StudyConclusions

SAMPLES, QUICK_SAMPLES = 12_000, 6_000  # of each branch
BEFORE = 0.5  # samples up to the checkpoint, as a share of those of a branch
KS = (1, 2, 4, 8, 16)  # batch sizes of the branches, as multiples of the small batch
PART_OF_BATCH = 12  # the small batch is a twelfth of the recipe's
TOLERANCE = 0.05  # relative difference of the smoothed loss that does not matter
HALF_LIFE = 0.1  # of the smoothing, as a share of a branch's samples
NOISE_WINDOWS, NOISE_STEPS = 64, 8  # windows that measure the noise scale, and micro-batches of each
LOSS, RATE = "smoothed loss", "lr"
WASTE, PREDICTED = "samples needed, x", "by the noise scale, x"
QUANTITIES = (
    Quantity(name=LOSS, meaning="of the training batches, half-life a tenth of the branch", form=".4f"),
    Quantity(name=common.UPDATES, meaning="of the branch", form=",.0f"),
    Quantity(name=RATE, meaning="by the scaling rule: linear for SGD, square root for Adam", form=".3g"),
    Quantity(name=WASTE, meaning="relative to the small batch at the same smoothed loss", form=".2f"),
    Quantity(name=PREDICTED, meaning="from the noise scale at the checkpoint over all seeds", form=".2f"),
)
LIMIT = (
    "It does not show the loss that a learning rate tuned for each batch would reach: the rate follows the "
    "scaling rule, and a branch may fail because its rate is unstable, not because of noise."
)
SIGNAL, VARIANCE = "signal", "variance"  # of the gradient at the checkpoint; no column shows them


@dataclass(frozen=True)
class BranchSetting:
    """Setting that all branches share."""

    batch: int  # samples of the small batch
    before: int  # samples up to the checkpoint
    samples: int  # samples of each branch
    optimizer: str
    learning_rate: float  # of the small batch


def design(recipe: Recipe, *, options: Options) -> Design:
    """Plan the branches."""
    common.check_separable(recipe, "critical-batch")
    optimizer, rate = optimizer_and_rate(recipe, options, by="superbatch study")
    samples = options.samples or (QUICK_SAMPLES if options.quick else SAMPLES)
    batch = options.batch_size or max(1, recipe.batch_size // PART_OF_BATCH)
    if samples < KS[-1] * batch:
        raise InputError(
            f"samples={samples} with batch_size={batch}: the largest branch has a batch of "
            f"{KS[-1] * batch} samples and makes no update. Give at least {KS[-1] * batch} samples, better "
            "many times as many."
        )
    setting = BranchSetting(batch, round(BEFORE * samples), samples, optimizer, rate)
    at = common.curve_points(samples)
    return Design(
        arms=tuple(
            StudyArm(
                name=f"batch {k * batch}",
                how=f"{k} x {batch} samples from the checkpoint on",
                facts={common.UPDATES: float(math.ceil(samples / (k * batch)))},
                runs=(),
                curve_updates=tuple(each / (k * batch) for each in at),
            )
            for k in KS
        ),
        train=partial(train, setting=setting),
        ticks=setting.before + len(KS) * samples,
        quantities=QUANTITIES,
        progress_quantity=LOSS,
        fixed={
            "checkpoint after": f"{setting.before:,} samples",
            "branches of": f"{samples:,}",
            optimizer: f"lr {rate:g} at {batch}",
        },
        notes=(LIMIT,),
        conclude=partial(conclude, batch=batch, tolerance=options.tolerance or TOLERANCE),
        curve_at=at,
        samples=samples,
        shortest=4 * KS[-1] * batch,
    )


def train(recipe: Recipe, seed: int, *, setting: BranchSetting, tick: Tick) -> common.Runs:
    """Train to the checkpoint, measure the noise scale there, and continue in every branch."""
    order = common.stream(recipe.samples, setting.before + setting.samples, seed)
    first, rest = order[: setting.before], order[setting.before :]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = recipe.model(seed)
        optimizer = recipe.optimizers[setting.optimizer](model.parameters(), setting.learning_rate)
        if not math.isfinite(_work(recipe, model, optimizer, first, setting.batch, tick)[-1]):
            raise common.diverged(setting.learning_rate)
        noise = noise_at(recipe, model, setting.batch, seed)
        base: list[float] = []
        for index, k in enumerate(KS):
            branch, batch = copy.deepcopy(model), k * setting.batch
            own = recipe.optimizers[setting.optimizer](branch.parameters(), setting.learning_rate)
            own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if k > 1:
                rescale(own, setting.batch, batch)
            losses = _work(recipe, branch, own, rest, batch, tick)
            smoothed = common.smooth(losses, batch, HALF_LIFE * setting.samples)
            base = base or smoothed
            values = {LOSS: smoothed[-1], RATE: own.param_groups[0]["lr"], WASTE: waste(base, smoothed[-1])}
            if index == 0:
                values |= {WASTE: 1.0, SIGNAL: noise.signal, VARIANCE: noise.variance}
            ends = (math.ceil(len(smoothed) * (point + 1) / common.POINTS) for point in range(common.POINTS))
            yield index, StudyRun(seed=seed, values=values, curve=tuple(smoothed[end - 1] for end in ends))


def waste(base: list[float], loss: float) -> float:
    """Return the samples of a branch over those that the small batch needs for the same loss.

    `base` has the smoothed loss of the small batch after each update; `loss` is reached when `base` stays at
    or below it. The result is at least 1, and infinite if `base` is never above `loss`.

    Examples:
        >>> waste([4.0, 3.0, 2.0, 1.0], 2.0), waste([4.0, 3.0], 1.0), waste([4.0, 3.0], 5.0)
        (2.0, 1.0, inf)
    """
    needed = max((number for number, value in enumerate(base, start=1) if value > loss), default=None)
    return math.inf if needed is None else len(base) / needed


def noise_at(recipe: Recipe, model: nn.Module, batch: int, seed: int) -> Noise:
    """Measure the noise scale at a model's weights, which do not change."""
    still = copy.deepcopy(model)
    optimizer, size = torch.optim.SGD(still.parameters(), lr=0.0), NOISE_STEPS * batch
    # A seed of its own: the training has just used the order of `seed`.
    batches = common.stream(recipe.samples, NOISE_WINDOWS * size, seed + 10_000).split(size)
    *_, (_, noise) = losses_and_noise(recipe, still, optimizer, batches, microbatch_size=batch)
    return noise


def _work(
    recipe: Recipe, model: nn.Module, optimizer: Any, order: Tensor, batch: int, tick: Tick
) -> list[float]:
    """Train on samples in batches of a size, and return the loss before each update."""
    update, losses = plain_update(recipe, model, optimizer), list[float]()
    for indices in order.split(batch):
        losses.append(update(recipe.batch(indices)))
        tick(len(indices))
    return losses


def conclude(arms: tuple[StudyArm, ...], *, batch: int, tolerance: float) -> StudyConclusions:
    """Test each branch against the small batch, predict its samples from the noise scale, and conclude."""
    results = [
        common.equivalence_test(arm, arms[0], LOSS, margin=1 + tolerance, ratio=True) for arm in arms[1:]
    ]
    tests = tuple(test for test in results if test is not None)
    scale = noise_scale(arms[0])
    return StudyConclusions(
        tests=tests,
        conclusion=conclusion_text(arms, tests, scale, batch),
        facts={
            arm.name: {} if scale is None else {PREDICTED: predicted_waste(scale, batch, k)}
            for arm, k in zip(arms, KS, strict=True)
        },
    )


def noise_scale(base: StudyArm) -> float | None:
    """Return the noise scale over all seeds; None if their signal is not above 0 with 95 % confidence."""
    # The ratio of the means: a mean or a median of the seeds' own ratios would be biased.
    signal, variance = base.values(SIGNAL), base.mean(VARIANCE)
    if len(signal) < 2 or variance is None:
        return None
    mean, error = statistics.fmean(signal), statistics.stdev(signal) / math.sqrt(len(signal))
    sure = mean - float(stats.t.ppf(0.975, len(signal) - 1)) * error > 0
    return variance / mean if sure else None


def conclusion_text(
    arms: tuple[StudyArm, ...], tests: tuple[StudyTest, ...], scale: float | None, batch: int
) -> str:
    """Return one sentence: the critical batch, and the prediction of the noise scale for the next batch."""
    if len(tests) < len(arms) - 1:
        return TOO_FEW
    # `not <`: a NaN does not match.
    matching = next((i for i, test in enumerate(tests) if not test.high < test.margin), len(tests))
    failing = tests[matching] if matching < len(tests) else None
    # A batch that is not shown to match may still match: then the critical batch is "at least" the last one.
    known = "is" if failing is not None and failing.low > failing.margin else "is at least"
    text = f"The critical batch by branching {known} {batch * KS[matching]}"
    at = min(matching + 1, len(tests))
    if failing is not None:
        text += f", while batch {batch * KS[at]} is at x {failing.difference:.3g} the smoothed loss"
    if scale is None:
        return f"{text}; the noise scale at the checkpoint is not determined (its signal may be 0)."
    measured = statistics.median(arms[at].values(WASTE))
    return (
        f"{text}; the noise scale at the checkpoint, {scale:.0f} samples {ASSUMPTION}, says that batch "
        f"{batch * KS[at]} needs x {predicted_waste(scale, batch, KS[at]):.2f} the samples, measured "
        f"x {measured:.2f} (median)."
    )


def predicted_waste(scale: float, batch: int, k: float) -> float:
    """Return the samples of batch k b over those of b: ``(1 + k b/B) / (1 + b/B)``, for a noise scale B."""
    return (1 + k * batch / scale) / (1 + batch / scale)
