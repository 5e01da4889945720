"""Grow the batch instead of decaying the learning rate: a rate schedule becomes one of accumulation steps.

The noise of SGD has the temperature ``lr / B``. For batches drawn without replacement from N samples it is
exactly ``lr (1/B - 1/N)``; a momentum m multiplies it by ``1 / (1 - m)``. Multiplying the rate by a factor f
and the batch by ``1 / f`` therefore cool training equally, and the larger batch makes fewer updates. Adam has
the temperature ``lr / sqrt(B)`` while noise dominates its second moment, so its batch grows by ``1 / f^2``.

A batch consists of whole micro-batches and may be capped. The learning rate makes up for the difference, so
every update has exactly the temperature of the given schedule.

Source: Smith, Kindermans, Ying & Le 2018, https://arxiv.org/abs/1711.00489.
"""

from __future__ import annotations

# pyright: strict
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat, get_args

from ..errors import InputError
from ..integers import positive_int
from ..results.noise import Noise
from ..schedule import check_update
from ..window import Tail
from .noise_range import noise_range

Form = Literal["approximate", "exact"]
Temperature = Literal["sgd", "adam"]

ROUNDED = 1.34
"""Largest rate after rounding up, relative to the peak: rounding 1.5 micro-batches to 2 needs 4/3."""

SHARE_OF_DATA = 10
"""A batch has at most 1/10 of the data: for larger ones, ``lr / B`` is far from ``lr (1/B - 1/N)``."""


@dataclass(frozen=True)
class Cap:
    """The largest batch of a schedule.

    Attributes:
        samples: the cap; infinite without one.
        by: origin of the cap, in words.
    """

    samples: float
    by: str


class GrowingBatch:
    """A schedule of accumulation steps, with the learning rate of each update; created by `grow_batch`.

    Call it with the index of an update to get the accumulation steps, or pass it to `windows`. The result
    depends on the index alone, so it is the same on every rank and after a restart.

    Attributes:
        batch: samples of an update before the batch grows.
        microbatch: samples of a micro-batch, on all ranks together.
        cap: the largest batch, and the origin of this limit.
        momentum: the new momentum to train with; None for no change.
        temperature_of: optimizer whose temperature is kept, ``"sgd"`` or ``"adam"``.
        limits: conditions under which the schedule fails, one sentence each.
    """

    def __init__(
        self,
        factor: Callable[[float], float],
        *,
        batch: float,
        microbatch: int,
        dataset: int | None,
        form: Form,
        temperature: Temperature,
        cap: Cap,
        decay_from: float,
        momentum: float | None,
        tail: Tail,
        limits: tuple[str, ...],
    ) -> None:
        self.batch, self.microbatch, self.cap, self.temperature_of = batch, microbatch, cap, temperature
        self.momentum, self.limits = momentum, limits
        self._factor, self._dataset = factor, dataset
        # The temperature is rate x (1/B - offset) ** power.
        self._offset = 1 / dataset if form == "exact" and dataset else 0.0
        self._power = 1.0 if temperature == "sgd" else 0.5
        self._decay_from, self._tail = decay_from, tail
        self._peak = _factor_at(factor, decay_from)
        if not self._peak > 0:
            raise InputError(
                f"The rate schedule is {self._peak!r} at sample {decay_from:g}, where the decay begins. Pass "
                "a decay_from= at which the rate is positive."
            )
        # (update, samples seen before it, accumulation steps): one entry per change of the steps and per cut
        # window, so memory does not grow with the number of updates.
        self._changes: list[tuple[int, int, int]] = [(0, 0, self._steps_at(0))]
        self._extended_to = 0  # `_changes` is complete up to this update

    def __call__(self, update: int) -> int:
        """Return the accumulation steps of an update; the end of an epoch may cut its window shorter."""
        return self._stretch_of(check_update(update, "update"))[2]

    def samples(self, update: int) -> int:
        """Return the number of samples seen before an update."""
        first, samples, steps = self._stretch_of(check_update(update, "update"))
        return samples + (update - first) * steps * self.microbatch

    def batch_of(self, update: int) -> int:
        """Return the samples of an update: accumulation steps x micro-batch, or the rest of the epoch."""
        full = self(update) * self.microbatch
        return int(min(full, self._left_in_epoch(self.samples(update))))

    def rate(self, update: int) -> float:
        """Return the factor of the learning rate for an update, in the units of the given schedule."""
        return self._rate_with(self.batch_of(update), self.samples(update))

    def temperature(self, update: int) -> float:
        """Return the noise temperature of an update, relative to the first batch at the rate factor 1."""
        return self.rate(update) * self._noise_factor(self.batch_of(update)) / self._noise_factor(self.batch)

    def beta2(self, beta2: float, update: int) -> float:
        """Return Adam's beta2 for an update, with the same half-life in samples as at the first batch.

        Args:
            beta2: the value for the first batch.
            update: index of the update.
        """
        return float(beta2 ** (self.batch_of(update) / self.batch))

    def updates(self, samples: float) -> int:
        """Return the number of updates that see `samples` samples; the last update may see more."""
        update = 0
        while self.samples(update) < samples:
            first, seen, steps = self._stretch_of(update)
            # Jump to the next change of the steps, or to the last update, whichever comes first.
            needed = math.ceil((samples - seen) / (steps * self.microbatch))
            update = min(first + needed, max(update + 1, self._next_change(update)))
        return update

    def _noise_factor(self, batch: float) -> float:
        """Temperature of a batch at the learning rate 1, up to a constant."""
        return (1 / batch - self._offset) ** self._power

    def _target_batch(self, samples: float) -> float:
        """Return the batch that keeps the temperature at the peak rate; infinite if no batch is that cold."""
        if samples < self._decay_from:
            return self.batch
        relative = _factor_at(self._factor, samples) / self._peak
        inverse = (self._noise_factor(self.batch) * relative) ** (1 / self._power) + self._offset
        return math.inf if inverse <= 0 else 1 / inverse

    def _steps_at(self, samples: float) -> int:
        target = self._target_batch(samples)
        # A cap below the first batch stops the growth; it does not shrink the first batch.
        cap = max(self.cap.samples, self.batch)
        if math.isinf(min(target, cap)):
            raise InputError(
                f"The rate is 0 at sample {samples:g}, so the batch would be infinite. Limit it with "
                "largest=, dataset= or a noise scale with an upper end."
            )
        steps = max(1, round(min(target, cap) / self.microbatch))
        # Rounding up could exceed the cap. Near the whole data set, it could also need a rate far above the
        # peak.
        while steps > 1 and (
            steps * self.microbatch > cap
            or self._rate_with(steps * self.microbatch, samples) > ROUNDED * self._peak
        ):
            steps -= 1
        return steps

    def _rate_with(self, batch: int, samples: int | float) -> float:
        """Return the rate at which a batch has the temperature of the schedule after `samples` samples."""
        factor = _factor_at(self._factor, samples)
        return factor * self._noise_factor(self.batch) / self._noise_factor(batch)

    def _left_in_epoch(self, samples: int) -> int | float:
        """Return the remaining samples of the epoch; infinite if the end of an epoch cuts no window."""
        if self._dataset is None or self._tail == "drop":
            return math.inf
        return self._dataset - samples % self._dataset

    def _stretch_of(self, update: int) -> tuple[int, int, int]:
        """Return the entry of `_changes` that covers an update."""
        while self._extended_to < update:
            self._extend()
        return self._changes[bisect_right(self._changes, (update, math.inf, 0)) - 1]

    def _next_change(self, update: int) -> int:
        self._stretch_of(update + 1)
        index = bisect_right(self._changes, (update, math.inf, 0))
        return self._changes[index][0] if index < len(self._changes) else update + 1

    def _extend(self) -> None:
        """Extend `_changes` by one update."""
        first, samples, steps = self._changes[-1]
        before = samples + (self._extended_to - first) * steps * self.microbatch
        full = steps * self.microbatch
        batch = int(min(full, self._left_in_epoch(before)))
        self._extended_to += 1
        next_steps = self._steps_at(before + batch)
        if next_steps != steps or batch < full:
            self._changes.append((self._extended_to, before + batch, next_steps))


def grow_batch(
    factor: Callable[[float], float],
    *,
    batch: int,
    microbatch: int,
    dataset: int | None = None,
    form: Form = "approximate",
    temperature: Temperature = "sgd",
    largest: int | None = None,
    noise: Noise | float | None = None,
    decay_from: float = 0.0,
    momentum: tuple[float, float] | None = None,
    tail: Tail = "update",
) -> GrowingBatch:
    """Turn a learning-rate schedule into accumulation steps and the factor of the rate for each update.

    The accumulation steps are ``K(t) = max(1, round(B(t) / microbatch))`` with ``B(t) = batch / f(t)``, and
    the rate is ``f(t) K(t) microbatch / batch``. With ``form="exact"``, ``B(t) = N / (1 + (N / batch - 1)
    f(t))``, and ``1/B - 1/N`` replaces ``1/B`` in the rate. Only windows grow; micro-batches and memory do
    not.

    Args:
        factor: f, the factor of the rate as a function of the samples seen; 0 or more.
        batch: samples of one update for which the rate is tuned, on all ranks together.
        microbatch: samples of one micro-batch, on all ranks together (ranks times the loader's batch).
        dataset: N, samples of an epoch. With the approximate form it caps the batch at N / 10. It is also
            used to find the shorter batch at the end of an epoch.
        form: formula of the temperature. ``"exact"`` needs `dataset`, and keeps the batch below it.
        temperature: ``"sgd"`` for lr / B; ``"adam"`` for lr / sqrt(B), with which the batch grows by
            1 / f^2.
        largest: the largest batch; None for no such limit.
        noise: the noise scale. Its upper end, if finite, caps the batch: larger batches are nearly free of
            noise already.
        decay_from: the sample after which the batch grows. Before it (in a warm-up) the rate follows f.
        momentum: (old, new) momentum; None for no change. A larger momentum raises the temperature, so the
            batch is larger from the start, by ``(1 - old) / (1 - new)``.
        tail: the `tail` of `windows`, for an epoch that ends inside a window.

    Returns:
        The schedule. Pass it to `windows`, and its `rate` to the optimizer; `torch.tuning.GrowBatch` does
        both.

    Raises:
        InputError: a value is out of range, or ``form="exact"`` without a large enough `dataset`.

    Examples:
        >>> halves = lambda samples: 0.5 ** (samples // 6400)  # the rate is halved every 6400 samples
        >>> schedule = grow_batch(halves, batch=64, microbatch=32)
        >>> [schedule(update) for update in (0, 99, 100, 150, 175)]
        [2, 2, 4, 8, 16]
        >>> {schedule.rate(update) for update in range(200)}
        {1.0}
    """
    _check_options(batch, microbatch, dataset, largest, form, temperature, tail, decay_from)
    start = batch * _momentum_factor(momentum)
    if form == "exact" and (dataset is None or start >= dataset):
        raise InputError(
            f'form="exact" needs a dataset= larger than the first batch of {start:g} samples, not '
            f"{dataset!r}. Pass dataset=len(data)."
        )
    limits = [
        "A larger batch lowers noise only: it cannot replace a rate that decays for another reason, such as "
        "growing curvature of the loss."
    ]
    if momentum is not None and dataset is not None:
        # The momentum buffer averages over 1 / (1 - m) batches.
        memory = start / (dataset * (1 - momentum[1]))
        limits.append(
            f"Momentum {momentum[1]:g} averages over {memory:.2g} epochs at the first batch. Keep this far "
            "below 1 as the batch grows."
        )
    return GrowingBatch(
        factor,
        batch=start,
        microbatch=microbatch,
        dataset=dataset,
        form=form,
        temperature=temperature,
        cap=_cap(form, dataset, largest, noise),
        decay_from=decay_from,
        momentum=None if momentum is None else momentum[1],
        tail=tail,
        limits=tuple(limits),
    )


def grown_batches(
    indices: Iterable[Any], schedule: GrowingBatch, *, first_update: int = 0
) -> Iterator[list[Any]]:
    """Group sample indices into growing batches, for a loader that yields the batch of a whole update.

    Args:
        indices: sample indices of an epoch, such as a torch sampler.
        schedule: schedule from `grow_batch`.
        first_update: index of the first update: `Accumulator.updates` in a later epoch.

    Yields:
        The indices of each update; the last batch may be shorter.

    Examples:
        >>> schedule = grow_batch(lambda seen: 1 / (1 + seen // 4), batch=2, microbatch=1)
        >>> list(grown_batches(range(12), schedule))
        [[0, 1], [2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    """
    update, batch = check_update(first_update, "first_update"), list[Any]()
    size = schedule(update) * schedule.microbatch
    for index in indices:
        batch.append(index)
        if len(batch) == size:
            yield batch
            update, batch = update + 1, []
            size = schedule(update) * schedule.microbatch
    if batch:
        yield batch


def _check_options(
    batch: int,
    microbatch: int,
    dataset: int | None,
    largest: int | None,
    form: Form,
    temperature: Temperature,
    tail: Tail,
    decay_from: float,
) -> None:
    positive_int("batch", batch)
    positive_int("microbatch", microbatch)
    for name, number in (("dataset", dataset), ("largest", largest)):
        if number is not None:
            positive_int(name, number)
    for name, value, allowed in (
        ("form", form, Form),
        ("temperature", temperature, Temperature),
        ("tail", tail, Tail),
    ):
        if value not in get_args(allowed):
            raise InputError(f"{name}={value!r} is unknown. Pass one of {get_args(allowed)}.")
    if microbatch > batch:
        raise InputError(
            f"batch={batch} is smaller than microbatch={microbatch}. Pass the batch of a whole update, or a "
            "smaller microbatch."
        )
    if not decay_from >= 0:
        raise InputError(f"decay_from={decay_from!r} is not a number of samples. Pass 0 or more.")


def _cap(form: Form, dataset: int | None, largest: int | None, noise: Noise | float | None) -> Cap:
    caps = [Cap(math.inf, "nothing")]
    if dataset is not None:
        if form == "exact":
            # At the whole data set the noise is 0, and no finite rate would restore it.
            caps.append(Cap(dataset - 1, "the data"))
        else:
            caps.append(Cap(dataset / SHARE_OF_DATA, f"a tenth of the {dataset} samples"))
    if largest is not None:
        caps.append(Cap(largest, "largest"))
    # A batch above the noise scale is mostly signal, so a larger one would cool nothing.
    if noise is not None:
        caps.append(Cap(noise_range(noise).high, "the upper end of the noise scale"))
    return min(caps, key=lambda cap: cap.samples)


def _momentum_factor(momentum: tuple[float, float] | None) -> float:
    """Return the factor by which a change of momentum multiplies the temperature."""
    if momentum is None:
        return 1.0
    for value in momentum:
        if not 0 <= value < 1:
            raise InputError(
                f"momentum={momentum!r} is not a pair of numbers from 0 to below 1. Pass (old, new)."
            )
    old, new = momentum
    return (1 - old) / (1 - new)


def _factor_at(factor: Callable[[float], float], samples: float) -> float:
    """Return the factor of the rate after `samples` samples; raise InputError if it is not a valid number."""
    if not callable(factor):
        raise InputError(
            f"factor={factor!r} is not callable. Pass a function of the samples seen that returns a number."
        )
    result = factor(samples)
    if not isinstance(result, SupportsFloat):  # pyright: ignore[reportUnnecessaryIsInstance]  (of any caller)
        raise InputError(
            f"The rate schedule returns {result!r} at sample {samples:g}. Pass a function of the samples "
            "seen that returns a number."
        )
    value = float(result)
    if not (value >= -1e-9 and math.isfinite(value)):  # a cosine may end a rounding error below 0
        raise InputError(
            f"The rate schedule returns {value!r} at sample {samples:g}. Return a finite number, 0 or more."
        )
    return max(0.0, value)
