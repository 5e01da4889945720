"""Results of a comparison of splits: one frozen record per run, per arm, and of the whole."""

from __future__ import annotations

# pyright: strict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Claim = Literal["real", "exact", "inexact", "wrong"]
"""What an arm says of itself: the real batch; equal to it; not equal, and known to be; wrong on purpose."""

TOLERANCES: Mapping[str, float] = {"float64": 1e-12, "float32": 1e-3}
"""Largest relative difference of the weights that rounding can explain at the end of a run.

In float32 two runs that differ by rounding can fall on the two sides of a ReLU's kink and drift apart: 4e-5
has been seen after 1000 updates, where 2e-7 is usual. A single update differs by rounding alone.
"""

FEWEST_RUNS = 3
"""Runs per arm from which a test of equivalence gives a verdict."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One arm trained from one seed.

    Attributes:
        seed: of the initial weights and of the order of the samples.
        metric: on held-out data after the last update, in the comparison's unit.
        losses: training loss, the mean over each stretch of updates (`Comparison.curve_updates`).
        seconds: time spent in updates, without data and evaluation.
        weight_difference: ``|w - w_real| / |w_real|`` over all weights after the last update, 2-norms in
            float64, against the real batch with the same seed; None for the real batch itself.
        worst_difference: the same for the parameter where it is largest.
        worst_parameter: that parameter's name.
    """

    seed: int
    metric: float
    losses: tuple[float, ...]
    seconds: float
    weight_difference: float | None = None
    worst_difference: float | None = None
    worst_parameter: str | None = None


@dataclass(frozen=True, kw_only=True)
class Equivalence:
    """Two one-sided tests (TOST) of whether a difference of means lies within a margin.

    Attributes:
        test: ``"paired"``: of the differences between runs of the same seed. ``"welch"``: of two independent
            groups with their own variances.
        difference: of the means, against the real batch.
        low: lower end of the confidence interval of the difference.
        high: upper end.
        confidence: of the interval: 1 - 2 alpha, which makes it agree with the test.
        margin: differences inside (-margin, margin) do not matter.
        p_value: the larger of the two one-sided p-values.
        equivalent: ``p_value < alpha``, from at least `FEWEST_RUNS` runs.
        runs: per arm.
        runs_needed: per arm, for 80 % power if the true difference is zero; None if unknown.
        identical: no run differs from its pair at all.

    Examples:
        >>> Equivalence(test="paired", difference=0.1, low=0.0, high=0.2, confidence=0.9, margin=0.5,
        ...     p_value=0.001, equivalent=True, runs=10, runs_needed=3).equivalent
        True
    """

    test: Literal["paired", "welch"]
    difference: float
    low: float
    high: float
    confidence: float
    margin: float
    p_value: float
    equivalent: bool
    runs: int
    runs_needed: int | None
    identical: bool = False

    @property
    def verdict(self) -> str:
        """``"yes"``, ``"not shown"``, or that there are too few runs for a verdict."""
        if self.runs < FEWEST_RUNS:
            return f"no verdict ({self.runs} of {FEWEST_RUNS} runs)"
        return "yes" if self.equivalent else "not shown"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to make the update, trained from every seed.

    Attributes:
        name: the split, and the way where it is not the right one: ``"5x20"``, ``"80/15/5 mean of means"``.
        sizes: samples of each micro-batch of a full batch.
        claim: what the arm says of itself.
        how: how the update is made, in words.
        runs: those that were finished.
        mean: of the metric; None without runs.
        sd: standard deviation of the metric over runs (n - 1); None with fewer than 2.
        updates: per run.
        seconds: mean time of a run's updates.
        peak_bytes: peak of the memory that one update allocates; None if it was not measured.
        weight_difference: the largest of its runs'.
        median_difference: the median of its runs' `Run.weight_difference`.
        worst_difference: the largest of its runs'.
        paired: equivalence with the real batch, test of paired runs; None with fewer than 2 pairs.
        welch: the same as if the arms had had independent seeds, as published tables compare them.
    """

    name: str
    sizes: tuple[int, ...]
    claim: Claim
    how: str
    runs: tuple[Run, ...]
    mean: float | None
    sd: float | None
    updates: int
    seconds: float | None
    peak_bytes: int | None
    weight_difference: float | None
    median_difference: float | None
    worst_difference: float | None
    paired: Equivalence | None
    welch: Equivalence | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Results of `superbatch compare`.

    Attributes:
        recipe: its name.
        backend: what trained it: ``"torch"``, ``"jax"``, ...
        description: what was trained on what.
        statement: what the loss is, in words.
        metric: what was measured on held-out data.
        unit: of the metric.
        dtype: of the weights and the data.
        optimizer: its name.
        learning_rate: constant over the run.
        batch_size: samples of one update.
        updates: of each run.
        seeds: asked for; a partial report may have fewer runs.
        margin: of the equivalence tests, in `unit`.
        tail: samples of the short batch at the end of each epoch; None where epochs run into each other.
        arms: the real batch first.
        curve_updates: the last update of each stretch that `Run.losses` averages over.
        seconds: wall time of the whole comparison.
        partial: it was interrupted before the last run.
        versions: of what it ran on: name -> version.
        command: what the user asked for: name of a flag -> value.
        notes: what a reader should know beside the numbers.
    """

    recipe: str
    backend: str
    description: str
    statement: str
    metric: str
    unit: str
    dtype: str
    optimizer: str
    learning_rate: float
    batch_size: int
    updates: int
    seeds: tuple[int, ...]
    margin: float
    tail: int | None
    arms: tuple[Arm, ...]
    curve_updates: tuple[int, ...]
    seconds: float
    partial: bool
    versions: dict[str, str]
    command: dict[str, str]
    notes: tuple[str, ...]

    @property
    def trained(self) -> str:
        """The recipe, and what trained it where that is not torch."""
        return self.recipe if self.backend == "torch" else f"{self.recipe} on {self.backend}"

    @property
    def tolerance(self) -> float:
        """The largest relative difference of the weights that rounding can explain in this dtype."""
        return TOLERANCES[self.dtype]
