"""Memory that a micro-batch needs, memory that is available, and the chosen size.

All bytes are counted on top of the memory that is allocated before the window.
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
    """Predicted peak memory with micro-batches of one size, on top of what is allocated now.

    Attributes:
        samples: samples of a micro-batch.
        bytes: the peak of this and every later window: the larger of `optimizer` and
            ``max(forward, backward) + optimizer_state``, as the state made by the first update stays.
        phase: the phase in which the peak occurs.
        first: peak of the first micro-batch of a window, before gradients exist; to be compared with a
            measured micro-batch.
        forward: peak of the forward of a later micro-batch, with the gradients so far, without new optimizer
            state.
        backward: peak of its backward, counted in the same way.
        optimizer: peak of the optimizer step: gradients, new state, temporary tensors.
        gradients: bytes of the sums of a window's gradients.
        optimizer_state: bytes of state that the first update creates; 0 if the state exists.
        activations: bytes of activations of one micro-batch at the end of its forward.

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
        samples: samples of the micro-batch.
        bytes: peak on top of the memory allocated before it.
    """

    samples: int
    bytes: int


@dataclass(frozen=True)
class Saving:
    """A way to lower a peak, and its saving.

    Attributes:
        name: name of the way.
        bytes: bytes saved at the peak with micro-batches of the size in question.
        how: the code to write.
    """

    name: str
    bytes: int
    how: str


@dataclass(frozen=True)
class Limit:
    """Memory that is free now, and the origin of the limit.

    Attributes:
        bytes: free bytes.
        by: origin of the limit, in words.

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
        device: device of the memory.
        how: method of the prediction.
        predicted: peaks of some sizes, ascending.
        error: largest relative difference between `predicted` and the curve that interpolates it.
        measured: peaks of real micro-batches, ascending in samples.
        limit: the memory that was available.
        largest: the largest size that fits; 0 if none does.
        chosen: the size that is used.
        why: the reason for this size, in a sentence.
        savings: ways to lower the peak at the chosen size, the largest saving first.

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
        """Return the report as lines of plain text."""
        between = f", within {self.error:.1%} between these sizes" if self.error else ""
        lines = [
            f"Micro-batches of {self.chosen} samples on {self.device}: {self.why}",
            f"limit    {self.limit}",
            f"largest  {self.largest} samples",
            "",
            *aligned([("samples", "predicted", "phase", "measured"), *self._rows()], underlined=True),
            f"Predicted from {self.how}{between}.",
        ]
        if self.savings:
            rows = [(saving.name, binary_text(saving.bytes), saving.how) for saving in self.savings]
            lines += ["", *aligned([("lower the peak by", "bytes", "how"), *rows], underlined=True)]
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
    """Return a number of bytes as text with a binary unit.

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


def aligned(rows: Sequence[tuple[str, ...]], *, underlined: bool = False) -> list[str]:
    """Return the rows of a table as lines of text with aligned columns.

    Args:
        rows: cells of each row, the header first.
        underlined: add a line of dashes under the header.

    Examples:
        >>> aligned([("a", "bytes"), ("first", "1")])
        ['a      bytes', 'first  1']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = [tuple("-" * width for width in widths)] if underlined else []
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (rows[0], *line, *rows[1:])
    ]
