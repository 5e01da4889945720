"""Parts common to the studies that train: order of samples, training loss, tests on pairs of runs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.errors import InputError

from ..recipes import Recipe
from ..report.study import Quantity, StudyArm, StudyRun, StudyTest
from .arms import mean_and_weight
from .statistics import tost_paired

# Training samples, at most, that a training loss is the mean over.
LOSS_SAMPLES, QUICK_LOSS_SAMPLES = 2048, 256
CHUNK = 512
POINTS = 40  # of the curve of a run
TOO_FEW = "Too few runs were finished to conclude anything."
LOSS, UPDATES, SEEN = "training loss", "updates", "samples"
COLUMNS = (
    Quantity(name=LOSS, meaning="mean over the training set after the last update", form=".4f"),
    Quantity(name=UPDATES, meaning="of each run", form=",.0f"),
    Quantity(name=SEEN, meaning="that each run has seen", form=",.0f"),
)

Runs = Iterator[tuple[int, StudyRun]]  # the runs of one seed, each with the index of its arm

RATES = {"digits": 0.02}  # recipe -> a good rate of plain SGD with batch 1, where its own rate is no guide


def rate_of(recipe: Recipe, batch: int) -> float:
    """The rate of plain SGD for a small batch, where none is given.

    The recipe's own rate times the square root of the batch over its own, which is on the safe side. The
    digits' own rate is the first source's and far below what the data allow: there it is 0.02 per sample.
    """
    if recipe.name in RATES:
        return RATES[recipe.name] * batch
    own = recipe.learning_rates.get("sgd", recipe.learning_rates[recipe.default_optimizer])
    return own * math.sqrt(batch / recipe.batch_size)


def diverged(learning_rate: float) -> InputError:
    """Return the error for a training whose loss is no longer finite."""
    return InputError(
        f"Training with lr {learning_rate:.3g} diverges: its loss is not finite. "
        "Give a smaller learning rate (--lr)."
    )


def stream(samples: int, count: int, seed: int) -> Tensor:
    """Draw indices of samples: permutation after permutation."""
    generator = torch.Generator().manual_seed(seed)
    rounds = [torch.randperm(samples, generator=generator) for _ in range(-(-count // samples))]
    return torch.cat(rounds)[:count]


@torch.no_grad()
def training_loss(recipe: Recipe, model: nn.Module, samples: int = LOSS_SAMPLES) -> float:
    """The mean loss over the training set, or over some samples of it, always the same ones."""
    used = stream(recipe.samples, min(recipe.samples, samples), seed=0)
    loss_fn, total, weights = recipe.loss_fn(model), 0.0, 0.0
    for indices in used.split(CHUNK):
        loss, weight = mean_and_weight(recipe, loss_fn, recipe.batch(indices))
        total, weights = total + loss.item() * weight, weights + weight
    return total / weights


def smooth(losses: list[float], batch: int, half_life: float) -> list[float]:
    """A debiased moving average of losses, with a half-life in samples."""
    keep = 2 ** (-batch / half_life)
    total = weight = 0.0
    found: list[float] = []
    for loss in losses:
        total, weight = keep * total + (1 - keep) * loss, keep * weight + 1 - keep
        found.append(total / weight)
    return found


def compared(
    first: StudyArm,
    second: StudyArm,
    quantity: str,
    *,
    margin: float,
    ratio: bool = False,
    step: float | None = None,
) -> StudyTest | None:
    """Test that two arms are equivalent, on pairs of runs of the same seed."""
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


def present(tests: Iterable[StudyTest | None]) -> tuple[StudyTest, ...]:
    """The tests that could be made."""
    return tuple(test for test in tests if test is not None)


def separable(recipe: Recipe, study: str) -> None:
    """Refuse a recipe whose samples are coupled: with another batch it would be another objective."""
    if recipe.coupled == "exact" or recipe.batchnorm == "per_microbatch":
        raise InputError(
            f"The study {study!r} with the recipe {recipe.name!r}: "
            "its samples are coupled, so that another batch size is another objective. "
            "Use a recipe without BatchNorm or contrastive loss, such as digits or text."
        )


def quantity_of_metric(recipe: Recipe) -> str:
    """The heading of the recipe's own measure."""
    return f"{recipe.metric}, {recipe.unit}" if recipe.unit else recipe.metric


def column_of_metric(metric: str) -> Quantity:
    """The column of the recipe's own measure, by its heading."""
    form = ".2f" if metric.endswith("%") else ".4g"
    return Quantity(name=metric, meaning="of held-out data, after the last update", form=form)


def curve_points(samples: int) -> tuple[float, ...]:
    """The samples seen at the points of a curve."""
    return tuple(samples * (point + 1) / POINTS for point in range(POINTS))


def from_one_start(
    recipe: Recipe, arms: Sequence[Any], seed: int, train_one: Callable[[Any, nn.Module], StudyRun]
) -> Runs:
    """Train arms one by one from the same weights and the same state of torch's generator."""
    initial = recipe.model(seed)
    for index, arm in enumerate(arms):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            run = train_one(arm, copy.deepcopy(initial))
        yield index, run


def _log(value: float) -> float:
    return math.log(value) if value > 0 and math.isfinite(value) else math.nan
