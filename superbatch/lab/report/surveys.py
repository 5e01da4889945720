"""Results of surveys of several splits, and tests of their equivalence to those of the real batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from superbatch.results.survey import Survey, What

from .comparison import Equivalence

# What an arm says of itself: the baseline; the same with other seeds; equal to it; not equal, and known to
# be; wrong on purpose; a batch of another size, which may look alike all the same.
SurveyClaim = Literal["real", "again", "exact", "inexact", "wrong", "other"]

# Largest relative difference of two curves from the same weights and samples that rounding explains, up to
# the lowest point: behind it training diverges, and so do roundings.
PAIRED_TOLERANCES: Mapping[str, float] = {"float64": 2e-14, "float32": 1e-5}


@dataclass(frozen=True, kw_only=True)
class SeededSurvey:
    """One survey and its seed."""

    seed: int  # of the initial weights and of the order of the samples
    survey: Survey  # what was found


@dataclass(frozen=True, kw_only=True)
class CurveTest:
    """Two one-sided tests at each point of two bundles of curves; all must pass, so none needs correction."""

    points: int  # that were tested
    upto: float  # the highest value among them, at most 2/3 of where the baseline is lowest
    factor: float  # losses within this factor of each other (the margin) are alike
    p_value: float  # the largest of all points
    at: float  # the value where it is largest
    ratio: float  # of the geometric mean losses there, to the baseline's
    equivalent: bool  # every point's p-value is below 0.05


@dataclass(frozen=True, kw_only=True)
class SurveyArm:
    """One way to make the updates, surveyed from several seeds."""

    name: str  # the split, and the way where it is not the right one
    sizes: tuple[int, ...]  # samples of each micro-batch of a full batch
    claim: SurveyClaim  # what the arm says of itself
    how: str  # how the update is made, in words
    runs: tuple[SeededSurvey, ...]  # surveys from seeds of this arm's own
    rate: float | None  # geometric mean of what they suggest (`Survey.suggestion`); None without any
    decades: float | None  # standard deviation of the suggestions' decimal logarithms; None with fewer than 2
    # Of some seeds: largest relative difference of the curve to the lowest point of the real batch's.
    pairs: tuple[float, ...]
    curve: CurveTest | None  # are the curves those of the baseline? None where it cannot be tested
    suggested: Equivalence | None  # are the suggestions those of the baseline, in decades? None likewise

    @property
    def alike(self) -> bool | None:
        """True if both unpaired tests find equivalence to the baseline, False if one does not.

        None where nothing is found against it, and one could not be made.
        """
        found = [None if test is None else test.equivalent for test in (self.curve, self.suggested)]
        if False in found:
            return False
        return None if None in found else True


@dataclass(frozen=True, kw_only=True)
class Surveys:
    """Results of `superbatch survey`."""

    recipe: str
    description: str  # what was trained on what
    what: What  # the option that was surveyed
    optimizer: str
    learning_rate: float | None  # where another option is surveyed; None where the rate itself is
    dtype: str  # of weights and data
    batch_size: int  # samples of one update
    low: float  # first value of the ramp
    high: float  # last value of the ramp
    updates: int  # points of the ramp
    repeats: int  # surveys of each arm that were asked for
    factor: float  # margin of the test of the curves
    margin: float  # of the test of the suggestions, in decades
    arms: tuple[SurveyArm, ...]  # the baseline first
    seconds: float  # wall time
    partial: bool  # it was interrupted
    versions: dict[str, str]  # of what it ran on
    command: dict[str, str]  # what the user asked for
    notes: tuple[str, ...]  # what a reader should know beside the numbers

    @property
    def tolerance(self) -> float:
        """The largest relative difference of paired curves that rounding explains in this dtype."""
        return PAIRED_TOLERANCES[self.dtype]
