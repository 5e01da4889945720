"""A generator of eight Gaussians on a ring, trained by the sliced Wasserstein distance of a batch.

Margin and grid were set before the first run of the study: a distance of 0.02; rates 0.01 and 0.03.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from ..models import dtype_of, seeded
from .recipe import CoupledRecipe, Measure, Point
from .ways import exact_way, in_microbatches, plain_way, select

BATCH, UPDATES, EXACT = 256, 300, 64
RADIUS, MODES, SPREAD = 2.0, 8, 0.15
LATENT, HELD_OUT, SECTORS = 8, 8192, 48

ANGLES = torch.arange(32) * (math.pi / 32)
DIRECTIONS = torch.stack([ANGLES.cos(), ANGLES.sin()])  # directions of the projections, as columns
Points = dict[str, Tensor]


def draw(count: int, seed: int) -> Points:
    """Draw noise for the generator, and points of the ring."""
    g = torch.Generator().manual_seed(seed)
    angle = torch.randint(MODES, (count,), generator=g) * (2 * math.pi / MODES)
    centres = RADIUS * torch.stack([angle.cos(), angle.sin()], 1)
    points = centres + SPREAD * torch.randn(count, 2, generator=g)
    return {"noise": torch.randn(count, LATENT, generator=g), "points": points}


def sliced(first: Tensor, second: Tensor) -> Tensor:
    """Return the squared sliced Wasserstein distance, as a mean over micro-batches; inputs (K, m, 2)."""
    directions = DIRECTIONS.to(second)
    one, two = (each @ directions for each in (first, second))
    return (one.sort(1).values - two.sort(1).values).square().mean()


def loss(model: nn.Module, batch: Points, strength: float = 0.0, *, size: int | None = None) -> Tensor:
    """Return the distance between generated and given points, as a mean over micro-batches."""
    return sliced(in_microbatches(model(batch["noise"]), size), in_microbatches(batch["points"], size))


@torch.no_grad()
def measured(model: nn.Module, held_out: Points) -> tuple[float, float]:
    """Return the sliced Wasserstein distance to held-out points, and the generated points' mean radius."""
    made = model(held_out["noise"].to(dtype_of(model)))
    distance = sliced(made[None], held_out["points"][None].to(made.dtype)).sqrt()
    return distance.item(), made.norm(dim=1).mean().item()


@torch.no_grad()
def outline(model: nn.Module, held_out: Points) -> tuple[float, ...]:
    """Return the mean radius of generated points by sector; an empty sector has the mean of all points."""
    made = model(held_out["noise"].to(dtype_of(model)))
    radius = made.norm(dim=1)
    angle = torch.atan2(made[:, 1], made[:, 0]) % (2 * math.pi)
    sector = (angle * (SECTORS / (2 * math.pi))).long().clamp_max(SECTORS - 1)
    inside = [radius[sector == each] for each in range(SECTORS)]
    return tuple((each if len(each) else radius).mean().item() for each in inside)


def ring() -> CoupledRecipe:
    """Return the recipe."""
    train, valid, test = draw(BATCH * UPDATES, seed=0), draw(HELD_OUT, seed=1), draw(HELD_OUT, seed=2)
    model = seeded(_generator)

    return CoupledRecipe(
        name="ring",
        description="a generator of eight Gaussians on a ring of radius 2, by sliced Wasserstein distance",
        model=model,
        samples=len(train["noise"]),
        batch=partial(select, train),
        loss_fn=lambda model: partial(loss, model),
        margin=0.02,
        learning_rates={"adam": 0.01},
        batch_size=BATCH,
        updates=UPDATES,
        ways=(
            exact_way(loss, model, EXACT, f"{BATCH} points sorted against {BATCH}"),
            *(plain_way(loss, model, m, f"points sorted against {m} points") for m in (32, 8, 4, 2)),
        ),
        points=tuple(Point(learning_rate=rate) for rate in (0.01, 0.03)),
        validate=lambda model: -measured(model, valid)[0],
        measures=(
            Measure(name="distance to the data", meaning="sliced Wasserstein, 8192 points", form=".3f"),
            Measure(name="radius", meaning="mean distance of generated points from the centre; data: 2.01"),
        ),
        measure=lambda model: measured(model, test),
        lower_is_better=True,
        curve_at=tuple(2 * math.pi * (each + 0.5) / SECTORS for each in range(SECTORS)),
        curve=lambda model: outline(model, test),
        mechanism="the distance of two samples of m points is smallest if the generator shrinks to the mean",
        limits=("No repair of the plain loop was tried; the bias falls as m grows.",),
    )


def _generator() -> nn.Module:
    return nn.Sequential(nn.Linear(LATENT, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
