"""Scaling rules on digits: batches of 10, and of 40 with rescaled or unchanged settings.

Makes the table of docs/scaling.md: `./run test -m slow tests/torch/test_rescale_digits.py -s`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
from torch.optim import Optimizer

from superbatch.lab.recipes import OPTIMIZERS, Recipe, load_recipe
from superbatch.lab.studies.on_torch import orders
from superbatch.lab.studies.setting import Setting
from superbatch.torch.tuning import rescale

SAMPLES, SEEDS = 20_000, 4


def loss_after(
    recipe: Recipe, name: str, rate: float, *, batch: int, change: Callable[[Optimizer], object]
) -> float:
    """Mean training loss over seeds after a fixed number of samples."""
    dataset, losses = recipe.batch(torch.arange(recipe.samples)), list[float]()
    setting = Setting(
        arms=(),
        updates=SAMPLES // batch,
        batch_size=batch,
        tail=None,
        dtype="float32",
        optimizer=name,
        learning_rate=rate,
    )
    for seed in range(SEEDS):
        model = recipe.model(seed)
        optimizer = OPTIMIZERS[name](model.parameters(), rate)
        change(optimizer)
        loss_fn = recipe.loss_fn(model)
        for indices in orders(recipe.samples, setting, seed):
            optimizer.zero_grad()
            loss_fn(recipe.batch(indices)).backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(float(loss_fn(dataset)))
    return statistics.fmean(losses)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rate", "within"),
    # Unchanged momentum averages over four times the samples. For Adam a batch of 40 is no longer far below
    # the noise scale (60 to 100 here), where the square root scales too little: its bound is wide.
    [("sgd", 0.02, 1.02), ("momentum", 0.002, 1.05), ("adam", 3e-4, 1.5)],
)
def test_the_same_samples_give_about_the_same_loss(name: str, rate: float, within: float) -> None:
    recipe = load_recipe("digits")
    base = loss_after(recipe, name, rate, batch=10, change=lambda optimizer: None)
    ours = loss_after(recipe, name, rate, batch=40, change=lambda optimizer: rescale(optimizer, 10, 40))
    left = loss_after(recipe, name, rate, batch=40, change=lambda optimizer: None)
    print(f"{name}: batch 10 {base:.3f}, batch 40 rescaled {ours:.3f}, batch 40 left {left:.3f}")
    assert 1 / within < ours / base < within
    assert left / base > 2, "mutant: unchanged settings"
