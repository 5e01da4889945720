"""Results of `superbatch fit`: memory and time of each micro-batch size, the limit and the choice."""

from __future__ import annotations

from dataclasses import dataclass

from superbatch.results.memory import Limit, Peak, Saving

DRAWN_ON = 100  # how many times the batch a curve is drawn on, to say which larger batch would fit


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size of micro-batch.

    All bytes are those of a training that begins: gradients, optimizer state, activations and temporary
    tensors at the moment when most of them are alive, beyond the model and the batch on the host.

    Examples:
        >>> size = Size(samples=25, microbatches=4, predicted=1000, probe=None, measured=1010, fits=True,
        ...     seconds=2e-4, high=2.2e-4, update_seconds=0.021)
        >>> round(size.error, 3)
        -0.01
    """

    samples: int  # of the micro-batch
    microbatches: int  # how many of them make the batch
    predicted: int | None  # peak in bytes, by the curve through the predicted sizes
    probe: Peak | None  # what was predicted for this very size; None where the curve alone speaks
    measured: int | None  # peak in bytes of real micro-batches; None where it was not measured
    fits: bool  # whether the peak is within the limit: the measured one, else the predicted one
    # Per sample, forward and backward; the lower quartile over windows, since what else runs on a machine
    # only ever adds time. None: not timed.
    seconds: float | None
    high: float | None  # upper quartile of the same
    update_seconds: float | None  # of a batch: `microbatches` times forward and backward, and the update

    @property
    def peak(self) -> int | None:
        """The peak in bytes: measured, else predicted, else None."""
        return self.predicted if self.measured is None else self.measured

    @property
    def error(self) -> float | None:
        """Relative difference of the prediction from the measurement; None where one of them is missing."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class Reach:
    """An effective batch, and what it takes."""

    batch: int  # samples of one update
    microbatches: int  # how many micro-batches it is split into
    samples: int  # of the largest of them
    whole: int | None  # peak in bytes of this batch in one piece, by the curve; None without one
    seconds: float | None  # of one update; None where nothing was timed


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """Results of `superbatch fit` for a recipe."""

    recipe: str
    description: str  # what is trained on what
    dtype: str  # of the weights and the data
    optimizer: str
    device: str  # where it ran
    threads: int  # of torch
    batch_size: int  # samples of one update; no micro-batch is larger
    parameters: int  # bytes of the model, which every size has beside its peak
    limit: Limit  # bytes that may be used beyond what is in use, and who sets them
    margin: float  # share of the limit that is kept free
    how: str  # how peaks were predicted: ``"fake tensors"``, ``"small real runs"``, or why not at all
    curve_error: float  # how far the predicted points are from a straight line, relative
    sizes: tuple[Size, ...]  # ascending; those above the limit are only predicted
    largest: int  # the largest micro-batch that fits, at most the batch; 0 if not even one sample does
    beyond: int | None  # the largest batch that would fit, by the curve up to `DRAWN_ON` times the batch
    fastest: int | None  # the fastest of the sizes that were timed; None if none was
    reach: tuple[Reach, ...]  # by micro-batches of the fastest size; none where batches are not split
    savings: tuple[Saving, ...]  # what would lower the peak at the fastest size, largest first
    refused: str | None  # why `Accumulator` does not split this recipe's batches; None: it does
    seconds: float  # wall time of all this
    partial: bool  # it was interrupted before the end
    versions: dict[str, str]  # of what it ran on: name -> version
    command: dict[str, str]  # what the user asked for: name of a flag -> value
    notes: tuple[str, ...]  # what a reader should know beside the numbers

    @property
    def usable(self) -> int:
        """Bytes that a peak may take: the limit without its margin."""
        return int(self.limit.bytes * (1 - self.margin))

    def of(self, samples: int) -> Size:
        """The entry of a size."""
        return next(size for size in self.sizes if size.samples == samples)
