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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn

from superbatch.errors import InputError
from superbatch.noise.meter import NoiseMeter
from superbatch.results.noise import ASSUMPTION, Noise
from superbatch.torch import Accumulator
from superbatch.torch.tuning.scaling import rescale

from ..recipes import Recipe
from ..report.study import Quantity, Study, StudyArm, StudyRun, StudyTest
from .participants import participants_of
from .study import ArmSetting, Design, Findings, Options, Show, run_design
from .study_common import compared, diverged, mean_loss, present, separable, smooth, stream

NAME = "critical-batch"
SAMPLES, QUICK_SAMPLES = 12_000, 6_000
BEFORE = 0.5
"""Samples up to the checkpoint, as a share of those of a branch."""
KS = (1, 2, 4, 8, 16)
PART_OF_BATCH = 12
TOLERANCE = 0.05
HALF_LIFE = 0.1
"""Of the smoothing, as a share of a branch's samples."""

POINTS = 40
NOISE_WINDOWS, NOISE_STEPS = 64, 8
"""Windows, and micro-batches of each, that the noise scale is measured with; the weights stay as they are."""

LOSS, WASTE, PREDICTED, MADE, RATE = (
    "smoothed loss",
    "samples needed, x",
    "by the noise scale, x",
    "updates",
    "lr",
)
SIGNAL, VARIANCE, LOW, HIGH, LATER = "signal", "variance", "noise low", "noise high", "noise at the end"


@dataclass(frozen=True)
class Arm:
    """A branch: how many times the batch."""

    k: int


@dataclass(frozen=True)
class Setting:
    """The branches; it can be sent to another process."""

    arms: tuple[Arm, ...]
    batch: int
    before: int
    samples: int
    optimizer: str
    learning_rate: float


def run(recipe: str | Recipe, options: Options, progress: Show) -> Study:
    """Run the study.

    Args:
        recipe: a name or a recipe.
        options: what was asked.
        progress: told what happens.

    Returns:
        The report.
    """
    return run_design(NAME, recipe, options, design, progress)


def design(recipe: Recipe, *, options: Options) -> Design:
    """The branches of the study.

    Args:
        recipe: what is trained.
        options: what was asked.

    Returns:
        The study's own part.

    Raises:
        InputError: samples of the recipe are coupled, it does not offer the optimizer, or the samples
            are too few.
    """
    separable(recipe, NAME)
    optimizer = options.optimizer or recipe.default_optimizer
    if optimizer not in recipe.learning_rates:
        raise InputError(
            f"optimizer={optimizer!r}: "
            f"the recipe {recipe.name!r} does not offer it. "
            f"Use one of {', '.join(recipe.learning_rates)}."
        )
    samples = options.samples or (QUICK_SAMPLES if options.quick else SAMPLES)
    batch = options.batch_size or max(1, recipe.batch_size // PART_OF_BATCH)
    if samples < KS[-1] * batch:
        raise InputError(
            f"branches of {samples} samples from batch_size={batch}: "
            f"the largest branch has batches of {KS[-1]} times the size, and makes not one update. "
            f"Give at least {KS[-1] * batch} samples, better many times as many."
        )
    setting = Setting(
        arms=tuple(map(Arm, KS)),
        batch=batch,
        before=round(BEFORE * samples),
        samples=samples,
        optimizer=optimizer,
        learning_rate=options.learning_rate or recipe.learning_rates[optimizer],
    )
    at = tuple(samples * (point + 1) / POINTS for point in range(POINTS))
    return Design(
        arms=tuple(
            ArmSetting(
                name=f"batch {arm.k * setting.batch}",
                how=f"{arm.k} x {setting.batch} samples from the checkpoint on",
                facts={MADE: math.ceil(samples / (arm.k * setting.batch))},
                curve_updates=tuple(each / (arm.k * setting.batch) for each in at),
            )
            for arm in setting.arms
        ),
        setting=setting,
        train=train,
        ticks=setting.before + len(KS) * samples,
        quantities=_quantities(),
        headline=LOSS,
        fixed={
            "checkpoint after": f"{setting.before:,} samples",
            "branches of": f"{samples:,}",
            optimizer: f"lr {setting.learning_rate:g} at {setting.batch}",
        },
        find=partial(find, batch=setting.batch, tolerance=options.tolerance or TOLERANCE, samples=samples),
        curve_at=at,
        samples=samples,
        shortest=4 * KS[-1] * batch,
    )


def train(
    recipe: Recipe, setting: Setting, seed: int, *, tick: Callable[[int], None]
) -> Iterator[tuple[int, StudyRun]]:
    """Train to the checkpoint, measure the noise, and continue in every branch.

    Args:
        recipe: what is trained.
        setting: the branches.
        seed: of weights and samples.
        tick: told the samples seen.

    Yields:
        (index of the branch, its run).
    """
    order = stream(recipe.samples, setting.before + setting.samples, seed)
    first, rest = order[: setting.before], order[setting.before :]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = recipe.model(seed)
        optimizer = recipe.optimizers[setting.optimizer](model.parameters(), setting.learning_rate)
        if not math.isfinite(_work(recipe, model, optimizer, first, setting.batch, tick)[-1]):
            raise diverged(setting.learning_rate)
        noise = noise_at(recipe, model, setting.batch, seed)
        base: list[float] = []
        for index, arm in enumerate(setting.arms):
            branch = copy.deepcopy(model)
            own = recipe.optimizers[setting.optimizer](branch.parameters(), setting.learning_rate)
            own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if arm.k > 1:
                rescale(own, setting.batch, arm.k * setting.batch)
            losses = _work(recipe, branch, own, rest, arm.k * setting.batch, tick)
            smoothed = smooth(losses, arm.k * setting.batch, HALF_LIFE * setting.samples)
            base = base or smoothed
            values = {LOSS: smoothed[-1], RATE: own.param_groups[0]["lr"], WASTE: waste(base, smoothed[-1])}
            if index == 0:
                values[WASTE] = 1.0
                later = noise_at(recipe, branch, setting.batch, seed)
                values |= {SIGNAL: noise.signal, VARIANCE: noise.variance, LOW: noise.low, HIGH: noise.high}
                values |= {LATER: later.batch_size} if later.batch_size else {}
            ends = (math.ceil(len(smoothed) * (point + 1) / POINTS) for point in range(POINTS))
            yield index, StudyRun(seed=seed, values=values, curve=tuple(smoothed[end - 1] for end in ends))


def waste(base: list[float], loss: float) -> float:
    """Return the samples a branch took, relative to those after which the small batch stayed below its loss.

    Args:
        base: smoothed losses of the small batch.
        loss: the branch's last.

    Returns:
        At least 1: a branch that ends lower than the small batch is not followed beyond its end. Infinite if
        the branch has got nowhere.

    Examples:
        >>> waste([4.0, 3.0, 2.0, 1.0], 2.0), waste([4.0, 3.0], 1.0), waste([4.0, 3.0], 5.0)
        (2.0, 1.0, inf)
    """
    # Not a number is above nothing either.
    needed = max((number for number, value in enumerate(base, start=1) if value > loss), default=None)
    return math.inf if needed is None else len(base) / needed


def noise_at(recipe: Recipe, model: nn.Module, batch: int, seed: int) -> Noise:
    """The noise scale at a model's weights, which stay what they are.

    Args:
        recipe: its data and loss.
        model: whose gradient is measured.
        batch: samples of a micro-batch.
        seed: of the samples.

    Returns:
        What `Accumulator.noise` says after 64 windows of 8 micro-batches with a rate of 0.
    """
    still = copy.deepcopy(model)
    accumulate = Accumulator(
        still,
        torch.optim.SGD(still.parameters(), lr=0.0),
        recipe.loss_fn(still),
        microbatch_size=batch,
        reduction=recipe.reduction,
        weight=recipe.weight,
        participants=participants_of(recipe.batchnorm),
        observers=[NoiseMeter(data_size=recipe.samples, every=1)],
    )
    size = NOISE_STEPS * batch
    for indices in stream(recipe.samples, NOISE_WINDOWS * size, seed + 10_000).split(size):
        accumulate(recipe.batch(indices))
    assert accumulate.noise is not None
    return accumulate.noise


def _work(
    recipe: Recipe, model: nn.Module, optimizer: Any, order: Tensor, batch: int, tick: Callable[[int], None]
) -> list[float]:
    loss_fn, losses = recipe.loss_fn(model), list[float]()
    for indices in order.split(batch):
        loss = mean_loss(recipe, loss_fn, recipe.batch(indices))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tick(len(indices))
    return losses


def find(arms: tuple[StudyArm, ...], *, batch: int, tolerance: float, samples: int) -> Findings:
    """Test, predict and conclude.

    Args:
        arms: with their runs, the small batch first.
        batch: samples of the small batch.
        tolerance: of the smoothed loss, relative.
        samples: of a branch.

    Returns:
        Tests, conclusion, notes.
    """
    tests = present([compared(arm, arms[0], LOSS, margin=1 + tolerance, ratio=True) for arm in arms[1:]])
    notes = (
        "The critical batch that is printed is the one by branching: the largest of which, and of every "
        f"smaller one, the smoothed loss after the same samples is at most {tolerance:.0%} above that of "
        "the smallest batch (upper end of the 90 % interval over pairs of one seed). Others are in use: the "
        "noise scale is the batch that needs twice the fewest samples; the one that needs 20 % more is a "
        "fifth of it.",
        f'"{WASTE}" is the samples of the branch over those after which the smallest batch stayed below the '
        "same loss: in the table the mean over seeds, in the sentence and as the line of the picture the "
        f'median. "{PREDICTED}" is (1 + B/B_noise) / (1 + b/B_noise), everywhere with the one noise scale at '
        "the checkpoint over all seeds, the ratio of the mean noise to the mean signal: a mean or median of "
        "single seeds' predictions would be biased. The noise scale changes along the branch.",
        "It does not show what a rate tuned for each batch would reach: the rate follows the scaling rule, "
        "and a branch may fail because k times the rate is unstable, which is no matter of noise.",
    )
    scale = noise_scale(arms[0])
    return Findings(
        tests=tests,
        conclusion=conclude(arms, tests, batch, tolerance, samples),
        notes=notes,
        facts={
            arm.name: {} if scale is None else {PREDICTED: predicted_waste(scale, batch, k)}
            for arm, k in zip(arms, KS, strict=True)
        },
    )


def noise_scale(base: StudyArm) -> float | None:
    """The noise scale over all seeds: the ratio of the means, not the mean of the ratios.

    Args:
        base: the arm of the small batch.

    Returns:
        Samples; None with fewer than two seeds, or where their signals are not told from none (95 %).
    """
    signal, variance = base.values(SIGNAL), base.mean(VARIANCE)
    if len(signal) < 2 or variance is None:
        return None
    mean, error = statistics.fmean(signal), statistics.stdev(signal) / math.sqrt(len(signal))
    sure = mean - float(stats.t.ppf(0.975, len(signal) - 1)) * error > 0
    return variance / mean if sure else None


def conclude(
    arms: tuple[StudyArm, ...], tests: tuple[StudyTest, ...], batch: int, tolerance: float, samples: int
) -> str:
    """One sentence, from the tests and the noise scale.

    Args:
        arms: the small batch first.
        tests: of the others against it.
        batch: samples of the small batch.
        tolerance: of the smoothed loss.
        samples: of a branch.

    Returns:
        The sentence.
    """
    if len(tests) < len(arms) - 1:
        return "Too few runs were finished to conclude anything."
    matching = 0
    while matching < len(tests) and tests[matching].high < tests[matching].margin:
        matching += 1
    within = f"within {tolerance:.0%} of batch {batch} after the same {samples:,} samples"
    if matching == len(tests):
        found = f"The critical batch is at least {batch * KS[-1]}: every batch tried stays {within}"
    elif matching == 0:
        first = tests[0]
        found = (
            f"Already batch {batch * KS[1]} is not shown to be {within}: its smoothed loss is x "
            f"{first.difference:.3g} (up to x {first.high:.3g})"
        )
    else:
        failing = tests[matching]
        # That a batch is not shown to match does not show that it does not.
        known = "is" if failing.low > failing.margin else "is at least"
        found = (
            f"The critical batch by branching {known} {batch * KS[matching]}: up to there the smoothed loss "
            f"stays {within}, while batch {batch * KS[matching + 1]} is at x {failing.difference:.3g} "
            f"({failing.low:.3g} to {failing.high:.3g})"
        )
    scale = noise_scale(arms[0])
    if scale is None:
        return f"{found}; the noise scale at the checkpoint is not determined (signal not told from noise)."
    at = min(matching + 1, len(tests))
    measured = statistics.median(arms[at].values(WASTE))
    predicted = predicted_waste(scale, batch, KS[at])
    said = f"x {measured:.2f} (median)" if math.isfinite(measured) else "no end of"
    return (
        f"{found}; the noise scale at the checkpoint, {scale:.0f} samples {ASSUMPTION}, says that batch "
        f"{batch * KS[at]} needs x {predicted:.2f} the samples, measured {said}."
    )


def predicted_waste(scale: float, batch: int, k: float) -> float:
    """Samples that k times the batch needs over those of the batch: ``(1 + k b/B) / (1 + b/B)``.

    Examples:
        >>> round(predicted_waste(64.0, 8, 8), 3)
        1.778
    """
    return (1 + k * batch / scale) / (1 + batch / scale)


def _quantities() -> tuple[Quantity, ...]:
    return (
        Quantity(name=LOSS, meaning="of the training batches, half-life a tenth of the branch", form=".4f"),
        Quantity(name=MADE, meaning="of the branch", form=",.0f"),
        Quantity(name=RATE, meaning="by the scaling rule: linear for SGD, square root for Adam", form=".3g"),
        Quantity(
            name=WASTE, meaning="over what the small batch needs for the same smoothed loss", form=".2f"
        ),
        Quantity(
            name=PREDICTED,
            meaning="the same, predicted from the noise scale at the checkpoint over all seeds",
            form=".2f",
        ),
    )
