"""Results of `superbatch survey`: surveys of several splits, and tests against those of the real batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from superbatch.results.survey import Survey, What

from .comparison import Equivalence
from .run import RunReport

# Claim of an arm: it is the baseline, the baseline with other seeds, equal to the baseline, known to differ
# from it, wrong on purpose, or a batch of another size, which may look alike.
SurveyClaim = Literal["real", "again", "exact", "inexact", "wrong", "other"]

# Largest relative difference of two curves from the same weights and samples that rounding explains, up to
# the lowest point: after it the training diverges, and with it the rounding errors.
PAIRED_TOLERANCES: Mapping[str, float] = {"float64": 2e-14, "float32": 1e-5}


@dataclass(frozen=True, kw_only=True)
class SeededSurvey:
    """One survey and its seed."""

    seed: int  # of the initial weights and of the order of the samples
    survey: Survey


@dataclass(frozen=True, kw_only=True)
class CurveTest:
    """Result of two one-sided tests at each point of the curves of two arms.

    All points must pass, so that the p-values need no correction for their number.
    """

    points: int  # number of tested points
    upto: float  # the highest tested value, at most 2/3 of the value where the baseline is lowest
    factor: float  # the margin: losses within this factor of each other are alike
    p_value: float  # the largest p-value of all points
    at: float  # the value with this p-value
    ratio: float  # geometric mean loss at this value, relative to the baseline's
    equivalent: bool  # True if every p-value is below 0.05


@dataclass(frozen=True, kw_only=True)
class SurveyArm:
    """One way to make the updates, with its surveys from several seeds."""

    name: str  # the split, and the method unless it is superbatch's
    sizes: tuple[int, ...]  # samples of each micro-batch of a full batch
    claim: SurveyClaim
    how: str  # how the update is made, in words
    runs: tuple[SeededSurvey, ...]  # surveys from seeds that only this arm has
    rate: float | None  # geometric mean of their suggestions (`Survey.suggestion`); None without any
    decades: float | None  # standard deviation of the suggestions' decimal logarithms; None with fewer than 2
    # For surveys with a seed of the real batch: the largest relative difference of the two curves, up to the
    # lowest point of the real batch's.
    pairs: tuple[float, ...]
    curve: CurveTest | None  # test of the curves against the baseline's; None if it cannot be made
    suggested: Equivalence | None  # test of the suggestions against the baseline's, in decades; None likewise

    @property
    def alike(self) -> bool | None:
        """Return True if both unpaired tests show equivalence, False if one does not, else None."""
        results = [test and test.equivalent for test in (self.curve, self.suggested)]
        if False in results:
            return False
        return None if None in results else True


@dataclass(frozen=True, kw_only=True)
class Surveys(RunReport):
    """Results of `superbatch survey`."""

    what: What  # the surveyed setting of the optimizer
    optimizer: str
    learning_rate: float | None  # None if it is surveyed itself
    dtype: str  # of weights and data
    batch_size: int  # samples of one update
    low: float  # first value of the ramp
    high: float  # last value of the ramp
    updates: int  # points of the ramp
    repeats: int  # requested surveys of each arm; a partial report may have fewer
    factor: float  # margin of the test of the curves
    margin: float  # margin of the test of the suggestions, in decades
    arms: tuple[SurveyArm, ...]  # the baseline first

    @property
    def tolerance(self) -> float:
        """Return the largest relative difference of paired curves that rounding explains in this dtype."""
        return PAIRED_TOLERANCES[self.dtype]
