"""Measurements of a fit so far, and the values of the report that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from superbatch.batch.split import near_equal
from superbatch.results.memory import Limit, Peak, Saving
from superbatch.tuning.search import MemoryCurve, corrected, fastest, fit_curve, halvings, time_per_sample

from ..report.fitting import EXTRAPOLATED_TO, EffectiveBatch, Size

BATCHES = (1, 4, 16, 64, 256)  # effective batches of the report, as multiples of the batch


@dataclass
class FitMeasurements:
    """Measurements so far. A size is the samples of a micro-batch."""

    limit: Limit  # of memory, with its source
    batch_size: int  # samples of one update, and of the largest micro-batch
    margin: float = 0.0  # share of the limit that is kept free
    planned: tuple[int, ...] = ()  # sizes to measure
    how: str = ""  # how peaks were predicted
    probes: dict[int, Peak] = field(default_factory=dict)  # size -> predicted peak
    measured: dict[int, int] = field(default_factory=dict)  # size -> measured peak in bytes
    # Size -> seconds per sample of each window. The first window is a warm-up.
    timings: dict[int, list[float]] = field(default_factory=dict)
    updates: list[float] = field(default_factory=list)  # seconds of windows after their last micro-batch
    savings: tuple[Saving, ...] = ()  # ways to lower the peak
    refused: str | None = None  # the accumulator's error if samples are coupled
    impossible: set[int] = field(default_factory=set)  # sizes with which the loss function raises an error
    notes: list[str] = field(default_factory=list)  # of the report

    @property
    def usable(self) -> int:
        """Bytes of the limit that a peak may take."""
        return int(self.limit.bytes * (1 - self.margin))

    @property
    def predicted(self) -> MemoryCurve | None:
        """Curve through the predicted peaks; None without any."""
        points = [(samples, peak.bytes) for samples, peak in self.probes.items()]
        return fit_curve(points) if points else None

    @property
    def curve(self) -> MemoryCurve | None:
        """Predicted curve corrected by the measured peaks; without a prediction, the curve through these."""
        points, predicted = sorted(self.measured.items()), self.predicted
        if predicted is None:
            return fit_curve(points) if points else None
        return corrected(predicted, points)

    @property
    def largest(self) -> int:
        """Largest micro-batch that fits, at most the batch; 0 for none."""
        return 0 if self.curve is None else self.curve.largest(self.usable, self.batch_size)

    @property
    def largest_in_split(self) -> int:
        """Largest micro-batch of the near-equal split of the batch by `largest`; 0 if none fits."""
        return near_equal(self.batch_size, self.largest)[0] if self.largest else 0

    @property
    def beyond(self) -> int | None:
        """Largest micro-batch that would fit if the batch were larger; None if that is not known.

        The curve is continued as a straight line. That is right for separate samples only, because a loss
        over all pairs of a batch grows faster. It ends at `EXTRAPOLATED_TO` times the batch, beyond which the
        extrapolation is not reliable.
        """
        if self.curve is None or self.refused is not None:
            return None
        return self.curve.largest(self.usable, EXTRAPOLATED_TO * self.batch_size)

    @property
    def timed(self) -> dict[int, list[float]]:
        """Timings of the sizes that have one after the warm-up."""
        return {samples: seconds for samples, seconds in self.timings.items() if len(seconds) > 1}

    @property
    def fastest(self) -> int | None:
        """Fastest size; a larger one is preferred unless it is slower by more than 3 %."""
        return fastest(self.timed) if self.timed else None

    def fits(self, samples: int) -> bool:
        """Return True if micro-batches of a size are within the limit, by the curve so far."""
        return self.curve is not None and self.curve.at(samples) <= self.usable

    def plan_sizes(self, requested: Sequence[int] = ()) -> None:
        """Set `planned` to the requested sizes, or to the largest that fits and its halves.

        Each is the largest micro-batch of a near-equal split of the batch, so it occurs in training. Sizes
        above the limit are planned, too, for the report.
        """
        whole = halvings(self.batch_size)
        if requested:
            self.planned = tuple(sorted({*requested}))
        elif not 0 < self.largest < self.batch_size:
            self.planned = tuple(whole)
        else:
            below = {near_equal(self.batch_size, samples)[0] for samples in halvings(self.largest_in_split)}
            self.planned = (*sorted(below), *(samples for samples in whole if samples > self.largest))

    def sizes(self) -> tuple[Size, ...]:
        """Return the report of each size."""
        return tuple(
            self._size(samples)
            for samples in sorted({*(self.planned or self.probes), *self.measured} - self.impossible)
        )

    def seconds_per_sample(self, samples: int) -> float | None:
        """Return the seconds per sample of micro-batches of any size, interpolated between timed sizes."""
        known = {size: time_per_sample(seconds) for size, seconds in sorted(self.timed.items())}
        return float(np.interp(samples, [*known], [*known.values()])) if known else None

    def reach(self) -> tuple[EffectiveBatch, ...]:
        """Return the effective batches of the fastest size; none if the accumulator refuses to split."""
        samples = self.fastest or self.largest
        if not samples or self.refused is not None:
            return ()
        batches = [times * self.batch_size for times in BATCHES]
        return tuple(
            EffectiveBatch(
                batch=batch,
                microbatches=len(parts),
                samples=parts[0],
                whole=None if self.curve is None else self.curve.at(batch),
                seconds=self._update_seconds(batch, parts[0]),
            )
            for batch, parts in ((batch, near_equal(batch, samples)) for batch in batches)
        )

    def _update_seconds(self, batch: int, samples: int) -> float | None:
        each = self.seconds_per_sample(samples)
        return None if each is None else batch * each + (median(self.updates) if self.updates else 0.0)

    def _size(self, samples: int) -> Size:
        predicted, measured = self.predicted, self.measured.get(samples)
        seconds = self.timed.get(samples)
        peak = measured if measured is not None else None if self.curve is None else self.curve.at(samples)
        return Size(
            samples=samples,
            microbatches=len(near_equal(self.batch_size, samples)),
            predicted=None if predicted is None else predicted.at(samples),
            probe=self.probes.get(samples),
            measured=measured,
            fits=peak is not None and peak <= self.usable,
            seconds=time_per_sample(seconds) if seconds else None,
            high=float(np.quantile(seconds[1:], 0.75, method="lower")) if seconds else None,
            update_seconds=self._update_seconds(self.batch_size, samples) if seconds else None,
        )
