"""Parts that the training studies share: order of the samples, training loss, tests on pairs of runs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from scipy.signal import lfilter
from torch import Tensor, nn

from superbatch.errors import InputError

from ..recipes import Recipe
from ..report.comparison import Comparison
from ..report.study import Quantity, StudyArm, StudyRun, StudyTest
from .arms import mean_and_weight
from .statistics import tost_paired

LOSS_SAMPLES, QUICK_LOSS_SAMPLES = 2048, 256  # most training samples over which a loss is computed
CHUNK = 512  # samples that are evaluated at once
POINTS = 40  # points of a run's curve
LOSS, UPDATES, SEEN = "training loss", "updates", "samples"
COLUMNS = (
    Quantity(name=LOSS, meaning="mean over the training set after the last update", form=".4f"),
    Quantity(name=UPDATES, meaning="of each run", form=",.0f"),
    Quantity(name=SEEN, meaning="samples that each run is trained on, with repeats", form=",.0f"),
)

Runs = Iterator[tuple[int, StudyRun]]  # the runs of one seed, each with the index of its arm

# Recipe -> learning rate of plain SGD per sample of the batch, in place of the recipe's own rate. That of
# digits is from the first article in docs/sources, and far smaller than its data allow.
RATES = {"digits": 0.02}


def rate_of(recipe: Recipe, batch: int) -> float:
    """Return the default learning rate of plain SGD for a small batch.

    `RATES` has a rate per sample for some recipes. For others the recipe's own rate is scaled by the square
    root of the ratio of the batch sizes.
    """
    if recipe.name in RATES:
        return RATES[recipe.name] * batch
    own = recipe.learning_rates.get("sgd", recipe.learning_rates[recipe.default_optimizer])
    return own * math.sqrt(batch / recipe.batch_size)


def diverged(learning_rate: float) -> InputError:
    """Return the error of a diverged training, whose loss is not finite."""
    return InputError(
        f"Training with lr {learning_rate:.3g} diverges: its loss is not finite. "
        "Give a smaller learning rate (--lr)."
    )


def stream(samples: int, count: int, seed: int) -> Tensor:
    """Return `count` sample indices, from successive random permutations of all samples."""
    generator = torch.Generator().manual_seed(seed)
    rounds = [torch.randperm(samples, generator=generator) for _ in range(-(-count // samples))]
    return torch.cat(rounds)[:count]


@torch.no_grad()
def training_loss(recipe: Recipe, model: nn.Module, samples: int = LOSS_SAMPLES) -> float:
    """Compute the mean loss over at most `samples` training samples, the same ones in every call."""
    used = stream(recipe.samples, min(recipe.samples, samples), seed=0)
    loss_fn, total, weights = recipe.loss_fn(model), 0.0, 0.0
    for indices in used.split(CHUNK):
        loss, weight = mean_and_weight(recipe, loss_fn, recipe.batch(indices))
        total, weights = total + loss.item() * weight, weights + weight
    return total / weights


def smooth(losses: list[float], batch: int, half_life: float) -> list[float]:
    """Return an exponential moving average of the losses, bias-corrected, with a half-life in samples."""
    keep = 2 ** (-batch / half_life)
    weights = 1 - keep ** np.arange(1, len(losses) + 1)  # sum of the weights in each average
    return (lfilter([1 - keep], [1, -keep], losses) / weights).tolist()


def equivalence_test(
    first: StudyArm,
    second: StudyArm,
    quantity: str,
    *,
    margin: float,
    ratio: bool = False,
    step: float | None = None,
) -> StudyTest | None:
    """Test the equivalence of two arms on pairs of runs of the same seed; None with fewer than two pairs.

    With `ratio` the logarithms are compared, and the margin is a factor. `step` is the smallest change of the
    quantity, as in `tost_paired`.
    """
    of_seed = {run.seed: run.values.get(quantity, math.nan) for run in second.runs}
    pairs = [
        (run.values.get(quantity, math.nan), of_seed[run.seed]) for run in first.runs if run.seed in of_seed
    ]
    if len(pairs) < 2:
        return None
    read = _log if ratio else float
    result = tost_paired(
        [read(a) - read(b) for a, b in pairs],
        margin=math.log(margin) if ratio else margin,
        step=0.0 if ratio else step,
    )
    return StudyTest(first=first.name, second=second.name, quantity=quantity, ratio=ratio, result=result)


def check_separable(recipe: Recipe, study: str) -> None:
    """Raise `InputError` for a recipe of coupled samples, whose objective depends on the batch size."""
    if recipe.coupled == "exact" or recipe.batchnorm == "per_microbatch":
        raise InputError(
            f"The study {study!r} cannot use the recipe {recipe.name!r}: its samples are coupled, so another "
            "batch size has another objective. Use a recipe without BatchNorm or contrastive loss, such as "
            "digits or text."
        )


def column_of_metric(of: Recipe | Comparison) -> Quantity:
    """Return the column of a recipe's metric."""
    name = f"{of.metric}, {of.unit}" if of.unit else of.metric
    form = ".2f" if of.unit.endswith("%") else ".4g"
    return Quantity(name=name, meaning="of held-out data, after the last update", form=form)


def curve_points(samples: int) -> tuple[float, ...]:
    """Return the numbers of samples at which a run's curve has its points."""
    return tuple(samples * (point + 1) / POINTS for point in range(POINTS))


def from_one_start(
    recipe: Recipe, arms: Sequence[Any], seed: int, train_one: Callable[[Any, nn.Module], StudyRun]
) -> Runs:
    """Train the arms one by one, from the same weights and the same state of torch's generator."""
    initial = recipe.model(seed)
    for index, arm in enumerate(arms):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            run = train_one(arm, copy.deepcopy(initial))
        yield index, run


def _log(value: float) -> float:
    return math.log(value) if value > 0 and math.isfinite(value) else math.nan
