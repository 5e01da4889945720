"""Results of `superbatch fit`: memory and time of each micro-batch size, the limit and the choice."""

from __future__ import annotations

from dataclasses import dataclass

from superbatch.results.memory import Limit, Peak, Saving

from .run import RunReport

EXTRAPOLATED_TO = 100  # the curve of the memory is extrapolated to at most this many batches


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size of micro-batch.

    All bytes are for the first updates of a training: gradients, optimizer state, activations and temporary
    tensors at the moment of their peak, without the model and the batch on the host.

    Examples:
        >>> size = Size(samples=25, microbatches=4, predicted=1000, probe=None, measured=1010, fits=True,
        ...     seconds=2e-4, high=2.2e-4, update_seconds=0.021)
        >>> round(size.error, 3)
        -0.01
    """

    samples: int  # of the micro-batch
    microbatches: int  # micro-batches in the batch
    predicted: int | None  # peak in bytes, by the curve through the predicted sizes
    probe: Peak | None  # prediction for this size itself; None if it is from the curve only
    measured: int | None  # peak in bytes of real micro-batches; None if it was not measured
    fits: bool  # True if the measured peak, or else the predicted one, is within the limit
    # Per sample, forward and backward; None if not timed. The lower quartile over windows, as other programs
    # on the machine only ever add time.
    seconds: float | None
    high: float | None  # upper quartile of the same times
    update_seconds: float | None  # of one update of the batch: all micro-batches and the optimizer

    @property
    def peak(self) -> int | None:
        """Return the measured peak in bytes, else the predicted one, else None."""
        return self.predicted if self.measured is None else self.measured

    @property
    def error(self) -> float | None:
        """Return the relative error of the prediction; None if it or the measurement is missing."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class EffectiveBatch:
    """Memory and time of one effective batch."""

    batch: int  # samples of one update
    microbatches: int  # micro-batches that it is split into
    samples: int  # of the largest micro-batch
    whole: int | None  # peak in bytes of this batch in one piece, by the curve; None without a curve
    seconds: float | None  # of one update; None if nothing was timed


@dataclass(frozen=True, kw_only=True)
class Fitting(RunReport):
    """Results of `superbatch fit` for a recipe."""

    dtype: str  # of the weights and the data
    optimizer: str
    device: str
    threads: int  # of torch
    batch_size: int  # samples of one update; no micro-batch is larger
    parameters: int  # bytes of the model, which are not in the peaks
    limit: Limit  # bytes available beyond those in use, and the source of this number
    margin: float  # share of the limit that is kept free
    how: str  # source of the curve: predictions with ``"fake tensors"``, or else ``"small real runs"``
    curve_error: float  # largest relative distance of a predicted point from the line through its neighbours
    sizes: tuple[Size, ...]  # ascending; sizes above the limit are only predicted
    largest: int  # the largest micro-batch that fits, at most the batch; 0 if one sample does not fit
    beyond: int | None  # largest batch that would fit, by the curve up to `EXTRAPOLATED_TO` times the batch
    fastest: int | None  # the fastest of the timed sizes; None if none was timed
    reach: tuple[EffectiveBatch, ...]  # in micro-batches of the fastest size; empty if not split
    savings: tuple[Saving, ...]  # ways to lower the peak at the fastest size, the largest saving first
    refused: str | None  # why `Accumulator` does not split this recipe's batches; None if it does

    @property
    def usable(self) -> int:
        """Return the bytes that a peak may take: the limit without its margin."""
        return int(self.limit.bytes * (1 - self.margin))

    def of(self, samples: int) -> Size:
        """Return the entry of a size."""
        return next(size for size in self.sizes if size.samples == samples)
