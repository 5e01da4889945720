"""Search for the micro-batch size of a recipe: memory is predicted and measured, time is measured.

1. Predict the peak of a few sizes under fake tensors, and draw a curve through them.
2. Read from it the largest size under the limit; take it and its halves.
3. Measure the peak of each, smallest first, never of one that should be above the limit.
4. Time windows of them in turns, so that a disturbance of the machine falls on all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from superbatch.errors import InputError
from superbatch.results.memory import Limit
from superbatch.torch.memory.limits import memory_limit
from superbatch.torch.memory.out_of_memory import out_of_memory
from superbatch.torch.sizes.predict import PredictionError, predict_peak
from superbatch.torch.sizes.savings import savings
from superbatch.tuning.search import ENOUGH, halvings, time_per_sample

from ..recipes import Recipe, load_recipe
from ..report.fitting import Fitting
from .findings import Findings
from .on_torch import torch_threads
from .options import FitOptions as Options
from .rehearsal import Rehearsal, microbatches_to_time, prepare, refusal
from .shared_options import Interrupted, check_counts, check_memory_device, offered_optimizer
from .shared_options import Progress as Progress
from .versions import origin

DEFAULTS = Options()
DTYPES = ("float32", "float64", "bfloat16")

PROBES = 6  # sizes whose peak is predicted whatever it takes, before the curve is drawn
ROUNDS = 20  # windows of each size that are timed, where there is time for them
# Shares of a limit that are kept free: of one that an allocation hits, and of one where the system ends the
# process instead. `superbatch.torch.sizes.auto` keeps the same.
MARGIN, CARE = 0.01, 0.10
BUSY = 0.75  # load average per core from which others are in the way
HOPELESS = 2.0  # a size this many times slower than the fastest is not timed further


def fit(
    recipe: str | Recipe,
    options: Options = DEFAULTS,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Fitting:
    """Find out what micro-batches of a recipe need, in memory and in time, and which to use."""
    start = time.monotonic()
    loaded = load_recipe(recipe, data=options.data) if isinstance(recipe, str) else recipe
    _check(loaded, options)
    with torch_threads(options.threads or torch.get_num_threads()), torch.random.fork_rng():
        rehearsal = prepare(
            loaded,
            optimizer=options.optimizer or loaded.default_optimizer,
            dtype=options.dtype,
            device=options.device,
            samples=options.batch_size or loaded.batch_size,
        )
        there_is = memory_limit(rehearsal.device)
        limit = there_is if options.limit is None else Limit(options.limit, "asked for")
        hit = options.limit is not None or limit.by.startswith("RLIMIT") or rehearsal.device.type != "cpu"
        margin = MARGIN if hit else CARE
        found = Findings(limit=limit, margin=margin, batch_size=rehearsal.samples)
        found.notes += busy()
        work = _Work(rehearsal, found, options, progress, room=int(there_is.bytes * (1 - CARE)))
        try:
            work.do()
        except KeyboardInterrupt:
            if not found.probes and not found.measured:
                raise
            raise Interrupted(_report(rehearsal, options, found, start, partial=True)) from None
        return _report(rehearsal, options, found, start, partial=False)


@dataclass
class _Work:
    """The four parts of a fit, one after the other; what they find is kept at once."""

    rehearsal: Rehearsal
    found: Findings
    options: Options
    progress: Callable[[Progress], None]
    room: int  # bytes that this machine has, whatever limit was asked for
    end: float = 0.0
    done: int = 0
    last: tuple[int, float] = (0, 0.0)  # the size that was measured last, and how long that took
    unpredicted: set[int] = field(default_factory=set)

    def do(self) -> None:
        self.found.refused = refusal(self.rehearsal)
        if self.found.refused is not None:
            self.rehearsal = replace(self.rehearsal, coupled=True)
        start = time.monotonic()
        self._predict(_spread(self.options.sizes or halvings(self.found.batch_size), PROBES))
        self.found.plan(self.options.sizes or ())
        if self.found.probes:
            self._predict([self.found.top] if self.found.top else [])
            if time.monotonic() - start < self.options.seconds / 4:
                self._predict(self.found.planned)
        # To load the data and to predict is no reason to measure less.
        self.end = time.monotonic() + self.options.seconds
        self._measure()
        self._time()
        self._save()

    def _tick(self, finished: str) -> None:
        self.done += 1
        planned = self.found.planned or halvings(self.found.batch_size)
        total = PROBES + len(planned) * (2 + ROUNDS)
        self.progress(Progress(min(self.done, total), total, finished))

    def _predict(self, sizes: Sequence[int]) -> None:
        found = self.found
        for samples in sorted(sizes, reverse=True):
            if samples in found.probes or samples in self.unpredicted:
                continue
            try:
                found.probes[samples] = self.rehearsal.predicted(predict_peak, samples)
            except PredictionError as error:
                if found.probes:  # larger ones could be predicted, so it is the size that is to blame
                    self.unpredicted.add(samples)
                    continue
                found.how = "small real runs"
                found.notes.append(f"Peaks were not predicted: {error}")
                return
            self._tick(f"predicted {samples}")
        found.how = "fake tensors"

    def _measure(self) -> None:
        found, last = self.found, 0
        for samples in found.planned:
            # Without a prediction the smallest sizes are measured whatever comes, and a line drawn through
            # them.
            if found.curve is not None and not found.fits(samples):
                break
            if found.curve is not None and found.curve.at(samples) > self.room:
                found.notes.append(f"Micro-batches of {samples} samples and more do not fit on this machine.")
                return
            if not self._measure_one(samples):
                return
            last = samples
        if (
            not self.options.sizes
            and last < found.top
            and found.curve
            and found.curve.at(found.top) <= self.room
        ):
            self._measure_one(found.top)

    def _measure_one(self, samples: int) -> bool:
        """Measure a size; False if there is no time for it, or no memory."""
        found, start = self.found, time.monotonic()
        last, seconds = self.last
        # Timing takes about as long again, so half of the time is for this.
        if last and start + seconds * max(1.5, 0.75 * samples / last) > self.end - self.options.seconds / 2:
            found.notes.append(
                f"There was no time for micro-batches of {samples} samples and more: give more --seconds."
            )
            return False
        try:
            found.measured[samples] = self.rehearsal.peak(samples)
        except (RuntimeError, ValueError, MemoryError) as error:
            if out_of_memory(error):
                found.notes.append(f"Memory ran out with micro-batches of {samples} samples.")
                return False
            if samples == found.planned[-1]:
                raise
            # BatchNorm, for one, cannot train on one sample.
            found.impossible.add(samples)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            found.notes.append(f"Micro-batches of {samples} are left out: {reason}")
        else:
            self.last = samples, time.monotonic() - start
        self._tick(f"measured {samples}")
        return True

    def _time(self) -> None:
        found, trainer = self.found, self.rehearsal.trainer()
        sizes = [samples for samples in sorted(found.measured) if found.fits(samples)]
        counts = dict.fromkeys(sizes, 2)
        for number in range(1 + ROUNDS):
            for samples in sizes:
                if number > 1 and time.monotonic() > self.end:
                    return
                # The largest is always timed to the end: it is what the fastest is compared with.
                if number > ENOUGH and samples != sizes[-1] and self._hopeless(samples):
                    self._tick(f"timed {samples}")
                    continue
                each, update = trainer.time(self.rehearsal.window_of(samples, count=counts[samples]))
                found.timings.setdefault(samples, []).append(each / samples)
                if number:
                    found.updates.append(update)
                else:
                    counts[samples] = microbatches_to_time(each)
                self._tick(f"timed {samples}")

    def _save(self) -> None:
        """Find out what would lower the peak of the size that is recommended."""
        found, samples = self.found, self.found.fastest or self.found.top
        if not samples or not found.probes:
            return
        try:
            found.savings = tuple(self.rehearsal.predicted(savings, samples))
        except PredictionError as error:
            found.notes.append(f"What would lower the peak is not known: {error}")

    def _hopeless(self, samples: int) -> bool:
        """Return True if a size is much slower than the fastest: more windows of it would be a waste."""
        times = {size: time_per_sample(seconds) for size, seconds in self.found.timed.items()}
        return times[samples] > HOPELESS * min(times.values())


def busy() -> list[str]:
    """Say it if others keep this machine busy: then times say little, those of several threads least."""
    load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
    if load < BUSY * cores:
        return []
    return [
        f"The machine was busy before this began (load average {load:.1f}, {cores} cores), and times may "
        "mislead: run it again when it is idle, or with --threads 1."
    ]


def _spread(sizes: Sequence[int], count: int) -> list[int]:
    """At most `count` of the sizes, the first and the last among them."""
    last = len(sizes) - 1
    return [sizes[i] for i in sorted({round(k * last / (count - 1)) for k in range(count)})]


def _report(
    rehearsal: Rehearsal, options: Options, found: Findings, start: float, *, partial: bool
) -> Fitting:
    parameters = sum(each.numel() * each.element_size() for each in rehearsal.model.parameters())
    return Fitting(
        **origin(rehearsal.recipe, options, start, partial=partial, torch=torch.__version__),
        dtype=options.dtype,
        optimizer=rehearsal.optimizer,
        device=str(rehearsal.device),
        threads=options.threads or torch.get_num_threads(),
        batch_size=rehearsal.samples,
        parameters=parameters,
        limit=found.limit,
        margin=found.margin,
        how=found.how,
        curve_error=0.0 if found.predicted is None else found.predicted.error,
        sizes=found.sizes(),
        largest=found.largest,
        beyond=found.beyond,
        fastest=found.fastest,
        reach=found.reach(),
        savings=found.savings,
        refused=found.refused,
        notes=tuple(found.notes),
    )


def _check(recipe: Recipe, options: Options) -> None:
    """Refuse values that cannot be used."""
    check_counts(options, "batch_size", "limit", "threads")
    if not options.seconds > 0:
        raise InputError(f"seconds={options.seconds!r}: nothing is measured in that time. Give more.")
    if options.dtype not in DTYPES:
        raise InputError(f"dtype={options.dtype!r} cannot be fitted. Use one of {', '.join(DTYPES)}.")
    offered_optimizer(recipe, options.optimizer)
    check_memory_device(options.device)
    batch_size = options.batch_size or recipe.batch_size
    for size in options.sizes or ():
        if type(size) is not int or not 1 <= size <= batch_size:
            raise InputError(
                f"A micro-batch of {size!r} samples: the batch has {batch_size}, and a micro-batch is a part "
                f"of it. Give sizes from 1 to {batch_size}, or a larger batch_size."
            )
