"""Results of `superbatch study`, in frozen dataclasses: each run, each arm, each test, and the study."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from .comparison import Equivalence
from .run import RunReport


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A measured quantity, which is a column of the table.

    Examples:
        >>> Quantity(name="test accuracy, %", meaning="of held-out data", form=".2f").form
        '.2f'
    """

    name: str  # heading of the column, with the unit
    meaning: str  # one sentence
    form: str = ".4g"  # how a number is written, a format specification such as ``".2f"``


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """Run of one arm from one seed."""

    seed: int  # of all random numbers
    values: dict[str, float]  # name of a quantity -> its value
    curve: tuple[float, ...] = ()  # drawn against `Study.curve_at`; empty without a curve


@dataclass(frozen=True, kw_only=True)
class StudyArm:
    """One method of training or computation, with its runs from all seeds."""

    name: str  # short
    how: str  # the method, in words
    facts: dict[str, float]  # quantity -> value that all runs share, such as the number of updates
    runs: tuple[StudyRun, ...]  # finished runs
    curve_updates: tuple[float, ...] = ()  # number of updates at each point of `Study.curve_at`

    def values(self, quantity: str) -> tuple[float, ...]:
        """Return the values of a quantity in the runs that have it, in the order of the seeds."""
        return tuple(run.values[quantity] for run in self.runs if quantity in run.values)

    def mean(self, quantity: str) -> float | None:
        """Return the mean of a quantity over the runs, or else the fact of that name, or else None.

        Examples:
            >>> runs = tuple(StudyRun(seed=seed, values={"loss": 1.0 + seed}) for seed in range(3))
            >>> arm = StudyArm(name="A", how="", facts={"updates": 7}, runs=runs)
            >>> arm.mean("loss"), arm.sd("loss"), arm.mean("updates"), arm.mean("accuracy")
            (2.0, 1.0, 7, None)
        """
        values = self.values(quantity)
        return statistics.fmean(values) if values else self.facts.get(quantity)

    def sd(self, quantity: str) -> float | None:
        """Return the standard deviation (n - 1) of a quantity over the runs; None with fewer than two."""
        values = self.values(quantity)
        if len(values) < 2:
            return None
        return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


@dataclass(frozen=True, kw_only=True)
class StudyTest:
    """A test of equivalence between two arms."""

    first: str  # name of the arm under test
    second: str  # name of the reference arm
    quantity: str  # name of the compared quantity
    ratio: bool  # True if logarithms are compared: differences and margins are factors
    result: Equivalence  # of logarithms if `ratio` is true

    @property
    def difference(self) -> float:
        """Return the difference of the means; with `ratio`, the ratio of the geometric means."""
        return self._read(self.result.difference)

    @property
    def low(self) -> float:
        """Return the lower end of the interval; a factor with `ratio`."""
        return self._read(self.result.low)

    @property
    def high(self) -> float:
        """Return the upper end of the interval; a factor with `ratio`."""
        return self._read(self.result.high)

    @property
    def margin(self) -> float:
        """Return the margin of the test; a factor with `ratio`."""
        return self._read(self.result.margin)

    def _read(self, value: float) -> float:
        return math.exp(value) if self.ratio and value < 700 else value


@dataclass(frozen=True, kw_only=True)
class Study(RunReport):
    """Results of `superbatch study NAME`."""

    name: str  # of the study
    question: str
    setting: dict[str, str]  # name -> value of each fixed parameter
    quantities: tuple[Quantity, ...]  # columns of the table
    arms: tuple[StudyArm, ...]
    tests: tuple[StudyTest, ...]  # of equivalence
    conclusion: str  # one sentence, made from the numbers
    curve_at: tuple[float, ...]  # x values of `StudyRun.curve`
    seeds: tuple[int, ...]  # all requested seeds; a partial report may have fewer runs

    def arm(self, name: str) -> StudyArm:
        """Return the arm of a name."""
        return next(arm for arm in self.arms if arm.name == name)
