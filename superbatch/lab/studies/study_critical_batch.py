"""Study of the critical batch: the largest one that wastes no samples, against the noise scale.

Train to a checkpoint with a small batch. From there, continue in branches: the same samples in the same
order, in batches of k times the size, with the optimizer rescaled by `torch.tuning.rescale`.
The critical batch *by branching* (Merrill et al. 2025, arXiv:2505.23971) is the largest whose smoothed loss
still matches. Beside it stands what the noise scale at the checkpoint predicts: a batch B needs 1 +
B/B_noise times the fewest samples (McCandlish et al. 2018, arXiv:1812.06162).
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
from .arms import plain_update
from .participants import measured
from .setting import Tick
from .shared_options import offered_optimizer
from .study import Design, Findings, Options

SAMPLES, QUICK_SAMPLES = 12_000, 6_000
BEFORE = 0.5  # samples up to the checkpoint, as a share of those of a branch
KS = (1, 2, 4, 8, 16)
PART_OF_BATCH = 12
TOLERANCE = 0.05
HALF_LIFE = 0.1  # of the smoothing, as a share of a branch's samples
# Windows, and micro-batches of each, that the noise scale is measured with; the weights stay as they are.
NOISE_WINDOWS, NOISE_STEPS = 64, 8
LOSS, RATE = "smoothed loss", "lr"
WASTE, PREDICTED = "samples needed, x", "by the noise scale, x"
QUANTITIES = (
    Quantity(name=LOSS, meaning="of the training batches, half-life a tenth of the branch", form=".4f"),
    Quantity(name=common.UPDATES, meaning="of the branch", form=",.0f"),
    Quantity(name=RATE, meaning="by the scaling rule: linear for SGD, square root for Adam", form=".3g"),
    Quantity(name=WASTE, meaning="over what the small batch needs for the same smoothed loss", form=".2f"),
    Quantity(
        name=PREDICTED,
        meaning="the same, predicted from the noise scale at the checkpoint over all seeds",
        form=".2f",
    ),
)
LIMIT = (
    "It does not show what a rate tuned for each batch would reach: the rate follows the scaling rule, and a "
    "branch may fail because its rate is unstable, which is no matter of noise."
)
SIGNAL, VARIANCE, LOW, HIGH, LATER = "signal", "variance", "noise low", "noise high", "noise at the end"


@dataclass(frozen=True)
class Setting:
    """The branches, each by how many times the batch; it can be sent to another process."""

    arms: tuple[int, ...]
    batch: int
    before: int
    samples: int
    optimizer: str
    learning_rate: float


def design(recipe: Recipe, *, options: Options) -> Design:
    """Plan the branches."""
    common.separable(recipe, "critical-batch")
    optimizer = offered_optimizer(recipe, options.optimizer)
    samples = options.samples or (QUICK_SAMPLES if options.quick else SAMPLES)
    batch = options.batch_size or max(1, recipe.batch_size // PART_OF_BATCH)
    if samples < KS[-1] * batch:
        raise InputError(
            f"branches of {samples} samples from batch_size={batch}: "
            f"the largest branch has batches of {KS[-1]} times the size, and makes not one update. "
            f"Give at least {KS[-1] * batch} samples, better many times as many."
        )
    setting = Setting(
        arms=KS,
        batch=batch,
        before=round(BEFORE * samples),
        samples=samples,
        optimizer=optimizer,
        learning_rate=options.learning_rate or recipe.learning_rates[optimizer],
    )
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
        setting=setting,
        train=train,
        ticks=setting.before + len(KS) * samples,
        quantities=QUANTITIES,
        headline=LOSS,
        fixed={
            "checkpoint after": f"{setting.before:,} samples",
            "branches of": f"{samples:,}",
            optimizer: f"lr {setting.learning_rate:g} at {setting.batch}",
        },
        find=partial(find, batch=batch, tolerance=options.tolerance or TOLERANCE),
        curve_at=at,
        samples=samples,
        shortest=4 * KS[-1] * batch,
    )


def train(recipe: Recipe, setting: Setting, seed: int, *, tick: Tick) -> common.Runs:
    """Train to the checkpoint, measure the noise, and continue in every branch."""
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
        for index, k in enumerate(setting.arms):
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
                values[WASTE] = 1.0
                later = noise_at(recipe, branch, setting.batch, seed)
                values |= {SIGNAL: noise.signal, VARIANCE: noise.variance, LOW: noise.low, HIGH: noise.high}
                values |= {LATER: later.batch_size} if later.batch_size else {}
            ends = (math.ceil(len(smoothed) * (point + 1) / common.POINTS) for point in range(common.POINTS))
            yield index, StudyRun(seed=seed, values=values, curve=tuple(smoothed[end - 1] for end in ends))


def waste(base: list[float], loss: float) -> float:
    """Return the samples a branch took, relative to those after which the small batch stayed below its loss.

    A branch that ends lower than the small batch is not followed beyond its end: at least 1.

    Examples:
        >>> waste([4.0, 3.0, 2.0, 1.0], 2.0), waste([4.0, 3.0], 1.0), waste([4.0, 3.0], 5.0)
        (2.0, 1.0, inf)
    """
    # Not a number is above nothing either.
    needed = max((number for number, value in enumerate(base, start=1) if value > loss), default=None)
    return math.inf if needed is None else len(base) / needed


def noise_at(recipe: Recipe, model: nn.Module, batch: int, seed: int) -> Noise:
    """The noise scale at a model's weights, which stay what they are."""
    still = copy.deepcopy(model)
    optimizer, size = torch.optim.SGD(still.parameters(), lr=0.0), NOISE_STEPS * batch
    batches = common.stream(recipe.samples, NOISE_WINDOWS * size, seed + 10_000).split(size)
    *_, (_, noise) = measured(recipe, still, optimizer, batches, microbatch_size=batch)
    return noise


def _work(
    recipe: Recipe, model: nn.Module, optimizer: Any, order: Tensor, batch: int, tick: Tick
) -> list[float]:
    update, losses = plain_update(recipe, model, optimizer), list[float]()
    for indices in order.split(batch):
        losses.append(update(recipe.batch(indices)))
        tick(len(indices))
    return losses


def find(arms: tuple[StudyArm, ...], *, batch: int, tolerance: float) -> Findings:
    """Test, predict and conclude."""
    tests = common.present(
        common.compared(arm, arms[0], LOSS, margin=1 + tolerance, ratio=True) for arm in arms[1:]
    )
    scale = noise_scale(arms[0])
    return Findings(
        tests=tests,
        conclusion=conclude(arms, tests, scale, batch),
        notes=(LIMIT,),
        facts={
            arm.name: {} if scale is None else {PREDICTED: predicted_waste(scale, batch, k)}
            for arm, k in zip(arms, KS, strict=True)
        },
    )


def noise_scale(base: StudyArm) -> float | None:
    """The noise scale over all seeds; None where their signals are not told from none (95 %)."""
    # The ratio of the means: a mean or a median of single seeds' ratios would be biased.
    signal, variance = base.values(SIGNAL), base.mean(VARIANCE)
    if len(signal) < 2 or variance is None:
        return None
    mean, error = statistics.fmean(signal), statistics.stdev(signal) / math.sqrt(len(signal))
    sure = mean - float(stats.t.ppf(0.975, len(signal) - 1)) * error > 0
    return variance / mean if sure else None


def conclude(
    arms: tuple[StudyArm, ...], tests: tuple[StudyTest, ...], scale: float | None, batch: int
) -> str:
    """One sentence: the first batch that is not shown to match, and what the noise scale says of it."""
    if len(tests) < len(arms) - 1:
        return common.TOO_FEW
    matching = next((i for i, test in enumerate(tests) if not test.high < test.margin), len(tests))
    failing = tests[matching] if matching < len(tests) else None
    # That a batch is not shown to match does not show that it does not.
    known = "is" if failing is not None and failing.low > failing.margin else "is at least"
    found = f"The critical batch by branching {known} {batch * KS[matching]}"
    at = min(matching + 1, len(tests))
    if failing is not None:
        found += f", while batch {batch * KS[at]} is at x {failing.difference:.3g} the smoothed loss"
    if scale is None:
        return f"{found}; the noise scale at the checkpoint is not determined (signal not told from noise)."
    measured = statistics.median(arms[at].values(WASTE))
    return (
        f"{found}; the noise scale at the checkpoint, {scale:.0f} samples {ASSUMPTION}, says that batch "
        f"{batch * KS[at]} needs x {predicted_waste(scale, batch, KS[at]):.2f} the samples, measured "
        f"x {measured:.2f} (median)."
    )


def predicted_waste(scale: float, batch: int, k: float) -> float:
    """Samples that k times the batch needs over those of the batch: ``(1 + k b/B) / (1 + b/B)``."""
    return (1 + k * batch / scale) / (1 + batch / scale)
