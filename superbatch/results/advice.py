"""Results of `superbatch advise`: the gain from accumulation, its certainty, and the alternatives."""

from __future__ import annotations

# pyright: strict
import math
from dataclasses import dataclass, field
from typing import Literal

from .memory import Limit
from .scaling import Scaling

Verdict = Literal["helps", "wasteful", "undetermined"]

ACCUMULATOR_BYTES = 4
"""Bytes of a float32 sum of gradients for each parameter."""


def number_text(value: float) -> str:
    """Return a number of samples with three digits, below 10 million without an exponent.

    Args:
        value: the number, not negative.

    Returns:
        Text.

    Examples:
        >>> number_text(4381.2), number_text(12.345), number_text(float("inf"))
        ('4380', '12.3', 'infinity')
    """
    if math.isinf(value):
        return "infinity"
    # .3g alone would write 4380 as 4.38e+03.
    return f"{float(f'{value:.3g}'):.0f}" if 1000 <= value < 1e7 else f"{value:.3g}"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Predicted time to the same loss for one number of accumulation steps, relative to no accumulation.

    Attributes:
        accumulation_steps: K.
        batch: samples of an update, on all ranks.
        time: W(K) / W(1) at the estimate of the noise scale; None without an estimate.
        low: W(K) / W(1) at the upper end of the noise scale's range (see `Advice`).
        high: W(K) / W(1) at the lower end of the range.
        samples: samples needed, relative to K = 1, at the estimate; None without an estimate.
        by_model: the time under each of `Advice.models`, in the same order; None for a model without a noise
            scale.
    """

    accumulation_steps: int
    batch: int
    time: float | None
    low: float
    high: float
    samples: float | None
    by_model: tuple[float | None, ...] = ()

    @property
    def band(self) -> tuple[float, float] | None:
        """Return the shortest and the longest time under the models; None if fewer than two have a time."""
        times = [time for time in self.by_model if time is not None]
        return (min(times), max(times)) if len(times) > 1 else None


@dataclass(frozen=True, kw_only=True)
class AdviceOfModel:
    """The noise scale under one model of Adam's preconditioner, and the best number of accumulation steps.

    Attributes:
        power: q; see `superbatch.results.noise.NoiseOfModel`.
        noise: the noise scale in samples; None if it is not determined.
        low: lower end of its interval.
        high: upper end of its interval; infinite if it is unbounded.
        best: K*, the best accumulation steps; None without a noise scale.
    """

    power: int
    noise: float | None
    low: float
    high: float
    best: float | None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Gain or loss from accumulation, by time to the same loss.

    The verdict holds for a range of noise scales: the measured interval, widened by the factor `systematic`
    on both sides, as the formula is only a model of training. The range also includes the noise scales under
    other models of Adam's preconditioner (`models`).

    Attributes:
        verdict: ``"helps"`` if the whole range of W(K) / W(1) is below 0.95, ``"wasteful"`` if it is above
            1.05, else ``"undetermined"``.
        reason: the reason for the verdict, in one or two sentences.
        asked: the accumulation steps in question.
        steps: predictions for these and for other numbers around them.
        best: K*, the best accumulation steps at the estimate, not rounded; at 1 or below, accumulation does
            not pay. None without an estimate.
        best_low: K* at the lower end of the range.
        best_high: K* at the upper end of the range; infinite if there is no upper end.
        microbatch_size: samples of a micro-batch on one rank.
        ranks: number of ranks that work in parallel.
        noise: the noise scale in samples; None if it is not determined.
        noise_low: lower end of its interval.
        noise_high: upper end of its interval; infinite if it is unbounded.
        noise_from: source of the noise scale, in words.
        systematic: factor by which the range is wider than the interval, on both sides.
        microbatch_seconds: time of the forward and backward of one micro-batch.
        update_seconds: time of the optimizer and other work of an update, without `all_reduce_seconds`.
        all_reduce_seconds: time to reduce the gradients over the ranks, once per update.
        times_from: source of the times, in words.
        alternative: optimizer settings for training without accumulation; None if no settings were given.
        parameters: number of parameters of the model; None if not known.
        limit: available memory; None if not known.
        peak: predicted peak, in bytes, with one micro-batch at a time; None if not known.
        whole: predicted peak, in bytes, with the rank's whole batch in one forward; None if not known.
        exceptions: cases in which the verdict does not apply.
        uncertainty: sources of uncertainty; the first says how often the range was right.
        recipe: name of the recipe; None if numbers were given.
        seconds: wall time of the study.
        partial: True if the study was interrupted.
        versions: versions of the software by name.
        command: arguments of the command by name.
        notes: remarks on the numbers.
        models: the noise scale under models of Adam's preconditioner; the first is the one in `noise`. Empty
            unless it was measured with Adam.
    """

    verdict: Verdict
    reason: str
    asked: int
    steps: tuple[Steps, ...]
    best: float | None
    best_low: float
    best_high: float
    microbatch_size: int
    ranks: int
    noise: float | None
    noise_low: float
    noise_high: float
    noise_from: str
    systematic: float
    microbatch_seconds: float
    update_seconds: float
    all_reduce_seconds: float
    times_from: str
    alternative: Scaling | None
    parameters: int | None
    limit: Limit | None
    peak: int | None
    whole: int | None
    exceptions: tuple[str, ...]
    uncertainty: tuple[str, ...]
    recipe: str | None = None
    seconds: float = 0.0
    partial: bool = False
    versions: dict[str, str] = field(default_factory=dict[str, str])
    command: dict[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()
    models: tuple[AdviceOfModel, ...] = ()

    @property
    def band(self) -> tuple[float, float] | None:
        """Return the smallest and the largest noise scale under `models`; None if fewer than two have one."""
        scales = [each.noise for each in self.models if each.noise is not None]
        return (min(scales), max(scales)) if len(scales) > 1 else None

    @property
    def of_asked(self) -> Steps:
        """Return the entry of `steps` for the accumulation steps in question."""
        return next(each for each in self.steps if each.accumulation_steps == self.asked)

    @property
    def accumulator_bytes(self) -> int | None:
        """Return the bytes of a float32 sum of gradients; None if the number of parameters is not known."""
        return None if self.parameters is None else ACCUMULATOR_BYTES * self.parameters
