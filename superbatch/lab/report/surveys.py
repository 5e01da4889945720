"""Results of surveys of several splits, and tests of their equivalence to those of the real batch."""

from __future__ import annotations

# pyright: strict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from superbatch.results.survey import Survey, What

from .comparison import Equivalence

SurveyClaim = Literal["real", "again", "exact", "inexact", "wrong", "other"]
"""What an arm says of itself: the baseline; the same with other seeds; equal to it; not equal, and known to
be; wrong on purpose; a batch of another size, which may look alike all the same."""

PAIRED_TOLERANCES: Mapping[str, float] = {"float64": 2e-14, "float32": 1e-5}
"""Largest relative difference of two curves from the same weights and samples that rounding explains, up to
the lowest point: behind it training diverges, and so do roundings."""


@dataclass(frozen=True, kw_only=True)
class SeededSurvey:
    """One survey and its seed.

    Attributes:
        seed: of the initial weights and of the order of the samples.
        survey: what was found.
    """

    seed: int
    survey: Survey


@dataclass(frozen=True, kw_only=True)
class CurveTest:
    """Two one-sided tests at each point of two bundles of curves; all must pass, so none needs correction.

    Attributes:
        points: that were tested.
        upto: the highest value among them, at most 2/3 of where the baseline is lowest.
        factor: losses within this factor of each other (the margin) are alike.
        p_value: the largest of all points.
        at: the value where it is largest.
        ratio: of the geometric mean losses there, to the baseline's.
        equivalent: every point's p-value is below 0.05.
    """

    points: int
    upto: float
    factor: float
    p_value: float
    at: float
    ratio: float
    equivalent: bool


@dataclass(frozen=True, kw_only=True)
class SurveyArm:
    """One way to make the updates, surveyed from several seeds.

    Attributes:
        name: the split, and the way where it is not the right one.
        sizes: samples of each micro-batch of a full batch.
        claim: what the arm says of itself.
        how: how the update is made, in words.
        runs: surveys from seeds of this arm's own.
        rate: geometric mean of what they suggest (`Survey.suggestion`); None without any.
        decades: standard deviation of the suggestions' decimal logarithms; None with fewer than 2.
        pairs: for some seeds, the largest relative difference of the curve from that of the real batch with
            the same weights and samples, up to its lowest point.
        curve: are the curves those of the baseline? None where it cannot be tested.
        suggested: are the suggestions those of the baseline, in decades? None likewise.
    """

    name: str
    sizes: tuple[int, ...]
    claim: SurveyClaim
    how: str
    runs: tuple[SeededSurvey, ...]
    rate: float | None
    decades: float | None
    pairs: tuple[float, ...]
    curve: CurveTest | None
    suggested: Equivalence | None

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
    """Results of `superbatch survey`.

    Attributes:
        recipe: its name.
        description: what was trained on what.
        what: the option that was surveyed.
        optimizer: its name.
        learning_rate: of the optimizer where another option is surveyed; None where the rate itself is.
        dtype: of weights and data.
        batch_size: samples of one update.
        low: first value of the ramp.
        high: last value of the ramp.
        updates: points of the ramp.
        repeats: surveys of each arm that were asked for.
        factor: margin of the test of the curves.
        margin: of the test of the suggestions, in decades.
        arms: the baseline first.
        seconds: wall time.
        partial: it was interrupted.
        versions: of what it ran on.
        command: what the user asked for.
        notes: what a reader should know beside the numbers.
    """

    recipe: str
    description: str
    what: What
    optimizer: str
    learning_rate: float | None
    dtype: str
    batch_size: int
    low: float
    high: float
    updates: int
    repeats: int
    factor: float
    margin: float
    arms: tuple[SurveyArm, ...]
    seconds: float
    partial: bool
    versions: dict[str, str]
    command: dict[str, str]
    notes: tuple[str, ...]

    @property
    def tolerance(self) -> float:
        """The largest relative difference of paired curves that rounding explains in this dtype."""
        return PAIRED_TOLERANCES[self.dtype]
