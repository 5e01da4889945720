"""Results of `superbatch compare`, in frozen dataclasses: each run, each arm, and the comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .run import RunReport

# Claim of an arm: it is the real batch, equal to it, known to differ from it, or wrong on purpose.
Claim = Literal["real", "exact", "inexact", "wrong"]

# Largest relative difference of the weights that rounding can explain at the end of a run. In float32 two
# runs that differ by rounding can reach different sides of a ReLU's kink and drift apart: 4e-5 occurred
# after 1000 updates, where 2e-7 is usual.
TOLERANCES: Mapping[str, float] = {"float64": 1e-12, "float32": 1e-3}

FEWEST_RUNS = 3  # least number of runs per arm for a verdict of a test of equivalence


@dataclass(frozen=True, kw_only=True)
class Run:
    """Training of one arm from one seed."""

    seed: int  # of the initial weights and of the order of the samples
    metric: float  # on held-out data after the last update, in the comparison's unit
    losses: tuple[float, ...]  # training losses, one mean for each stretch of `Comparison.curve_updates`
    seconds: float  # time of the updates, without data and evaluation
    # ``|w - w_real| / |w_real|`` over all weights after the last update, 2-norms in float64, against the
    # real batch with the same seed; None for the real batch itself.
    weight_difference: float | None = None
    worst_difference: float | None = None  # the same for the parameter with the largest difference
    worst_parameter: str | None = None  # name of that parameter


@dataclass(frozen=True, kw_only=True)
class Equivalence:
    """Result of two one-sided tests (TOST) that a difference of means lies within a margin.

    Examples:
        >>> Equivalence(test="paired", difference=0.1, low=0.0, high=0.2, confidence=0.9, margin=0.5,
        ...     p_value=0.001, equivalent=True, runs=10, runs_needed=3).equivalent
        True
    """

    # ``"paired"``: on the differences between runs of the same seed. ``"welch"``: on two independent groups
    # with their own variances.
    test: Literal["paired", "welch"]
    difference: float  # mean of the arm minus mean of the real batch
    low: float  # lower end of the confidence interval of the difference
    high: float  # upper end
    confidence: float  # of the interval: 1 - 2 alpha, so that the interval agrees with the test
    margin: float  # a difference between -margin and margin does not matter
    p_value: float  # the larger of the two one-sided p-values
    equivalent: bool  # ``p_value < alpha``, from at least `FEWEST_RUNS` runs
    runs: int  # per arm
    runs_needed: int | None  # per arm, for 80 % power if the true difference is zero; None if unknown
    identical: bool = False  # True if each run equals its pair

    @property
    def verdict(self) -> str:
        """Return ``"yes"``, ``"not shown"``, or that there are too few runs for a verdict."""
        if self.runs < FEWEST_RUNS:
            return f"no verdict ({self.runs} runs, {FEWEST_RUNS} needed)"
        return "yes" if self.equivalent else "not shown"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to make the update, with its trainings from all seeds."""

    name: str  # the split, and the method unless it is superbatch's: ``"5x20"``, ``"80/15/5 mean of means"``
    sizes: tuple[int, ...]  # samples of each micro-batch of a full batch
    claim: Claim
    how: str  # how the update is made, in words
    runs: tuple[Run, ...]  # finished runs
    mean: float | None  # of the metric; None without runs
    sd: float | None  # standard deviation of the metric over runs (n - 1); None with fewer than 2
    updates: int  # per run
    seconds: float | None  # mean time of a run's updates
    peak_bytes: int | None  # peak of the memory that one update allocates; None if it was not measured
    weight_difference: float | None  # largest `Run.weight_difference`
    median_difference: float | None  # median `Run.weight_difference`
    worst_difference: float | None  # largest `Run.worst_difference`
    paired: Equivalence | None  # to the real batch, on pairs of runs; None with fewer than 2 pairs
    welch: Equivalence | None  # the same as if the seeds were independent, as in published tables


@dataclass(frozen=True, kw_only=True)
class Comparison(RunReport):
    """Results of `superbatch compare`."""

    backend: str  # framework of the training, such as ``"torch"`` or ``"jax"``
    statement: str  # the loss in words
    metric: str  # name of the metric on held-out data
    unit: str  # of the metric
    dtype: str  # of the weights and the data
    optimizer: str
    learning_rate: float  # constant over the run
    batch_size: int  # samples of one update
    updates: int  # of each run
    seeds: tuple[int, ...]  # all requested seeds; a partial report may have fewer runs
    margin: float  # of the equivalence tests, in `unit`
    tail: int | None  # samples of the short batch at the end of each epoch; None without such a batch
    arms: tuple[Arm, ...]  # the real batch first
    curve_updates: tuple[int, ...]  # the last update of each stretch that `Run.losses` averages over

    @property
    def trained(self) -> str:
        """Return the recipe, and the backend unless it is torch."""
        return self.recipe if self.backend == "torch" else f"{self.recipe} on {self.backend}"

    @property
    def tolerance(self) -> float:
        """Return the largest relative difference of the weights that rounding can explain in this dtype."""
        return TOLERANCES[self.dtype]
