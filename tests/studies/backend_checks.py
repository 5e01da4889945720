"""Checks for every backend of a comparison, called by the tests of each backend."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np

from superbatch.lab.report.comparison import Comparison
from superbatch.lab.studies.backends import Trained, difference, load_backend
from superbatch.lab.studies.compare import Options, compare, setting_from
from superbatch.lab.studies.setting import Setting

ROUNDING, SAME_RUN = 1e-10, 1e-9
SPLITS = "5x20,20x5,80/15/5"


@functools.cache
def trained(backend: str, options: Options) -> tuple[Setting, dict[str, Trained]]:
    """Train every arm from one seed, once for all tests; return the setting and name -> result."""
    on = load_backend(backend)
    recipe = on.load("digits", None)
    setting = setting_from(recipe, replace(options, backend=backend))
    runs = list(on.train(recipe, setting, 3, lambda microbatches: None))
    return setting, {arm.name: run for arm, run in zip(setting.arms, runs, strict=True)}


def start() -> dict[str, Any]:
    recipe = load_backend("torch").load("digits", None)
    return {name: values.detach().numpy() for name, values in recipe.model(3).named_parameters()}


def agrees_with_torch(backend: str, options: Options, *, bound: float = SAME_RUN) -> None:
    """Assert that losses, accuracy and parameters of every arm equal those of the run on torch."""
    _, ours = trained(backend, options)
    _, theirs = trained("torch", options)
    assert ours.keys() == theirs.keys()
    before = start()
    for name, run in theirs.items():
        assert run.weights.keys() == ours[name].weights.keys()
        for parameter, values in run.weights.items():
            wanted = np.asarray(values)
            moved = np.linalg.norm(wanted - before[parameter])
            assert moved > 1e-3, f"the premise: {parameter} moved"
            error = np.linalg.norm(ours[name].weights[parameter] - wanted) / moved
            assert error <= bound, f"{name}, {parameter}: {error}"
        assert np.allclose(ours[name].losses, run.losses, rtol=bound, atol=0), name
        assert ours[name].metric == run.metric, name
        assert ours[name].seconds > 0


def splits_agree(backend: str, options: Options, *, bound: float = ROUNDING) -> None:
    """Assert that exact arms have the real batch's weights and wrong arms do not."""
    setting, runs = trained(backend, options)
    real = runs[setting.arms[0].name]
    assert {arm.claim for arm in setting.arms} >= {"real", "exact"}
    assert difference(start(), real.weights)["weight_difference"] > 0.01, "the premise: the weights moved"
    for arm in setting.arms[1:]:
        apart = difference(runs[arm.name].weights, real.weights)
        if arm.claim == "exact":
            assert apart["worst_difference"] <= bound, f"{arm.name}: {apart}"
        else:
            assert apart["weight_difference"] > 1e-3, f"{arm.name}: {apart}"


def report_of(backend: str, **options: Any) -> Comparison:
    """Return the report of a small comparison in float64."""
    small: dict[str, Any] = {"updates": 6, "runs": 2, "dtype": "float64", "splits": "5x20"}
    return compare("digits", Options(**{**small, "backend": backend, **options}))
