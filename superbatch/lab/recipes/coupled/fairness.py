"""A classifier with a penalty on the squared gap between the mean scores of two groups.

Margin and grid were set before the first run of the study: 1 point of accuracy minus gap; strengths 1, 3, 10
and 30 at a rate of 0.003.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ..models import dtype_of, seeded
from .recipe import CoupledRecipe, Measure, Point
from .ways import exact_way, in_microbatches, plain_way, select

BATCH, UPDATES, EXACT = 256, 300, 128
HELD_OUT = 8000

Table = dict[str, Tensor]


def people(count: int, seed: int) -> Table:
    """Draw a table: 10 noisy features, 3 that depend on the group, and a label that depends on it too."""
    g = torch.Generator().manual_seed(seed)
    group = (torch.rand(count, generator=g) < 0.3).float()
    hidden = torch.randn(count, 10, generator=g)
    noise = 0.5 * torch.randn(count, generator=g)
    label = (hidden[:, :5].sum(1) + 1.5 * group + noise > 0).float()
    of_group = (2 * group - 1)[:, None] + 0.8 * torch.randn(count, 3, generator=g)
    features = torch.cat([hidden + 0.2 * torch.randn(count, 10, generator=g), of_group], 1)
    return {"features": features, "label": label, "group": group}


def gap(scores: Tensor, group: Tensor) -> Tensor:
    """Return the mean score of group 1 minus that of group 0 over the last dimension; 0 if one is empty."""
    other = 1 - group
    counts = group.sum(-1), other.sum(-1)
    ones, others = (
        (scores * of).sum(-1) / n.clamp_min(1) for of, n in zip((group, other), counts, strict=True)
    )
    return (ones - others) * (counts[0] * counts[1]).clamp_max(1)


def loss(
    model: nn.Module, batch: Table, strength: float, *, size: int | None = None, unbiased: bool = False
) -> Tensor:
    """Return the logistic loss plus strength times the squared gap, as a mean over micro-batches.

    `unbiased` replaces the square by the product of the gaps of two halves, which are independent.
    """
    logits = model(batch["features"])[:, 0]
    scores, group = in_microbatches(logits.sigmoid(), size), in_microbatches(batch["group"], size)
    if unbiased:
        left, right = zip(scores.chunk(2, -1), group.chunk(2, -1), strict=True)
        penalty = gap(*left) * gap(*right)
    else:
        penalty = gap(scores, group).square()
    return binary_cross_entropy_with_logits(logits, batch["label"]) + strength * penalty.mean()


@torch.no_grad()
def measured(model: nn.Module, table: Table) -> tuple[float, float, float]:
    """Return accuracy minus gap, the gap between the groups' shares of positive answers, and accuracy."""
    positive = model(table["features"].to(dtype_of(model)))[:, 0] > 0
    accuracy = 100 * (positive == table["label"].bool()).float().mean().item()
    apart = 100 * gap(positive.float(), table["group"]).abs().item()
    return accuracy - apart, apart, accuracy


def fairness() -> CoupledRecipe:
    """Return the recipe."""
    train, valid, test = people(BATCH * UPDATES, seed=0), people(HELD_OUT, seed=1), people(HELD_OUT, seed=2)
    model = seeded(lambda: nn.Sequential(nn.Linear(13, 32), nn.GELU(), nn.Linear(32, 1)))

    halves, of_halves = partial(loss, unbiased=True), "the product of the gaps of two halves, no square"
    return CoupledRecipe(
        name="fairness",
        description="a small classifier of generated tables, with a penalty on the squared gap of two groups",
        model=model,
        samples=len(train["label"]),
        batch=partial(select, train),
        loss_fn=lambda model: partial(loss, model, strength=10.0),
        margin=1.0,
        learning_rates={"adam": 3e-3},
        batch_size=BATCH,
        updates=UPDATES,
        ways=(
            exact_way(loss, model, EXACT, f"the squared gap of all {BATCH} samples"),
            *(plain_way(loss, model, m, "the mean of their squared gaps") for m in (64, 16)),
            *(plain_way(halves, model, m, of_halves, kind="unbiased") for m in (64, 16)),
        ),
        points=tuple(Point(learning_rate=3e-3, strength=strength) for strength in (1.0, 3.0, 10.0, 30.0)),
        validate=lambda model: measured(model, valid)[0],
        measures=(
            Measure(name="accuracy minus gap, points", meaning="the score of validation, on 8000 test rows"),
            Measure(name="gap, points", meaning="between the groups' shares of positive answers"),
            Measure(name="accuracy, %", meaning="of the test rows"),
        ),
        measure=lambda model: measured(model, test),
        lower_is_better=False,
        mechanism="the square of a mean over m samples is the square of the mean plus variance / m",
        limits=(
            "The unbiased penalty corrects the bias of this loss only, and needs the formula of the loss.",
            "A micro-batch, or a half of one, without samples of one group has no penalty.",
        ),
    )
