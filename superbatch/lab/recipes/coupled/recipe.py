"""Recipe of the study `coupled`: a task, the ways to make its updates, and the grid of hyperparameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from superbatch.errors import InputError

from ..recipe import Recipe
from .ways import Way


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of the grid of hyperparameters, over which each `Way` is tuned on validation data."""

    learning_rate: float  # Adam's rate at the first update; it falls to zero along a cosine
    strength: float = 0.0  # strength of the penalty, if the loss has one


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A quantity that is measured on a trained model."""

    name: str  # name, with the unit after a comma: heading of the table's column
    meaning: str  # one sentence
    form: str = ".2f"  # format specification


@dataclass(frozen=True, kw_only=True)
class CoupledRecipe(Recipe):
    """A recipe whose update depends on the whole batch; its first measure is its metric."""

    coupled: Literal["error", "exact"] = "exact"
    ways: tuple[Way, ...]  # the first is exact; the others are compared with it
    points: tuple[Point, ...]  # grid over which each way is tuned, separately for each seed
    validate: Callable[[nn.Module], float]  # model -> score on validation data; larger is better
    measures: tuple[Measure, ...]  # the first one is compared, with `margin`
    measure: Callable[[nn.Module], tuple[float, ...]]  # model -> values on test data, as in `measures`
    lower_is_better: bool  # for the first measure
    curve_at: tuple[float, ...] = ()  # positions of the values of `curve`
    curve: Callable[[nn.Module], tuple[float, ...]] | None = None  # model -> plotted values, if any
    mechanism: str  # why micro-batches matter for this task, in one sentence
    limits: tuple[str, ...]  # limits of the result, one sentence each

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ways", "points", "measures"):
            if not getattr(self, name):
                raise InputError(f"The recipe {self.name!r} has no {name}. Pass at least one.")
        metric, _, unit = self.measures[0].name.partition(", ")
        first = {"metric": metric, "unit": unit, "evaluate": lambda model: self.measure(model)[0]}
        for name, value in first.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen

    def way(self, name: str) -> Way:
        """Return the way of this name; raise StopIteration if there is none."""
        return next(way for way in self.ways if way.name == name)
