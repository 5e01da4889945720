"""Results of a study: one frozen record per run, per arm, per test, and of the whole.

All studies share these records: what differs between them - the arms, the quantities, the conclusion - is
data.
"""

from __future__ import annotations

# pyright: strict
import math
import statistics
from dataclasses import dataclass

from .comparison import Equivalence


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One measured quantity: a column of the table.

    Attributes:
        name: heading of the column, with the unit.
        meaning: one sentence.
        form: how a number is written, a format specification such as ``".2f"``.

    Examples:
        >>> Quantity(name="test accuracy, %", meaning="of held-out data", form=".2f").form
        '.2f'
    """

    name: str
    meaning: str
    form: str = ".4g"


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One arm from one seed.

    Attributes:
        seed: of everything that is drawn.
        values: name of a quantity -> its value.
        curve: what the plot draws against `Study.curve_at`; none where there is no curve.
    """

    seed: int
    values: dict[str, float]
    curve: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StudyArm:
    """One way to train, or to compute, from every seed.

    Attributes:
        name: short.
        how: in words.
        facts: name of a quantity -> what is the same in every run, such as the number of updates.
        runs: those that were finished.
        curve_updates: updates made at the points of `Study.curve_at`; none where there is no curve.
    """

    name: str
    how: str
    facts: dict[str, float]
    runs: tuple[StudyRun, ...]
    curve_updates: tuple[float, ...] = ()

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
    """A test of equivalence between two arms.

    Attributes:
        first: name of the arm in question.
        second: name of the arm it is compared with.
        quantity: what is compared.
        ratio: the test is of the logarithm: differences and margins are factors.
        result: of the test, of logarithms where `ratio` is true.
    """

    first: str
    second: str
    quantity: str
    ratio: bool
    result: Equivalence

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
    """Results of `superbatch study NAME`.

    Attributes:
        name: of the study.
        question: that it answers.
        recipe: what was trained.
        description: what was trained on what.
        setting: what was held fixed, name -> text.
        quantities: the columns of the table.
        arms: what was compared.
        tests: of equivalence.
        conclusion: one sentence, made from the numbers.
        curve_at: where the points of `StudyRun.curve` lie.
        seeds: asked for; a partial report may have fewer runs.
        seconds: wall time.
        partial: it was interrupted before the end.
        versions: of what it ran on: name -> version.
        command: what the user asked for: name of an option -> value.
        notes: what a reader should know beside the numbers, and what the study does not show.
    """

    name: str
    question: str
    recipe: str
    description: str
    setting: dict[str, str]
    quantities: tuple[Quantity, ...]
    arms: tuple[StudyArm, ...]
    tests: tuple[StudyTest, ...]
    conclusion: str
    curve_at: tuple[float, ...]
    seeds: tuple[int, ...]
    seconds: float
    partial: bool
    versions: dict[str, str]
    command: dict[str, str]
    notes: tuple[str, ...]

    def arm(self, name: str) -> StudyArm:
        """The arm of that name.

        Args:
            name: of an arm.

        Returns:
            The arm.

        Raises:
            StopIteration: there is none.
        """
        return next(arm for arm in self.arms if arm.name == name)
