"""Backends of a comparison: torch, or another framework that makes the same update of the same batch.

A backend is one file beside this one (`on_torch`, `on_jax`, ...) that ends with its `Backend`. It is imported
when it is asked for, so that a comparison on one framework needs no other.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superbatch.errors import InputError

from ..recipes import Recipe
from .setting import ArmPlan, Setting, Tick, Way

# Names of the backends, and the packages that each needs; the extra to install has the backend's name.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "jax": ("jax", "optax"),
    "tensorflow": ("tensorflow",),
    "keras": ("keras",),
}
FRAMEWORKS_OF_KERAS = ("tensorflow", "jax", "torch")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One arm, trained from one seed."""

    losses: list[float]  # mean loss of each update's batch, before the update
    seconds: float  # time spent in updates, without data, compilation and evaluation
    metric: float  # on held-out data, after the last update
    weights: Mapping[str, Any]  # after the last update, float64, by name


# (recipe, setting, seed, tick) -> every arm, trained, in order; `tick` takes the micro-batches of each update
TrainArms = Callable[[Recipe, Setting, int, Tick], Iterator[Trained]]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Training of the arms of a comparison by one framework."""

    title: str  # its name for a reader
    load: Callable[[str, str | Path | None], Recipe]  # the recipe of a name, and a folder of data or None
    # refuses, with an InputError, a setting that it cannot train
    check: Callable[[Setting], None] = lambda setting: None
    train: TrainArms
    # bytes that one update of an arm allocates at its peak; None where it is not known
    peak_of_update: Callable[[Recipe, Setting, ArmPlan], int | None] = lambda recipe, setting, arm: None
    how: Mapping[Way, str]  # what it does in each way, in words
    versions: Callable[[], dict[str, str]]  # of what it runs on
    # a context with this many threads, of a backend that can set them
    threads: Callable[[int], AbstractContextManager[None]] = lambda count: nullcontext()
    notes: tuple[str, ...] = ()  # what a reader must know of its numbers


def timed(
    batches: Iterable[Any],
    prepare: Callable[[Any], Any],
    update: Callable[[Any], float],
    tick: Callable[[], None],
) -> tuple[list[float], float]:
    """Make the updates of a run; return their losses and seconds, without those of the data."""
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
    except ModuleNotFoundError as error:  # Keras, which is installed, needs a framework that is not
        wanted = (error.name or "").split(".")[0]
        if name != "keras" or wanted not in FRAMEWORKS_OF_KERAS:
            raise
        raise InputError(
            f"backend='keras': Keras is set to {wanted}, which is not installed. Install it, or set "
            f"KERAS_BACKEND to one of {', '.join(FRAMEWORKS_OF_KERAS)} that is."
        ) from error


def check_installed(name: str) -> None:
    """Refuse a backend that cannot be loaded, without importing anything."""
    if name not in PACKAGES:
        raise InputError(f"There is no backend {name!r}. Use one of {', '.join(PACKAGES)}.")
    missing = [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
    if missing:
        which = f"package {missing[0]} is" if len(missing) == 1 else f"packages {' and '.join(missing)} are"
        raise InputError(f"backend={name!r}: the {which} not installed. Install superbatch[{name},cli].")


def check_backend(name: str, recipe: str | Recipe, *, data: object, threads: int) -> None:
    """Refuse what only torch can do: another recipe than digits, a folder of data, a number of threads."""
    if name == "torch" or name not in PACKAGES:
        return
    if recipe != "digits":
        given = recipe if isinstance(recipe, str) else recipe.name
        raise InputError(
            f"backend={name!r} with the recipe {given!r}: on {name} the digits task is compared, and no "
            "other. Use the recipe digits, or the backend torch."
        )
    if data is not None:
        raise InputError(f"data={str(data)!r} with backend={name!r}: digits reads no folder. Leave it out.")
    if threads != 1:
        raise InputError(
            f"backend={name!r} with threads={threads}: it is torch whose threads are set; {name} reads its "
            f"own when it starts. Leave it out, and set the threads of {name} in its environment."
        )
