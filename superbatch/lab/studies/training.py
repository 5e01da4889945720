"""Train every arm from one seed, on any backend: the same initial weights, the same order of samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from ..recipes import Recipe
from ..report.comparison import Run
from .backends import load_backend
from .setting import Setting, Tick, curve_updates

FLOOR = 1e-3


def train_seed(
    recipe: Recipe, setting: Setting, seed: int, *, tick: Tick = lambda microbatches: None
) -> Iterator[tuple[int, Run]]:
    """Train every arm from one seed, the real batch first."""
    reference: Mapping[str, Any] | None = None
    for index, trained in enumerate(load_backend(setting.backend).train(recipe, setting, seed, tick)):
        run = Run(
            seed=seed,
            metric=trained.metric,
            losses=tuple(
                statistics.fmean(trained.losses[start:stop])
                for start, stop in pairwise((0, *curve_updates(setting.updates)))
            ),
            seconds=trained.seconds,
            **({} if reference is None else difference(trained.weights, reference)),
        )
        reference = reference or trained.weights
        yield index, run


def difference(weights: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """The relative differences of a run's weights from the reference's, as `Run` has them.

    All weights: ``|w - r| / |r|``. One parameter p: ``|w_p - r_p| / max(|r_p|, 1e-3 |r|)``; the floor keeps a
    parameter that is zero but for rounding from looking different. 2-norms; infinite where they are not
    numbers.

    Examples:
        >>> r = {"a": [3.0, 4.0], "b": [12.0]}
        >>> difference({"a": [3.0, 4.0], "b": [13.3]}, r)["worst_parameter"]
        'b'
    """
    norms = {name: _norm(value) for name, value in reference.items()}
    apart = {name: _norm(np.asarray(weights[name]) - np.asarray(value)) for name, value in reference.items()}
    whole = math.hypot(*norms.values())
    if not math.isfinite(whole):
        return {"weight_difference": math.inf, "worst_difference": math.inf, "worst_parameter": None}
    relative = {
        name: 0.0 if distance == 0 else distance / max(norms[name], FLOOR * whole)
        for name, distance in apart.items()
    }
    worst = max(relative, key=lambda name: relative[name])
    return {
        "weight_difference": math.hypot(*apart.values()) / whole,
        "worst_difference": relative[worst],
        "worst_parameter": worst,
    }


def _norm(values: Any) -> float:
    norm = float(np.linalg.norm(np.asarray(values, np.float64)))
    return norm if math.isfinite(norm) else math.inf
