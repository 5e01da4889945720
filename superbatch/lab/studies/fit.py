"""Search for the micro-batch size of a recipe, by its peak of memory and its time.

1. Predict the peak of a few sizes with fake tensors, and fit a curve.
2. Take the largest size whose peak is below the limit by the curve, its half, its quarter, and so on.
3. Measure the peak of each, smallest first; skip sizes above the limit by the curve.
4. Time windows of the sizes in turns, so that a disturbance of the machine affects all of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from superbatch.errors import InputError
from superbatch.results.memory import Limit
from superbatch.torch.memory.limits import memory_limit
from superbatch.torch.memory.out_of_memory import out_of_memory
from superbatch.torch.sizes.predict import PredictionError, predict_peak
from superbatch.torch.sizes.savings import savings
from superbatch.tuning.search import ENOUGH, halvings, time_per_sample

from ..recipes import Recipe
from ..report.fitting import Fitting
from .checks import check_choice, check_counts, check_memory_device, offered_optimizer
from .findings import Findings
from .on_torch import torch_threads
from .options import FitOptions as Options
from .rehearsal import Rehearsal, microbatches_to_time, prepare, refusal
from .shared_options import Interrupted, Progress, Show, loaded, origin, silent

DEFAULTS = Options()
DTYPES = ("float32", "float64", "bfloat16")

PROBES = 6  # sizes whose peak is predicted before the curve is fitted, regardless of the time
ROUNDS = 20  # windows of each size that are timed, if there is time
# Shares of a limit that are kept free: if an allocation beyond it fails, and if the system kills the process
# instead. `superbatch.torch.sizes` keeps 0.005 or 0.05, and 0.10.
MARGIN, CARE = 0.01, 0.10
BUSY = 0.75  # load average per core from which other processes disturb the times
HOPELESS = 2.0  # a size that is this many times slower than the fastest is not timed further


def fit(recipe: str | Recipe, options: Options = DEFAULTS, *, progress: Show = silent) -> Fitting:
    """Measure the memory and the time of micro-batches of a recipe, and recommend a size."""
    start = time.monotonic()
    task = loaded(recipe, options)
    _check(task, options)
    with torch_threads(options.threads or torch.get_num_threads()), torch.random.fork_rng():
        rehearsal = prepare(
            task,
            optimizer=options.optimizer or task.default_optimizer,
            dtype=options.dtype,
            device=options.device,
            samples=options.batch_size or task.batch_size,
        )
        own = memory_limit(rehearsal.device)
        limit = own if options.limit is None else Limit(options.limit, "--limit")
        # Beyond these limits an allocation fails. Beyond the memory of a CPU the system kills the process.
        fails = options.limit is not None or limit.by.startswith("RLIMIT") or rehearsal.device.type != "cpu"
        margin = MARGIN if fails else CARE
        found = Findings(limit=limit, margin=margin, batch_size=rehearsal.samples, notes=busy())
        work = _Work(rehearsal, found, options, progress, room=int(own.bytes * (1 - CARE)))
        try:
            work.run()
        except KeyboardInterrupt:
            if not found.probes and not found.measured:
                raise
            raise Interrupted(work.report(start, partial=True)) from None
        return work.report(start, partial=False)


@dataclass
class _Work:
    """The four parts of a fit. Each result is recorded at once, for a report after an interruption."""

    rehearsal: Rehearsal
    found: Findings
    options: Options
    progress: Show
    room: int  # free bytes of this machine, which `options.limit` does not change
    end: float = 0.0  # when the measurements must end, by time.monotonic()
    done: int = 0
    last: tuple[int, float] = (0, 0.0)  # the size that was measured last, and the seconds of its measurement
    unpredicted: set[int] = field(default_factory=set)  # sizes whose peak cannot be predicted

    def run(self) -> None:
        """Predict, measure and time."""
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
        # The time limit is for measurements: it does not include loading the data and the predictions.
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
        """Predict the peaks of sizes, the largest first."""
        found = self.found
        for samples in sorted(sizes, reverse=True):
            if samples in found.probes or samples in self.unpredicted:
                continue
            try:
                found.probes[samples] = self.rehearsal.predicted(predict_peak, samples)
            except PredictionError as error:
                if found.probes:  # a larger size was predicted, so only this one cannot be
                    self.unpredicted.add(samples)
                    continue
                found.how = "small real runs"
                found.notes.append(f"Peaks were not predicted: {error}")
                return
            self._tick(f"predicted {samples}")
        found.how = "fake tensors"

    def _measure(self) -> None:
        """Measure the peaks of the planned sizes, and of the largest one that fits by the curve."""
        found, last = self.found, 0
        for samples in found.planned:
            # Without a prediction there is no curve until the first sizes are measured.
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
        """Measure the peak of a size; return False if there is not enough time or memory."""
        found, start = self.found, time.monotonic()
        last, seconds = self.last
        # Half of the time is for timing. A larger size is expected to take longer in proportion.
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
            # For example, BatchNorm cannot train on one sample.
            found.impossible.add(samples)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            found.notes.append(f"Micro-batches of {samples} are left out: {reason}")
        else:
            self.last = samples, time.monotonic() - start
        self._tick(f"measured {samples}")
        return True

    def _time(self) -> None:
        """Time windows of the measured sizes in turns, until the time is over."""
        found, trainer = self.found, self.rehearsal.trainer()
        sizes = [samples for samples in sorted(found.measured) if found.fits(samples)]
        counts = dict.fromkeys(sizes, 2)
        for number in range(1 + ROUNDS):
            for samples in sizes:
                if number > 1 and time.monotonic() > self.end:
                    return
                # The largest is always timed: the fastest is compared with it.
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
        """Predict the savings of ways to lower the peak of the recommended size."""
        found, samples = self.found, self.found.fastest or self.found.top
        if not samples or not found.probes:
            return
        try:
            found.savings = tuple(self.rehearsal.predicted(savings, samples))
        except PredictionError as error:
            found.notes.append(f"Ways to lower the peak could not be predicted: {error}")

    def _hopeless(self, samples: int) -> bool:
        """Return True if a size is so slow that it cannot become the fastest."""
        times = {size: time_per_sample(seconds) for size, seconds in self.found.timed.items()}
        return times[samples] > HOPELESS * min(times.values())

    def report(self, start: float, *, partial: bool) -> Fitting:
        """Make the report."""
        rehearsal, options, found = self.rehearsal, self.options, self.found
        return Fitting(
            **origin(rehearsal.recipe, options, start, partial=partial, torch=torch.__version__),
            dtype=options.dtype,
            optimizer=rehearsal.optimizer,
            device=str(rehearsal.device),
            threads=options.threads or torch.get_num_threads(),
            batch_size=rehearsal.samples,
            parameters=sum(each.numel() * each.element_size() for each in rehearsal.model.parameters()),
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


def busy() -> list[str]:
    """Return a note if other processes load this machine, else an empty list."""
    load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
    if load < BUSY * cores:
        return []
    return [
        f"The machine was busy at the start (load average {load:.1f}, {cores} cores), so times may be wrong. "
        "Run the command again when it is idle, or with --threads 1."
    ]


def _spread(sizes: Sequence[int], count: int) -> list[int]:
    """Return at most `count` of the sizes, evenly spread, with the first and the last."""
    last = len(sizes) - 1
    return [sizes[i] for i in sorted({round(k * last / (count - 1)) for k in range(count)})]


def _check(recipe: Recipe, options: Options) -> None:
    """Raise `InputError` for options that cannot be used."""
    check_counts(options, "batch_size", "limit", "threads")
    if not options.seconds > 0:  # infinity is no limit
        raise InputError(f"seconds={options.seconds!r} is not positive. Give a number above 0.")
    check_choice("dtype", options.dtype, DTYPES)
    offered_optimizer(recipe, options.optimizer)
    check_memory_device(options.device)
    batch_size = options.batch_size or recipe.batch_size
    for size in options.sizes or ():
        if type(size) is not int or not 1 <= size <= batch_size:
            raise InputError(
                f"A micro-batch of {size!r} samples is not a part of a batch of {batch_size}. Give sizes "
                f"from 1 to {batch_size}, or a larger batch_size."
            )
