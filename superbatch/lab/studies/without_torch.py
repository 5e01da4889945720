"""One run of the digits task on a backend that is not torch: what does not depend on which one it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..recipes import Recipe
from ..recipes.drawing import Draws
from .backends import Trained
from .setting import ArmPlan, Setting, batches


def run_updates(
    recipe: Recipe,
    setting: Setting,
    arm: ArmPlan,
    seed: int,
    tick: Callable[[int], None],
    *,
    prepare: Callable[[Any], Any],  # indices of the samples -> their batch, off the clock
    update: Callable[[Any], float],  # makes one update; returns the mean loss before it
    weights: Callable[[], dict[str, np.ndarray]],  # by torch's names, in torch's shapes
) -> Trained:
    """Make the updates of one run, with the samples in the order in which torch draws them from the seed."""
    draws = Draws(seed)
    losses: list[float] = []
    seconds = 0.0
    for indices in batches(lambda: draws.permutation(recipe.samples), recipe.samples, setting):
        batch = prepare(indices)
        start = time.perf_counter()
        losses.append(update(batch))
        seconds += time.perf_counter() - start
        tick(len(arm.split.sizes))
    found: Any = weights()
    return Trained(
        losses=losses,
        seconds=seconds,
        metric=recipe.evaluate(found),
        weights={name: values.astype(np.float64) for name, values in found.items()},
    )
