"""Grow the batch instead of decaying the rate: a rate schedule becomes a schedule of accumulation steps.

The noise of SGD has the temperature ``lr / B`` (exactly, for batches drawn without replacement from N
samples, ``lr (1/B - 1/N)``; with momentum ``1 / (1 - m)`` of it), so that a rate that decays by f and a
batch that grows by 1/f cool alike, and the second makes fewer updates. Adam in the noise has ``lr /
sqrt(B)``: there the batch grows by ``1 / f^2``. What rounding to whole micro-batches and a cap leave over is
put into the rate, so that the temperature is exactly the one that was asked for, in every update.

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
"""Rounding 1.5 micro-batches to 2 raises the rate by a third; nothing may raise it more."""

SHARE_OF_DATA = 10
"""A batch is at most the data's size over this: beyond, ``lr (1/B - 1/N)`` is no longer about ``lr / B``."""


@dataclass(frozen=True)
class Cap:
    """The largest batch that is made.

    Attributes:
        samples: the cap; infinite where there is none.
        by: who sets it, in words.
    """

    samples: float
    by: str


class GrowingBatch:
    """A schedule of accumulation steps, with the rate that belongs to each; made by `grow_batch`.

    A pure function of the update's index: the same on every rank and after a restart. Call it with an index
    for the accumulation steps; pass it to `windows`.

    Attributes:
        batch: samples of an update before the batch grows.
        microbatch: samples of a micro-batch, on all ranks together.
        cap: the largest batch, and why.
        momentum: to train with; None: as it is.
        temperature_of: whose temperature is kept, ``"sgd"`` or ``"adam"``.
        limits: where this stops holding.
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
        self._offset = 1 / dataset if form == "exact" and dataset else 0.0
        self._power = 1.0 if temperature == "sgd" else 0.5
        self._decay_from, self._tail = decay_from, tail
        self._peak = _checked(factor, decay_from)
        if not self._peak > 0:
            raise InputError(
                f"The rate schedule is {self._peak!r} at sample {decay_from:g}, where the decay begins. Give "
                "decay_from, the sample from which a positive rate decays."
            )
        # (update, samples seen before it, accumulation steps), wherever the steps change or an epoch begins.
        self._marks: list[tuple[int, int, int]] = [(0, 0, self._steps_at(0))]
        self._known = 0  # the update up to which marks are complete

    def __call__(self, update: int) -> int:
        """Return the accumulation steps of an update (of its window, if the data do not end in it)."""
        return self._mark(check_update(update, "update"))[2]

    def samples(self, update: int) -> int:
        """Return the number of samples seen before an update."""
        first, samples, steps = self._mark(check_update(update, "update"))
        return samples + (update - first) * steps * self.microbatch

    def batch_of(self, update: int) -> int:
        """Return the samples of an update: accumulation steps x micro-batch, or what is left of an epoch."""
        whole = self(update) * self.microbatch
        return int(min(whole, self._left(self.samples(update))))

    def rate(self, update: int) -> float:
        """Return the factor of the rate for an update, in the units of the schedule that was given."""
        seen, batch = self.samples(update), self.batch_of(update)
        return _checked(self._factor, seen) * self._coldness(self.batch) / self._coldness(batch)

    def temperature(self, update: int) -> float:
        """Return the temperature of an update's noise, relative to the rate 1 at the first batch."""
        return self.rate(update) * self._coldness(self.batch_of(update)) / self._coldness(self.batch)

    def beta2(self, beta2: float, update: int) -> float:
        """Return Adam's beta2 for an update: the same half-life in samples as at the first batch.

        Args:
            beta2: of the first batch.
            update: its index.
        """
        return float(beta2 ** (self.batch_of(update) / self.batch))

    def updates(self, samples: float) -> int:
        """Return the number of updates that see `samples` samples (the last one may see more)."""
        update = 0
        while self.samples(update) < samples:
            first, seen, steps = self._mark(update)
            ahead = math.ceil((samples - seen) / (steps * self.microbatch))
            update = min(first + ahead, max(update + 1, self._next_mark(update)))
        return update

    # -- parts -----------------------------------------------------------------------------------------

    def _coldness(self, batch: float) -> float:
        return (1 / batch - self._offset) ** self._power

    def _wanted(self, samples: float) -> float:
        """The batch that has the temperature asked for at the rate of the peak."""
        if samples < self._decay_from:
            return self.batch
        relative = _checked(self._factor, samples) / self._peak
        inverse = (self._coldness(self.batch) * relative) ** (1 / self._power) + self._offset
        return math.inf if inverse <= 0 else 1 / inverse

    def _steps_at(self, samples: float) -> int:
        wanted = self._wanted(samples)
        # A cap below the first batch keeps it from growing; it does not make it smaller.
        cap = max(self.cap.samples, self.batch)
        if math.isinf(min(wanted, cap)):
            raise InputError(
                f"The rate is 0 at sample {samples:g} and nothing caps the batch, which would grow without "
                "end. Give largest=, dataset= or a noise scale with an upper end."
            )
        steps = max(1, round(min(wanted, cap) / self.microbatch))
        # Rounded up, a cap would be broken, or (near a whole data set) the rate be far above its peak.
        while steps > 1 and (
            steps * self.microbatch > cap or self._left_over(samples, steps) > ROUNDED * self._peak
        ):
            steps -= 1
        return steps

    def _left_over(self, samples: float, steps: int) -> float:
        """The rate that keeps the temperature with a number of accumulation steps."""
        asked = _checked(self._factor, samples)
        return asked * self._coldness(self.batch) / self._coldness(steps * self.microbatch)

    def _left(self, samples: int) -> int | float:
        """Return the rest of the epoch; with a dropped tail a window is never cut."""
        if self._dataset is None or self._tail == "drop":
            return math.inf
        return self._dataset - samples % self._dataset

    def _mark(self, update: int) -> tuple[int, int, int]:
        while self._known < update:
            self._extend()
        return self._marks[bisect_right(self._marks, (update, math.inf, 0)) - 1]

    def _next_mark(self, update: int) -> int:
        self._mark(update + 1)
        at = bisect_right(self._marks, (update, math.inf, 0))
        return self._marks[at][0] if at < len(self._marks) else update + 1

    def _extend(self) -> None:
        """Find out about one more update."""
        first, samples, steps = self._marks[-1]
        here = samples + (self._known - first) * steps * self.microbatch
        cut = min(steps * self.microbatch, self._left(here))
        seen = here + int(cut)
        self._known += 1
        wanted = self._steps_at(seen)
        if wanted != steps or cut < steps * self.microbatch:
            self._marks.append((self._known, seen, wanted))


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
    """Turn a schedule of the learning rate into one of accumulation steps, and the rate that is left over.

    ``K(t) = max(1, round(B(t) / microbatch))`` with ``B(t) = batch / f(t)``, or exactly ``N / (1 + (N / batch
    - 1) f(t))``; the rate is ``f(t) B / batch`` (exactly: the same in terms of ``1/B - 1/N``). Memory
    does not grow: only windows do.

    Args:
        factor: f, the factor of the rate as a function of the samples seen; 0 or more.
        batch: samples of one update that the rate is for, on all ranks.
        microbatch: samples of one micro-batch, on all ranks together (their number times the loader's batch).
        dataset: N, samples of an epoch. Caps the batch at N / 10 with the approximate form, and lets a tail
            at the end of an epoch count as what it is.
        form: of the temperature; the exact one needs `dataset`, and stays below it without a cap.
        temperature: ``"sgd"``: lr / B; ``"adam"``: lr / sqrt(B), so that the batch grows by 1 / f^2.
        largest: a cap of your own.
        noise: the noise scale; its upper end is a cap, where there is one. A larger batch would cool nothing
            that is still hot.
        decay_from: the sample from which the batch grows; before it (a warm-up) the rate follows f.
        momentum: (as it was, as it shall be): a larger momentum is a hotter one, for which the batch
            makes up from the start, by ``(1 - m) / (1 - m')``.
        tail: what `windows` does where an epoch ends inside a window.

    Returns:
        The schedule: pass it to `windows`, and its `rate` to the optimizer (`torch.tuning.GrowBatch` does
        both).

    Raises:
        InputError: a value cannot be used.

    Examples:
        >>> halves = lambda samples: 0.5 ** (samples // 6400)  # the rate is halved every 6400 samples
        >>> schedule = grow_batch(halves, batch=64, microbatch=32)
        >>> [schedule(update) for update in (0, 99, 100, 150, 175)]
        [2, 2, 4, 8, 16]
        >>> {schedule.rate(update) for update in range(200)}
        {1.0}
    """
    _check_options(batch, microbatch, dataset, largest, form, temperature, tail, decay_from)
    start = batch * _hotter(momentum)
    if form == "exact" and (dataset is None or start >= dataset):
        raise InputError(
            f'form="exact" is for batches drawn without replacement from more samples than a batch has, and '
            f"dataset={dataset!r} is not above the first batch of {start:g}. Pass dataset=len(data)."
        )
    limits = [
        "Only noise is cooled: a rate that decays for another reason (a loss whose curvature grows) has no "
        "larger batch in its place."
    ]
    if momentum is not None and dataset is not None:
        memory = start / (dataset * (1 - momentum[1]))
        limits.append(
            f"Momentum {momentum[1]:g} remembers {memory:.2g} epochs at the first batch: it must stay far "
            "below 1, also as the batch grows."
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
    """Group samples into batches that grow: for a loader of effective batches.

    Args:
        indices: of the samples of an epoch, such as a torch sampler.
        schedule: from `grow_batch`.
        first_update: index of the first update: `Accumulator.updates` in a later epoch.

    Yields:
        The samples of each update; the last batch may be shorter.

    Examples:
        >>> schedule = grow_batch(lambda seen: 1 / (1 + seen // 4), batch=2, microbatch=1)
        >>> list(grown_batches(range(12), schedule))
        [[0, 1], [2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    """
    update, batch = check_update(first_update, "first_update"), list[Any]()
    wanted = schedule(update) * schedule.microbatch
    for index in indices:
        batch.append(index)
        if len(batch) == wanted:
            yield batch
            update, batch = update + 1, []
            wanted = schedule(update) * schedule.microbatch
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
    for name, value, known in (
        ("form", form, Form),
        ("temperature", temperature, Temperature),
        ("tail", tail, Tail),
    ):
        if value not in get_args(known):
            raise InputError(f"{name}={value!r} is unknown. Pass one of {get_args(known)}.")
    if microbatch > batch:
        raise InputError(
            f"batch={batch} is smaller than microbatch={microbatch}. Give smaller micro-batches, or the "
            "batch that the rate is for."
        )
    if not decay_from >= 0:
        raise InputError(f"decay_from={decay_from!r} is no number of samples. Pass 0 or more.")


def _cap(form: Form, dataset: int | None, largest: int | None, noise: Noise | float | None) -> Cap:
    caps = [Cap(math.inf, "nothing")]
    if dataset is not None:
        if form == "exact":
            caps.append(Cap(dataset - 1, "the data"))
        else:
            caps.append(Cap(dataset / SHARE_OF_DATA, f"a tenth of the {dataset} samples"))
    if largest is not None:
        caps.append(Cap(largest, "largest"))
    if noise is not None:
        caps.append(Cap(noise_range(noise).high, "the upper end of the noise scale"))
    return min(caps, key=lambda cap: cap.samples)


def _hotter(momentum: tuple[float, float] | None) -> float:
    if momentum is None:
        return 1.0
    for value in momentum:
        if not 0 <= value < 1:
            raise InputError(
                f"momentum={momentum!r} is not a pair of numbers from 0 to below 1. Pass (old, new)."
            )
    old, new = momentum
    return (1 - old) / (1 - new)


def _checked(factor: Callable[[float], float], samples: float) -> float:
    given: object = factor(samples) if callable(factor) else "no function"
    if not isinstance(given, SupportsFloat):
        raise InputError(
            f"The rate schedule gives {given!r} at sample {samples:g}. Pass a function of the samples seen "
            "that returns a number."
        )
    value = float(given)
    if not (value >= -1e-9 and math.isfinite(value)):  # a cosine may end a rounding error below 0
        raise InputError(
            f"The rate schedule gives {value!r} at sample {samples:g}. Correct it: a function of the samples "
            "seen that returns a finite factor, 0 or more."
        )
    return max(0.0, value)
