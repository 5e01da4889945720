"""A recipe of the study `coupled`: a task, the ways to train it, and the grid of each way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from superbatch.errors import InputError

from ..recipe import Recipe
from .ways import Way


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of the grid: hyperparameters that each way chooses by validation."""

    learning_rate: float  # of Adam at the first update; it falls to zero along a cosine
    strength: float = 0.0  # of a penalty, where the loss has one


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A measured quantity of a trained model."""

    name: str  # and its unit, after a comma: a column of the table
    meaning: str  # one sentence
    form: str = ".2f"  # a format specification


@dataclass(frozen=True, kw_only=True)
class CoupledRecipe(Recipe):
    """A recipe whose update depends on the whole batch; its first measure is its metric."""

    # to make the update; the first is exact, in micro-batches, and the others are compared with it
    ways: tuple[Way, ...]
    points: tuple[Point, ...]  # grid that each way is tuned over, for each seed alone
    validate: Callable[[nn.Module], float]  # model -> score on validation data; larger is better
    measures: tuple[Measure, ...]  # what `measure` returns; the first is compared, within `margin`
    # model -> values on test data, in the order of `measures`
    measure: Callable[[nn.Module], tuple[float, ...]]
    lower_is_better: bool  # for the first measure
    curve_at: tuple[float, ...] = ()  # where the points of `curve` lie
    # model -> values that the picture draws; None: nothing
    curve: Callable[[nn.Module], tuple[float, ...]] | None = None
    mechanism: str  # why micro-batches matter here, in one sentence
    limits: tuple[str, ...]  # what the numbers do not show, one sentence each

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ways", "points", "measures"):
            if not getattr(self, name):
                raise InputError(f"The recipe {self.name!r} has no {name}. Pass at least one.")
        metric, _, unit = self.measures[0].name.partition(", ")
        first = {"metric": metric, "unit": unit, "evaluate": lambda model: self.measure(model)[0]}
        for name, value in first.items():
            object.__setattr__(self, name, value)  # as a frozen dataclass sets its own fields

    def way(self, name: str) -> Way:
        """The way of that name; StopIteration if there is none."""
        return next(way for way in self.ways if way.name == name)
