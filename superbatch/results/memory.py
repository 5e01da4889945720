"""Memory that a micro-batch needs, memory that is available, and the chosen size.

All bytes here count from the same point: what is alive before the window is in none of them.
"""

from __future__ import annotations

# pyright: strict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "backward", "optimizer"]
How = Literal["fake tensors", "small real runs"]

_PREFIXES = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Peak:
    """The most bytes that are alive at once with micro-batches of one size, beyond what is alive now.

    Attributes:
        samples: of a micro-batch.
        bytes: the most at any time of this and every later window: the larger of `optimizer` and of
            `forward` and `backward` with `optimizer_state` on top, since a state that the first update makes
            stays for good.
        phase: when that is.
        first: the first micro-batch of a window, before there are gradients: what one measured micro-batch
            is to be compared with.
        forward: the forward of a later micro-batch; the gradients so far count, new optimizer state does not.
        backward: its backward, likewise.
        optimizer: the update: gradients, new state, temporary tensors.
        gradients: the sums of a window's gradients.
        optimizer_state: what the first update adds for good; 0 if the state exists.
        activations: of one micro-batch, at the end of its forward.

    Examples:
        >>> peak = Peak(
        ...     samples=8,
        ...     bytes=700,
        ...     phase="backward",
        ...     first=450,
        ...     forward=400,
        ...     backward=500,
        ...     optimizer=300,
        ...     gradients=100,
        ...     optimizer_state=200,
        ...     activations=300,
        ... )
        >>> peak.bytes == max(peak.forward, peak.backward) + peak.optimizer_state
        True
    """

    samples: int
    bytes: int
    phase: Phase
    first: int
    forward: int
    backward: int
    optimizer: int
    gradients: int
    optimizer_state: int
    activations: int


@dataclass(frozen=True)
class Measured:
    """The measured peak of one real micro-batch.

    Attributes:
        samples: of the micro-batch.
        bytes: beyond what was alive before it.
    """

    samples: int
    bytes: int


@dataclass(frozen=True)
class Saving:
    """Means to lower a peak, and by how much.

    Attributes:
        name: of the means.
        bytes: that would be free at the peak with micro-batches of the size in question.
        how: what to write.
    """

    name: str
    bytes: int
    how: str


@dataclass(frozen=True)
class Limit:
    """The bytes that are free beyond what is alive now, and who sets the limit.

    Attributes:
        bytes: free.
        by: in words.

    Examples:
        >>> print(Limit(3 * 2**30, "RLIMIT_AS of 8 GiB"))
        3.00 GiB (RLIMIT_AS of 8 GiB)
    """

    bytes: int
    by: str

    def __str__(self) -> str:
        return f"{binary_text(self.bytes)} ({self.by})"


@dataclass(frozen=True)
class MemoryReport:
    """Report of the search for a micro-batch size.

    Attributes:
        device: whose memory.
        how: how the peaks were predicted.
        predicted: peaks of some sizes, ascending.
        error: how far these are from the curve that was read between them, relative.
        measured: peaks of real micro-batches, ascending in samples.
        limit: what they had to fit in.
        largest: the largest size that fits; 0 if none does.
        chosen: the size that is used.
        why: why it is, in a sentence.
        savings: what would lower the peak at the chosen size, the largest saving first.

    Examples:
        >>> peak = Peak(
        ...     samples=8,
        ...     bytes=2**20,
        ...     phase="optimizer",
        ...     first=0,
        ...     forward=0,
        ...     backward=0,
        ...     optimizer=2**20,
        ...     gradients=0,
        ...     optimizer_state=0,
        ...     activations=0,
        ... )
        >>> limit = Limit(2**21, "free memory")
        >>> report = MemoryReport(
        ...     device="cpu",
        ...     how="fake tensors",
        ...     predicted=(peak,),
        ...     error=0.0,
        ...     measured=(Measured(8, 900 * 1024),),
        ...     limit=limit,
        ...     largest=8,
        ...     chosen=8,
        ...     why="the largest that fits",
        ... )
        >>> print(report)
        Micro-batches of 8 samples on cpu: the largest that fits
        limit    2.00 MiB (free memory)
        largest  8 samples
        <BLANKLINE>
        samples  predicted  phase      measured
        -------  ---------  ---------  --------
        8        1.00 MiB   optimizer  900 KiB
        Predicted from fake tensors.
    """

    device: str
    how: How
    predicted: tuple[Peak, ...]
    error: float
    measured: tuple[Measured, ...]
    limit: Limit
    largest: int
    chosen: int
    why: str
    savings: tuple[Saving, ...] = ()

    def lines(self) -> list[str]:
        """The report as lines of plain text."""
        between = f", within {self.error:.1%} between these sizes" if self.error else ""
        lines = [
            f"Micro-batches of {self.chosen} samples on {self.device}: {self.why}",
            f"limit    {self.limit}",
            f"largest  {self.largest} samples",
            "",
            *_columns(("samples", "predicted", "phase", "measured"), self._rows()),
            f"Predicted from {self.how}{between}.",
        ]
        if self.savings:
            rows = [(saving.name, binary_text(saving.bytes), saving.how) for saving in self.savings]
            lines += ["", *_columns(("lower the peak by", "bytes", "how"), rows)]
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _rows(self) -> list[tuple[str, ...]]:
        predicted = {peak.samples: peak for peak in self.predicted}
        measured = {each.samples: each.bytes for each in self.measured}
        rows: list[tuple[str, ...]] = []
        for samples in sorted({*predicted, *measured}):
            peak, real = predicted.get(samples), measured.get(samples)
            needed = ("–", "–") if peak is None else (binary_text(peak.bytes), peak.phase)
            rows.append((str(samples), *needed, "–" if real is None else binary_text(real)))
        return rows


def binary_text(count: int) -> str:
    """A number of bytes in the units that limits are set in.

    Args:
        count: bytes, not negative.

    Returns:
        Text with three digits and a binary unit.

    Examples:
        >>> binary_text(999), binary_text(2048), binary_text(1536 * 2**20), binary_text(1023 * 2**20)
        ('999 B', '2.00 KiB', '1.50 GiB', '1023 MiB')
    """
    power = 0
    while power < len(_PREFIXES) - 1 and count >= 1024 ** (power + 1):
        power += 1
    if power == 0:
        return f"{count} B"
    value = count / 1024**power
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {_PREFIXES[power]}"


def _columns(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, cells)) for cells in zip(headings, *rows, strict=True)]
    lines = [headings, tuple("-" * width for width in widths), *rows]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
