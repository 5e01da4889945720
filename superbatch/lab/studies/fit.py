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
from .fit_measurements import FitMeasurements
from .on_torch import torch_threads
from .options import FitOptions as Options
from .shared_options import Interrupted, Progress, Show, report_fields, resolve_recipe, silent
from .trial_run import TrialRun, coupling_error, microbatches_to_time, prepare_trial

DEFAULTS = Options()
DTYPES = ("float32", "float64", "bfloat16")

PROBES = 6  # sizes whose peak is predicted before the curve is fitted, regardless of the time
ROUNDS = 20  # windows of each size that are timed, if there is time
# Shares of a limit that are kept free: if an allocation beyond it fails, and if the system kills the process
# instead. `superbatch.torch.sizes` keeps 0.005 or 0.05, and 0.10.
MARGIN, CAUTIOUS_MARGIN = 0.01, 0.10
BUSY = 0.75  # load average per core from which other processes disturb the times
HOPELESS = 2.0  # a size that is this many times slower than the fastest is not timed further


def fit(recipe: str | Recipe, options: Options = DEFAULTS, *, progress: Show = silent) -> Fitting:
    """Measure the memory and the time of micro-batches of a recipe, and recommend a size."""
    start = time.monotonic()
    task = resolve_recipe(recipe, options)
    _check(task, options)
    with torch_threads(options.threads or torch.get_num_threads()), torch.random.fork_rng():
        trial = prepare_trial(
            task,
            optimizer=options.optimizer or task.default_optimizer,
            dtype=options.dtype,
            device=options.device,
            samples=options.batch_size or task.batch_size,
        )
        own = memory_limit(trial.device)
        limit = own if options.limit is None else Limit(options.limit, "--limit")
        # Beyond these limits an allocation fails. Beyond the memory of a CPU the system kills the process.
        fails = options.limit is not None or limit.by.startswith("RLIMIT") or trial.device.type != "cpu"
        margin = MARGIN if fails else CAUTIOUS_MARGIN
        measurements = FitMeasurements(limit=limit, margin=margin, batch_size=trial.samples, notes=busy())
        fit_run = _FitRun(
            trial, measurements, options, progress, machine_bytes=int(own.bytes * (1 - CAUTIOUS_MARGIN))
        )
        try:
            fit_run.run()
        except KeyboardInterrupt:
            if not measurements.probes and not measurements.measured:
                raise
            raise Interrupted(fit_run.report(start, partial=True)) from None
        return fit_run.report(start, partial=False)


@dataclass
class _FitRun:
    """The four parts of a fit. Each result is recorded at once, for a report after an interruption."""

    trial: TrialRun
    measurements: FitMeasurements
    options: Options
    progress: Show
    machine_bytes: int  # free bytes of this machine, which `options.limit` does not change
    end: float = 0.0  # when the measurements must end, by time.monotonic()
    done: int = 0
    last_measured: tuple[int, float] = (0, 0.0)  # the size, and the seconds of its measurement
    unpredicted: set[int] = field(default_factory=set)  # sizes whose peak cannot be predicted

    def run(self) -> None:
        """Predict, measure and time."""
        self.measurements.refused = coupling_error(self.trial)
        if self.measurements.refused is not None:
            self.trial = replace(self.trial, coupled=True)
        start = time.monotonic()
        self._predict(_spread(self.options.sizes or halvings(self.measurements.batch_size), PROBES))
        self.measurements.plan_sizes(self.options.sizes or ())
        if self.measurements.probes:
            largest = self.measurements.largest_in_split
            self._predict([largest] if largest else [])
            if time.monotonic() - start < self.options.seconds / 4:
                self._predict(self.measurements.planned)
        # The time limit is for measurements: it does not include loading the data and the predictions.
        self.end = time.monotonic() + self.options.seconds
        self._measure()
        self._time()
        self._predict_savings()

    def _tick(self, finished: str) -> None:
        self.done += 1
        planned = self.measurements.planned or halvings(self.measurements.batch_size)
        total = PROBES + len(planned) * (2 + ROUNDS)
        self.progress(Progress(min(self.done, total), total, finished))

    def _predict(self, sizes: Sequence[int]) -> None:
        """Predict the peaks of sizes, the largest first."""
        measurements = self.measurements
        for samples in sorted(sizes, reverse=True):
            if samples in measurements.probes or samples in self.unpredicted:
                continue
            try:
                measurements.probes[samples] = self.trial.predicted(predict_peak, samples)
            except PredictionError as error:
                if measurements.probes:  # a larger size was predicted, so only this one cannot be
                    self.unpredicted.add(samples)
                    continue
                measurements.how = "small real runs"
                measurements.notes.append(f"Peaks were not predicted: {error}")
                return
            self._tick(f"predicted {samples}")
        measurements.how = "fake tensors"

    def _measure(self) -> None:
        """Measure the peaks of the planned sizes, and of the largest one that fits by the curve."""
        measurements, last = self.measurements, 0
        for samples in measurements.planned:
            # Without a prediction there is no curve until the first sizes are measured.
            if measurements.curve is not None and not measurements.fits(samples):
                break
            if measurements.curve is not None and measurements.curve.at(samples) > self.machine_bytes:
                measurements.notes.append(
                    f"Micro-batches of {samples} samples and more do not fit on this machine."
                )
                return
            if not self._measure_one(samples):
                return
            last = samples
        if (
            not self.options.sizes
            and last < measurements.largest_in_split
            and measurements.curve
            and measurements.curve.at(measurements.largest_in_split) <= self.machine_bytes
        ):
            self._measure_one(measurements.largest_in_split)

    def _measure_one(self, samples: int) -> bool:
        """Measure the peak of a size; return False if there is not enough time or memory."""
        measurements, start = self.measurements, time.monotonic()
        last, seconds = self.last_measured
        # Half of the time is for timing. A larger size is expected to take longer in proportion.
        if last and start + seconds * max(1.5, 0.75 * samples / last) > self.end - self.options.seconds / 2:
            measurements.notes.append(
                f"There was no time for micro-batches of {samples} samples and more: give more --seconds."
            )
            return False
        try:
            measurements.measured[samples] = self.trial.peak(samples)
        except (RuntimeError, ValueError, MemoryError) as error:
            if out_of_memory(error):
                measurements.notes.append(f"Memory ran out with micro-batches of {samples} samples.")
                return False
            if samples == measurements.planned[-1]:
                raise
            # For example, BatchNorm cannot train on one sample.
            measurements.impossible.add(samples)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            measurements.notes.append(f"Micro-batches of {samples} are left out: {reason}")
        else:
            self.last_measured = samples, time.monotonic() - start
        self._tick(f"measured {samples}")
        return True

    def _time(self) -> None:
        """Time windows of the measured sizes in turns, until the time is over."""
        measurements, trainer = self.measurements, self.trial.trainer()
        sizes = [samples for samples in sorted(measurements.measured) if measurements.fits(samples)]
        counts = dict.fromkeys(sizes, 2)
        for number in range(1 + ROUNDS):
            for samples in sizes:
                if number > 1 and time.monotonic() > self.end:
                    return
                # The largest is always timed: the fastest is compared with it.
                if number > ENOUGH and samples != sizes[-1] and self._hopeless(samples):
                    self._tick(f"timed {samples}")
                    continue
                each, update = trainer.time(self.trial.window_of(samples, count=counts[samples]))
                measurements.timings.setdefault(samples, []).append(each / samples)
                if number:
                    measurements.updates.append(update)
                else:
                    counts[samples] = microbatches_to_time(each)
                self._tick(f"timed {samples}")

    def _predict_savings(self) -> None:
        """Predict the savings of ways to lower the peak of the recommended size."""
        measurements = self.measurements
        samples = measurements.fastest or measurements.largest_in_split
        if not samples or not measurements.probes:
            return
        try:
            measurements.savings = tuple(self.trial.predicted(savings, samples))
        except PredictionError as error:
            measurements.notes.append(f"Ways to lower the peak could not be predicted: {error}")

    def _hopeless(self, samples: int) -> bool:
        """Return True if a size is so slow that it cannot become the fastest."""
        times = {size: time_per_sample(seconds) for size, seconds in self.measurements.timed.items()}
        return times[samples] > HOPELESS * min(times.values())

    def report(self, start: float, *, partial: bool) -> Fitting:
        """Make the report."""
        trial, options, measurements = self.trial, self.options, self.measurements
        return Fitting(
            **report_fields(trial.recipe, options, start, partial=partial, torch=torch.__version__),
            dtype=options.dtype,
            optimizer=trial.optimizer,
            device=str(trial.device),
            threads=options.threads or torch.get_num_threads(),
            batch_size=trial.samples,
            parameters=sum(each.numel() * each.element_size() for each in trial.model.parameters()),
            limit=measurements.limit,
            margin=measurements.margin,
            how=measurements.how,
            curve_error=0.0 if measurements.predicted is None else measurements.predicted.error,
            sizes=measurements.sizes(),
            largest=measurements.largest,
            beyond=measurements.beyond,
            fastest=measurements.fastest,
            reach=measurements.reach(),
            savings=measurements.savings,
            refused=measurements.refused,
            notes=tuple(measurements.notes),
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
