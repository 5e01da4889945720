"""Backends of a comparison: torch, or another framework that makes the same updates from the same batches.

The module `on_NAME` of this package defines the backend NAME as its `BACKEND`. It is imported on first use,
so that a comparison on one framework needs no other.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from superbatch.errors import InputError

from ..recipes import Recipe
from ..report.comparison import Run
from .setting import ArmSpec, Method, Setting, Tick, curve_updates

# Backend -> packages that it needs. The extra that installs them has the backend's name.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "jax": ("jax", "optax"),
    "tensorflow": ("tensorflow",),
    "keras": ("keras",),
}
FRAMEWORKS_OF_KERAS = ("tensorflow", "jax", "torch")
FLOOR = 1e-3  # least divisor of a parameter's relative difference, as a share of the norm of all weights


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Results of one arm, trained from one seed."""

    losses: list[float]  # mean loss of each update's batch, before the update
    seconds: float  # time of the updates, without data, compilation and evaluation
    metric: float  # on held-out data, after the last update
    weights: Mapping[str, Any]  # name -> weights after the last update, float64


# Called with (recipe, setting, seed, tick); yields the results of each arm in order. It calls `tick` with
# the number of micro-batches of each update.
TrainArms = Callable[[Recipe, Setting, int, Tick], Iterator[Trained]]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A framework that trains the arms of a comparison."""

    title: str  # its name in reports
    load: Callable[
        [str, str | Path | None], Recipe
    ]  # called with the recipe's name and a data folder or None
    check: Callable[[Setting], None] = lambda setting: None  # raises InputError for a setting it cannot train
    train: TrainArms
    # Peak of the bytes that one update of an arm allocates; None if it is not known.
    peak_of_update: Callable[[Recipe, Setting, ArmSpec], int | None] = lambda recipe, setting, arm: None
    how: Mapping[Method, str]  # description of each method that it offers
    versions: Callable[[], dict[str, str]]  # package -> version
    # A context with this many threads; by default the number is not changed.
    threads: Callable[[int], AbstractContextManager[None]] = lambda count: nullcontext()
    notes: tuple[str, ...] = ()  # notes of a report on its numbers


def timed(
    batches: Iterable[Any],
    prepare: Callable[[Any], Any],
    update: Callable[[Any], float],
    tick: Callable[[], None],
) -> tuple[list[float], float]:
    """Make the updates of a run; return their losses, and the seconds of all calls of `update`."""
    losses: list[float] = []
    seconds = 0.0
    for indices in batches:
        batch = prepare(indices)
        start = time.perf_counter()
        losses.append(update(batch))
        seconds += time.perf_counter() - start
        tick()
    return losses, seconds


def load_backend(name: str) -> Backend:
    """Import a backend."""
    check_installed(name)
    try:
        return importlib.import_module(f"superbatch.lab.studies.on_{name}").BACKEND
    except ModuleNotFoundError as error:  # Keras is installed, but perhaps not the framework that it uses
        wanted = (error.name or "").split(".")[0]
        if name != "keras" or wanted not in FRAMEWORKS_OF_KERAS:
            raise
        raise InputError(
            f"backend='keras': Keras is set to {wanted}, which is not installed. Install {wanted}, or set "
            f"KERAS_BACKEND to another of {', '.join(FRAMEWORKS_OF_KERAS)}."
        ) from error


def check_installed(name: str) -> None:
    """Raise `InputError` for a backend that is unknown or not installed, without importing it."""
    if name not in PACKAGES:
        raise InputError(f"There is no backend {name!r}. Use one of {', '.join(PACKAGES)}.")
    missing = [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
    if missing:
        which = f"package {missing[0]} is" if len(missing) == 1 else f"packages {' and '.join(missing)} are"
        raise InputError(f"backend={name!r}: the {which} not installed. Install superbatch[{name},cli].")


def check_backend(name: str, recipe: str | Recipe, *, data: object, threads: int) -> None:
    """Raise `InputError` for options that only the backend torch supports."""
    if name == "torch" or name not in PACKAGES:
        return
    named = recipe if isinstance(recipe, str) else recipe.name
    for option, value, only in (("recipe", named, "digits"), ("data", data, None), ("threads", threads, 1)):
        if value != only:
            raise InputError(
                f"backend={name!r} with {option}={value!r}: only the backend torch supports that. Use "
                f"{option}={only!r}, or the backend torch."
            )


def train_seed(
    recipe: Recipe, setting: Setting, seed: int, *, tick: Tick = lambda microbatches: None
) -> Iterator[tuple[int, Run]]:
    """Train every arm from one seed, the real batch first; yield the index and the run of each."""
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
    """Return the relative differences of weights from those of the real batch, as fields of `Run`.

    Over all weights it is ``|w - r| / |r|``, of one parameter p ``|w_p - r_p| / max(|r_p|, 1e-3 |r|)``, with
    2-norms. The floor is for parameters that are zero except for rounding. If a norm is NaN, the difference
    is infinite.

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
