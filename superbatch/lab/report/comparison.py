"""Results of a comparison of splits: one frozen record per run, per arm, and of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# What an arm says of itself: the real batch; equal to it; not equal, and known to be; wrong on purpose.
Claim = Literal["real", "exact", "inexact", "wrong"]

# Largest relative difference of the weights that rounding can explain at the end of a run. In float32 two
# runs that differ by rounding can fall on the two sides of a ReLU's kink and drift apart: 4e-5 has been
# seen after 1000 updates, where 2e-7 is usual. A single update differs by rounding alone.
TOLERANCES: Mapping[str, float] = {"float64": 1e-12, "float32": 1e-3}

FEWEST_RUNS = 3  # runs per arm from which a test of equivalence gives a verdict


@dataclass(frozen=True, kw_only=True)
class Run:
    """One arm trained from one seed."""

    seed: int  # of the initial weights and of the order of the samples
    metric: float  # on held-out data after the last update, in the comparison's unit
    losses: tuple[float, ...]  # in training, means over each stretch of `Comparison.curve_updates`
    seconds: float  # time spent in updates, without data and evaluation
    # ``|w - w_real| / |w_real|`` over all weights after the last update, 2-norms in float64, against the
    # real batch with the same seed; None for the real batch itself.
    weight_difference: float | None = None
    worst_difference: float | None = None  # the same for the parameter where it is largest
    worst_parameter: str | None = None


@dataclass(frozen=True, kw_only=True)
class Equivalence:
    """Two one-sided tests (TOST) of whether a difference of means lies within a margin.

    Examples:
        >>> Equivalence(test="paired", difference=0.1, low=0.0, high=0.2, confidence=0.9, margin=0.5,
        ...     p_value=0.001, equivalent=True, runs=10, runs_needed=3).equivalent
        True
    """

    # ``"paired"``: of the differences between runs of the same seed. ``"welch"``: of two independent groups
    # with their own variances.
    test: Literal["paired", "welch"]
    difference: float  # of the means, against the real batch
    low: float  # lower end of the confidence interval of the difference
    high: float  # upper end
    confidence: float  # of the interval: 1 - 2 alpha, which makes it agree with the test
    margin: float  # differences inside (-margin, margin) do not matter
    p_value: float  # the larger of the two one-sided p-values
    equivalent: bool  # ``p_value < alpha``, from at least `FEWEST_RUNS` runs
    runs: int  # per arm
    runs_needed: int | None  # per arm, for 80 % power if the true difference is zero; None if unknown
    identical: bool = False  # no run differs from its pair at all

    @property
    def verdict(self) -> str:
        """``"yes"``, ``"not shown"``, or that there are too few runs for a verdict."""
        if self.runs < FEWEST_RUNS:
            return f"no verdict ({self.runs} of {FEWEST_RUNS} runs)"
        return "yes" if self.equivalent else "not shown"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to make the update, trained from every seed."""

    name: str  # the split, and the way where it is not the right one: ``"5x20"``, ``"80/15/5 mean of means"``
    sizes: tuple[int, ...]  # samples of each micro-batch of a full batch
    claim: Claim  # what the arm says of itself
    how: str  # how the update is made, in words
    runs: tuple[Run, ...]  # those that were finished
    mean: float | None  # of the metric; None without runs
    sd: float | None  # standard deviation of the metric over runs (n - 1); None with fewer than 2
    updates: int  # per run
    seconds: float | None  # mean time of a run's updates
    peak_bytes: int | None  # peak of the memory that one update allocates; None if it was not measured
    weight_difference: float | None  # the largest of its runs'
    median_difference: float | None  # the median of its runs' `Run.weight_difference`
    worst_difference: float | None  # the largest of its runs'
    paired: Equivalence | None  # with the real batch, by pairs of runs; None with fewer than 2 pairs
    welch: Equivalence | None  # as if the arms had had independent seeds, as published tables compare them


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Results of `superbatch compare`."""

    recipe: str
    backend: str  # what trained it: ``"torch"``, ``"jax"``
    description: str  # what was trained on what
    statement: str  # what the loss is, in words
    metric: str  # what was measured on held-out data
    unit: str  # of the metric
    dtype: str  # of the weights and the data
    optimizer: str
    learning_rate: float  # constant over the run
    batch_size: int  # samples of one update
    updates: int  # of each run
    seeds: tuple[int, ...]  # asked for; a partial report may have fewer runs
    margin: float  # of the equivalence tests, in `unit`
    tail: int | None  # samples of the short batch that ends each epoch; None: epochs run into each other
    arms: tuple[Arm, ...]  # the real batch first
    curve_updates: tuple[int, ...]  # the last update of each stretch that `Run.losses` averages over
    seconds: float  # wall time of the whole comparison
    partial: bool  # it was interrupted before the last run
    versions: dict[str, str]  # of what it ran on: name -> version
    command: dict[str, str]  # what the user asked for: name of a flag -> value
    notes: tuple[str, ...]  # what a reader should know beside the numbers

    @property
    def trained(self) -> str:
        """The recipe, and what trained it where that is not torch."""
        return self.recipe if self.backend == "torch" else f"{self.recipe} on {self.backend}"

    @property
    def tolerance(self) -> float:
        """The largest relative difference of the weights that rounding can explain in this dtype."""
        return TOLERANCES[self.dtype]
