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
"""Of a float32 sum of gradients, for each parameter."""


def number_text(value: float) -> str:
    """A number of samples to three digits, without an exponent where there is room.

    Args:
        value: not negative.

    Returns:
        Text.

    Examples:
        >>> number_text(4381.2), number_text(12.345), number_text(float("inf"))
        ('4380', '12.3', 'infinity')
    """
    if math.isinf(value):
        return "infinity"
    return f"{float(f'{value:.3g}'):.0f}" if 1000 <= value < 1e7 else f"{value:.3g}"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """One number of accumulation steps.

    All times are to the same loss, relative to no accumulation.

    Attributes:
        accumulation_steps: K.
        batch: samples of an update, on all ranks.
        time: W(K) / W(1) at the noise scale's estimate; None where there is none.
        low: the same with the noise scale at the upper end of its range (see `Advice`).
        high: and at the lower end.
        samples: samples needed, relative to K = 1, at the estimate; None where there is none.
        by_model: the time under each of `Advice.models`, in their order; None where that has no noise scale.
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
        """The shortest and the longest time under the models; None where fewer than two have one."""
        known = [time for time in self.by_model if time is not None]
        return (min(known), max(known)) if len(known) > 1 else None


@dataclass(frozen=True, kw_only=True)
class AdviceOfModel:
    """The noise scale under one model of Adam's preconditioner, and what it would mean.

    Attributes:
        power: q; see `superbatch.results.noise.NoiseOfModel`.
        noise: in samples; None: not determined.
        low: lower end of its interval.
        high: upper end; infinite where it is unbounded.
        best: K*; None without a noise scale.
    """

    power: int
    noise: float | None
    low: float
    high: float
    best: float | None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Gain or loss from accumulation, by time to the same loss.

    The range of the verdict is that of the noise scale's interval, widened by `systematic` on both sides: a
    noise scale is a model of training, and no better than that. It is wider where the noise scale under
    another model of Adam's preconditioner (`models`) lies beyond.

    Attributes:
        verdict: ``"helps"`` where the whole range of W(K) / W(1) is below 0.95, ``"wasteful"`` where it is
            above 1.05, else ``"undetermined"``.
        reason: in a sentence or two.
        asked: the accumulation steps in question.
        steps: those in question, and others around them.
        best: K*, the best accumulation steps at the estimate, not rounded; at 1 or below none pay. None
            without an estimate.
        best_low: K* at the lower end of the range.
        best_high: K* at the upper end; infinite where there is none.
        microbatch_size: samples of a micro-batch on one rank.
        ranks: that work at the same time.
        noise: the noise scale in samples; None: not determined.
        noise_low: lower end of its interval.
        noise_high: upper end; infinite where it is unbounded.
        noise_from: where it is from, in words.
        systematic: by which factor the range is wider than the interval, on both sides.
        microbatch_seconds: forward and backward of one micro-batch.
        update_seconds: of the optimizer and what else an update needs, without the next.
        all_reduce_seconds: of the exchange of gradients, once per update.
        times_from: where the times are from, in words.
        alternative: the settings without accumulation; None where none were given.
        parameters: of the model; None: not known.
        limit: memory that there is; None: not known.
        peak: bytes of one micro-batch and the update, predicted; None: not known.
        whole: the same of the batch in question in one piece on its rank.
        exceptions: where the verdict does not apply.
        uncertainty: how sure all this is; first how often the range was right.
        recipe: its name; None: numbers were given.
        seconds: wall time of all this.
        partial: it was interrupted before the end.
        versions: of what it ran on: name -> version.
        command: what was asked for: name of a flag -> value.
        notes: what a reader should know beside the numbers.
        models: the noise scale under models of Adam's preconditioner, the one that is used first; none unless
            it was measured with Adam.
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
        """The smallest and the largest noise scale under `models`; None where fewer than two have one."""
        known = [each.noise for each in self.models if each.noise is not None]
        return (min(known), max(known)) if len(known) > 1 else None

    @property
    def of_asked(self) -> Steps:
        """The entry of the accumulation steps in question."""
        return next(each for each in self.steps if each.accumulation_steps == self.asked)

    @property
    def accumulator_bytes(self) -> int | None:
        """Bytes of a float32 sum of gradients; None where the number of parameters is not known."""
        return None if self.parameters is None else ACCUMULATOR_BYTES * self.parameters
