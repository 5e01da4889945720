"""Results of a study: one frozen record per run, per arm, per test, and of the whole, for all studies."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from .comparison import Equivalence


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One measured quantity: a column of the table.

    Examples:
        >>> Quantity(name="test accuracy, %", meaning="of held-out data", form=".2f").form
        '.2f'
    """

    name: str  # heading of the column, with the unit
    meaning: str  # one sentence
    form: str = ".4g"  # how a number is written, a format specification such as ``".2f"``


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One arm from one seed."""

    seed: int  # of everything that is drawn
    values: dict[str, float]  # name of a quantity -> its value
    curve: tuple[float, ...] = ()  # drawn against `Study.curve_at`; none where there is no curve


@dataclass(frozen=True, kw_only=True)
class StudyArm:
    """One way to train, or to compute, from every seed."""

    name: str  # short
    how: str
    facts: dict[str, float]  # quantity -> what is the same in every run, such as the number of updates
    runs: tuple[StudyRun, ...]  # those that were finished
    curve_updates: tuple[float, ...] = ()  # made at the points of `Study.curve_at`

    def values(self, quantity: str) -> tuple[float, ...]:
        """A quantity of every run that has it, in the order of the seeds."""
        return tuple(run.values[quantity] for run in self.runs if quantity in run.values)

    def mean(self, quantity: str) -> float | None:
        """The mean of a quantity over the runs; a fact as it is; None where there is neither.

        Examples:
            >>> runs = tuple(StudyRun(seed=seed, values={"loss": 1.0 + seed}) for seed in range(3))
            >>> arm = StudyArm(name="A", how="", facts={"updates": 7}, runs=runs)
            >>> arm.mean("loss"), arm.sd("loss"), arm.mean("updates"), arm.mean("accuracy")
            (2.0, 1.0, 7, None)
        """
        values = self.values(quantity)
        return statistics.fmean(values) if values else self.facts.get(quantity)

    def sd(self, quantity: str) -> float | None:
        """The standard deviation (n - 1) of a quantity over the runs; None with fewer than two."""
        values = self.values(quantity)
        if len(values) < 2:
            return None
        return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


@dataclass(frozen=True, kw_only=True)
class StudyTest:
    """A test of equivalence between two arms."""

    first: str  # name of the arm in question
    second: str  # name of the arm it is compared with
    quantity: str  # what is compared
    ratio: bool  # the test is of the logarithm: differences and margins are factors
    result: Equivalence  # of the test, of logarithms where `ratio` is true

    @property
    def difference(self) -> float:
        """Of the means; a factor where the test is of a ratio."""
        return self._read(self.result.difference)

    @property
    def low(self) -> float:
        """Lower end of the interval; a factor where the test is of a ratio."""
        return self._read(self.result.low)

    @property
    def high(self) -> float:
        """Upper end of the interval; a factor where the test is of a ratio."""
        return self._read(self.result.high)

    @property
    def margin(self) -> float:
        """Of the test; a factor where the test is of a ratio."""
        return self._read(self.result.margin)

    def _read(self, value: float) -> float:
        return math.exp(value) if self.ratio and value < 700 else value


@dataclass(frozen=True, kw_only=True)
class Study:
    """Results of `superbatch study NAME`."""

    name: str  # of the study
    question: str  # that it answers
    recipe: str  # what was trained
    description: str  # what was trained on what
    setting: dict[str, str]  # what was held fixed, name -> text
    quantities: tuple[Quantity, ...]  # the columns of the table
    arms: tuple[StudyArm, ...]  # what was compared
    tests: tuple[StudyTest, ...]  # of equivalence
    conclusion: str  # one sentence, made from the numbers
    curve_at: tuple[float, ...]  # where the points of `StudyRun.curve` lie
    seeds: tuple[int, ...]  # asked for; a partial report may have fewer runs
    seconds: float  # wall time
    partial: bool  # it was interrupted before the end
    versions: dict[str, str]  # of what it ran on: name -> version
    command: dict[str, str]  # what the user asked for: name of an option -> value
    notes: tuple[str, ...]  # what a reader should know beside the numbers, and what the study does not show

    def arm(self, name: str) -> StudyArm:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)
