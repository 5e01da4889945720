"""Gain from accumulation: time to the same loss with K micro-batches per update, relative to one.

A larger batch needs more samples, ``1 + K b R / B_noise`` times the fewest possible. It also makes fewer
updates, so a micro-batch costs ``t_micro + t_update / K`` (`superbatch.noise.relative_time`). On one device
an update takes little time, so accumulation only costs samples (Marek et al. 2025,
https://arxiv.org/abs/2507.07101). It pays with slow links between ranks, or with a slow or offloaded
optimizer.
"""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..errors import InputError
from ..integers import positive_int
from ..noise.meter import relative_time
from ..results.advice import Advice, AdviceOfModel, Steps, Verdict, number_text
from ..results.memory import Limit
from ..results.noise import Noise, NoiseOfModel
from ..results.scaling import Scaling
from .noise_range import NoiseRange, noise_range, noise_range_of

HELPS, WASTEFUL = 0.95, 1.05
"""Bounds of W(K) / W(1) for a verdict; a difference within 5 % does not matter."""

SYSTEMATIC = 3.0
"""Factor by which a noise scale may be wrong as a model of training, in either direction. With Adam it
depends that much on the model of the preconditioner."""

EXCEPTIONS = (
    "you reproduce hyper-parameters that were published for the large batch",
    "updates are slow for reasons outside the measured times: offloaded state, Muon or Shampoo, slow links",
    "DP-SGD, which adds noise once per update",
    "a loss that is normalised over the whole batch: by its tokens, or contrastive over its negatives",
    "parameters in bfloat16 without float32 masters or stochastic rounding, where small updates vanish",
)

RIGHT, RUNS = 9, 12
"""Number of end-to-end runs whose measured time was within the range, and number of all such runs."""

UNCERTAINTY = (
    f"In {RIGHT} of {RUNS} end-to-end runs to the same loss, with accumulation and without, the measured "
    "time was within the range.",
    "The predicted waste of samples is a lower bound. In runs to the same loss it was right to about 25 % "
    "for batches up to the noise scale; larger batches wasted 1.5 to 2 times as much as predicted.",
    "The noise scale grows during training, so a smaller batch is enough at the start.",
)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of the parts of an update, in seconds.

    Attributes:
        microbatch: time of the forward and backward of one micro-batch.
        update: time of the optimizer and other work once per update.
        all_reduce: time to reduce the gradients over ranks, once per update.
        source: source of the times, in words.
    """

    microbatch: float
    update: float
    all_reduce: float = 0.0
    source: str = "given"

    @property
    def per_update(self) -> float:
        """Return the time of an update without its micro-batches."""
        return self.update + self.all_reduce


def best_steps(*, noise: float, batch: float, microbatch_seconds: float, update_seconds: float) -> float:
    """Return the accumulation steps with the shortest time to the same loss, the minimum of W(K).

    ``K* = sqrt(t_update / t_micro x B_noise / (b R))``

    Args:
        noise: the noise scale in samples; may be infinite.
        batch: samples of one micro-batch on all ranks together.
        microbatch_seconds: time of the forward and backward of one micro-batch.
        update_seconds: time of an update without its micro-batches.

    Returns:
        K*, not rounded; at 1 or below, accumulation does not pay.

    Examples:
        >>> best_steps(noise=1600, batch=64, microbatch_seconds=0.1, update_seconds=0.4)
        10.0
    """
    # The zero of dW/dK.
    share = update_seconds / microbatch_seconds
    return math.sqrt(share * noise / batch) if share else 0.0


def judge(low: float, high: float) -> Verdict:
    """Return the verdict for a range of W(K) / W(1), the time relative to no accumulation.

    Args:
        low: lower end of the range.
        high: upper end of the range.

    Examples:
        >>> judge(0.4, 0.9), judge(1.06, 2.0), judge(0.8, 1.2)
        ('helps', 'wasteful', 'undetermined')
    """
    if high < HELPS:
        return "helps"
    return "wasteful" if low > WASTEFUL else "undetermined"


def steps_at(k: int, batch: int, noise: NoiseRange, times: Times, models: Sequence[float | None]) -> Steps:
    """Predict the time to the same loss with K micro-batches per update, relative to one.

    Args:
        k: K, the number of micro-batches per update.
        batch: samples of one micro-batch, summed over the ranks.
        noise: the noise scale and its interval.
        times: seconds of the parts of an update.
        models: the noise scale under each model of Adam's preconditioner; None if it is not determined.

    Examples:
        >>> noise = NoiseRange(100.0, 50.0, 200.0)
        >>> round(steps_at(4, 10, noise, Times(microbatch=1.0, update=1.0), ()).time, 3)
        0.795
    """
    return Steps(
        accumulation_steps=k,
        batch=k * batch,
        time=None if noise.value is None else _time(k, batch, noise.value, times),
        # W(K) / W(1) falls as the noise scale grows, so its lower end is at the upper end of the noise scale.
        low=_time(k, batch, noise.high, times),
        high=_time(k, batch, noise.low, times),
        # With updates that take no time, the relative time is the relative number of samples.
        samples=None
        if noise.value is None
        else _time(k, batch, noise.value, Times(microbatch=1.0, update=0.0)),
        by_model=tuple(None if each is None else _time(k, batch, each, times) for each in models),
    )


def advise(
    *,
    microbatch_size: int,
    accumulation_steps: int,
    noise: Noise | NoiseRange | float | None,
    times: Times,
    ranks: int = 1,
    models: Sequence[NoiseOfModel] = (),
    noise_from: str = "given",
    alternative: Scaling | None = None,
    parameters: int | None = None,
    limit: Limit | None = None,
    peak: int | None = None,
    whole: int | None = None,
) -> Advice:
    """Compare training with and without accumulation, from given numbers.

    The values after `models` are only copied to the report.

    Args:
        microbatch_size: b, samples of a micro-batch on one rank.
        accumulation_steps: K, the number of micro-batches per update; at least 2.
        noise: the noise scale: a measurement, a range, a number of samples, or None if it is not known.
        times: times of the parts of an update.
        ranks: R, number of ranks that work in parallel.
        models: noise scales under models of Adam's preconditioner; if empty, those of the measurement.
        noise_from: source of the noise scale, in words.
        alternative: optimizer settings for training without accumulation.
        parameters: number of parameters of the model.
        limit: available memory.
        peak: predicted peak, in bytes, with one micro-batch at a time.
        whole: predicted peak, in bytes, with the rank's whole batch in one forward.

    Returns:
        The report, without the fields on a run (recipe, versions, ...).

    Raises:
        InputError: a number is out of range.

    Examples:
        >>> alone = advise(microbatch_size=32, accumulation_steps=16, noise=200.0,
        ...     times=Times(microbatch=0.1, update=0.002))
        >>> cluster = advise(microbatch_size=4, accumulation_steps=16, ranks=8,
        ...     noise=NoiseRange(4000.0, 3000.0, 6000.0),
        ...     times=Times(microbatch=0.1, update=0.05, all_reduce=1.0))
        >>> alone.verdict, cluster.verdict, round(cluster.best, 1)
        ('wasteful', 'helps', 36.2)
    """
    batch = positive_int("microbatch_size", microbatch_size) * positive_int("ranks", ranks)
    if positive_int("accumulation_steps", accumulation_steps) < 2:
        raise InputError("accumulation_steps=1 means no accumulation. Pass 2 or more.")
    _check_times(times)
    known = noise if isinstance(noise, NoiseRange) else noise_range(noise)
    models = tuple(models) or (noise.models if isinstance(noise, Noise) else ())
    scales = [noise_range_of(each) for each in models]
    wide = _widened(known, scales)
    rows = tuple(
        steps_at(k, batch, wide, times, [each.value for each in scales])
        for k in sorted({1, 2, 4, 8, 16, 32, 64, 128, accumulation_steps})
    )
    # Powers of 2 around the number in question show where the best number lies.
    asked = next(row for row in rows if row.accumulation_steps == accumulation_steps)
    verdict = judge(asked.low, asked.high)
    return Advice(
        verdict=verdict,
        reason=_reason(verdict, asked, batch, known, times),
        asked=accumulation_steps,
        steps=rows,
        best=None if known.value is None else _best(known.value, batch, times),
        best_low=_best(wide.low, batch, times),
        best_high=_best(wide.high, batch, times),
        microbatch_size=microbatch_size,
        ranks=ranks,
        noise=known.value,
        noise_low=known.low,
        noise_high=known.high,
        noise_from=noise_from,
        systematic=SYSTEMATIC,
        microbatch_seconds=times.microbatch,
        update_seconds=times.update,
        all_reduce_seconds=times.all_reduce,
        times_from=times.source,
        alternative=alternative,
        parameters=parameters,
        limit=limit,
        peak=peak,
        whole=whole,
        exceptions=EXCEPTIONS,
        uncertainty=UNCERTAINTY,
        models=tuple(map(partial(_of_model, batch=batch, times=times), models, scales)),
    )


def _best(noise: float, batch: int, times: Times) -> float:
    return best_steps(
        noise=noise, batch=batch, microbatch_seconds=times.microbatch, update_seconds=times.per_update
    )


def _of_model(model: NoiseOfModel, scale: NoiseRange, *, batch: int, times: Times) -> AdviceOfModel:
    best = None if scale.value is None else _best(scale.value, batch, times)
    return AdviceOfModel(power=model.power, noise=scale.value, low=scale.low, high=scale.high, best=best)


def _widened(known: NoiseRange, scales: Sequence[NoiseRange]) -> NoiseRange:
    """Return the interval widened by `SYSTEMATIC` on both sides, and further to include `scales`."""
    # A model whose signal is not distinguishable from noise has no value, so it does not widen the range.
    others = [each.value for each in scales if each.value is not None]
    return NoiseRange(
        known.value,
        min([known.low / SYSTEMATIC, *others]),
        max([known.high * SYSTEMATIC, *others]),
    )


def _time(k: int, batch: int, noise: float, times: Times) -> float:
    return relative_time(
        k,
        noise=noise,
        microbatch_size=batch,
        microbatch_seconds=times.microbatch,
        update_seconds=times.per_update,
    )


def _reason(verdict: Verdict, asked: Steps, batch: int, noise: NoiseRange, times: Times) -> str:
    k, share = asked.accumulation_steps, times.per_update / times.microbatch
    band = f"{asked.low:.2f} to {asked.high:.2f}"
    ratio = band if asked.time is None else f"{asked.time:.2f} ({band})"
    predicted = (
        f"Training to the same loss takes {ratio} times as long with {k} micro-batches per update as with "
        "one."
    )
    if verdict == "helps":
        per_update = f"An update takes {_times(share)} as long as a micro-batch"
        return f"{predicted} {per_update}, and {k} micro-batches share it."
    if verdict == "wasteful":
        # At an infinite noise scale no samples are wasted, so W(K) / W(1) would be at most 1.
        assert noise.high < math.inf
        return (
            f"{predicted} An update takes {_times(share)} as long as a micro-batch. Fewer updates save less "
            f"time than the additional samples of a batch of {asked.batch} cost, relative to a batch of "
            f"{batch}: the noise scale is {_samples(noise)}."
        )
    if noise.value is None:
        return f"{predicted} The noise scale is not determined: measure longer, or pass a number."
    if asked.high - asked.low < WASTEFUL - HELPS:
        return f"{predicted} The difference is too small to matter."
    return f"{predicted} The noise scale ({_samples(noise)}) is too uncertain for a verdict."


def _times(share: float) -> str:
    return f"{share:.1f} times" if share >= 1 else f"{share:.2g} times"


def _samples(noise: NoiseRange) -> str:
    value, low, high = (number_text(each) for each in (noise.value or 0.0, noise.low, noise.high))
    if noise.value is None:
        return f"at least {low}"
    return value if low == high else f"{value}, between {low} and {high}"


def _check_times(times: Times) -> None:
    for name, value, least in (
        ("microbatch", times.microbatch, "more than 0"),
        ("update", times.update, "0 or more"),
        ("all_reduce", times.all_reduce, "0 or more"),
    ):
        valid = value > 0 if least == "more than 0" else value >= 0
        if isinstance(value, bool) or not valid or not math.isfinite(value):
            raise InputError(f"{name}={value!r} is not a time in seconds. Pass {least}.")
