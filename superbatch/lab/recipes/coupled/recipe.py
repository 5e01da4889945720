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
    """A point of the grid: hyperparameters that each way chooses by validation.

    Attributes:
        learning_rate: of Adam at the first update; it falls to zero along a cosine.
        strength: of a penalty, where the loss has one.
    """

    learning_rate: float
    strength: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A measured quantity of a trained model.

    Attributes:
        name: with the unit: a column of the table.
        meaning: one sentence.
        form: a format specification.
    """

    name: str
    meaning: str
    form: str = ".2f"


@dataclass(frozen=True, kw_only=True)
class CoupledRecipe(Recipe):
    """A recipe whose update depends on the whole batch.

    Attributes:
        ways: to make the update; the first is exact, in micro-batches, and the others are compared with it.
        points: grid that each way is tuned over, for each seed alone.
        validate: model -> score on validation data; larger is better.
        measures: what `measure` returns; the first is compared, within `margin`.
        measure: model -> values on test data, in the order of `measures`.
        lower_is_better: for the first measure.
        curve_at: where the points of `curve` lie.
        curve: model -> values that the picture draws; None: nothing.
        mechanism: why micro-batches matter here, in one sentence.
        limits: what the numbers do not show, one sentence each.
    """

    ways: tuple[Way, ...]
    points: tuple[Point, ...]
    validate: Callable[[nn.Module], float]
    measures: tuple[Measure, ...]
    measure: Callable[[nn.Module], tuple[float, ...]]
    lower_is_better: bool
    curve_at: tuple[float, ...] = ()
    curve: Callable[[nn.Module], tuple[float, ...]] | None = None
    mechanism: str
    limits: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ways", "points", "measures"):
            if not getattr(self, name):
                raise InputError(f"The recipe {self.name!r} has no {name}. Pass at least one.")

    def way(self, name: str) -> Way:
        """The way of that name.

        Args:
            name: of a way.

        Returns:
            The way.

        Raises:
            StopIteration: there is none.
        """
        return next(way for way in self.ways if way.name == name)
