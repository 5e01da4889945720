"""Report of a virtual batch: coupling points, stored values and recomputed operations."""

from __future__ import annotations

# pyright: strict
from dataclasses import dataclass
from typing import Literal

from .memory import binary_text

CouplingKind = Literal["statistic", "gathered", "unknown"]

_KINDS: dict[CouplingKind, str] = {
    "statistic": "statistic of all samples",
    "gathered": "gathered: the operator needs the whole batch",
    "unknown": "gathered: superbatch has no rule for the operator",
}


@dataclass(frozen=True)
class CouplingPoint:
    """An operator of the forward that makes samples of the batch depend on each other.

    Attributes:
        module: path of the module, "" outside every module (in the loss function).
        operation: the operator.
        kind: "statistic": each sample's result uses a sum over samples. "gathered": the operator needs an
            input for the whole batch. "unknown": superbatch has no rule for the operator and runs it on the
            whole batch.
        kept: bytes stored for all samples because later operations read them.
        gathered: bytes of micro-batches concatenated into tensors of the whole batch.

    Examples:
        >>> CouplingPoint("layers.1", "batch_norm", "statistic", kept=4096, gathered=0).kind
        'statistic'
    """

    module: str
    operation: str
    kind: CouplingKind
    kept: int
    gathered: int


@dataclass(frozen=True)
class WholeValue:
    """Values that an operator computed for the whole batch at once, not by micro-batches.

    Attributes:
        module: path of the module, "" outside every module.
        operation: the operator.
        backward: True if it ran in a backward pass.
        times: number of such values.
        nbytes: their bytes in total, over the whole block. `CouplingReport.whole_on_device` is the peak: the
            largest number of bytes that exist at the same time.

    Examples:
        >>> WholeValue("head", "aten.sort.default", backward=False, times=1, nbytes=4096).nbytes
        4096
    """

    module: str
    operation: str
    backward: bool
    times: int
    nbytes: int


@dataclass(frozen=True)
class CouplingReport:
    """Report of a virtual-batch block.

    Attributes:
        samples: samples of the batch.
        microbatches: micro-batches of the batch.
        points: coupling points of the forward, in order.
        backward_points: number of coupling points in backward passes.
        sweeps: passes over all micro-batches.
        recorded: number of operations on the batch.
        run: number of operations on micro-batches.
        repeated: how many of these were recomputed because their result was not stored.
        kept_on_device: largest number of bytes stored for all samples at a time, on the device.
        kept_on_host: largest number of bytes stored for all samples at a time, in the host's memory.
        unknown: operators for which superbatch has no rule, but whose results affect no sample, such as a
            metric; in order, with the bytes gathered for each.
        whole: full values: values for the whole batch that existed as one tensor, in a forward or backward.
            They are rows selected from the batch, gathered embeddings and their gradient, and inputs and
            results of operators that run on the whole batch.
        whole_on_device: largest number of bytes of `whole` at a time. These values stay on the device even if
            they exceed `device_budget`, and count against it.

    Examples:
        >>> report = CouplingReport(8, 2, (), 0, 1, 10, 20, 0, 0, 0)
        >>> print(report)
        8 samples in 2 micro-batches, 1 sweep: no coupled samples
    """

    samples: int
    microbatches: int
    points: tuple[CouplingPoint, ...]
    backward_points: int
    sweeps: int
    recorded: int
    run: int
    repeated: int
    kept_on_device: int
    kept_on_host: int
    unknown: tuple[CouplingPoint, ...] = ()
    whole: tuple[WholeValue, ...] = ()
    whole_on_device: int = 0

    def __str__(self) -> str:
        """Return the report as lines of text."""
        if not self.sweeps:
            return f"{self.samples} samples: nothing was computed in micro-batches"
        parts, sweeps = _count(self.microbatches, "micro-batch", "es"), _count(self.sweeps, "sweep")
        head = f"{self.samples} samples in {parts}, {sweeps}"
        lines = [f"{head}; samples are coupled at", *map(_line, self.points)]
        if not self.points and not self.backward_points:
            unknown = {(point.module, point.operation) for point in self.unknown}
            # A value of the whole batch from any other operator may couple samples.
            apart = all((value.module, value.operation) in unknown for value in self.whole)
            lines = [f"{head}: no coupled samples" if apart else head]
            if not self.unknown and not self.whole:
                return lines[0]
        if self.backward_points:
            lines.append(f"  and at {_count(self.backward_points, 'operator')} of the backward")
        if self.unknown:
            lines += ["on the whole batch, but without effect on samples", *map(_line, self.unknown)]
        if self.whole:
            lines += ["tensors of the whole batch", *map(_whole_line, self.whole)]
            lines.append(f"  at most {binary_text(self.whole_on_device)} of them at a time")
        again = self.repeated / self.run if self.run else 0.0
        lines.append(
            f"stored at most {binary_text(self.kept_on_device)} on the device and "
            f"{binary_text(self.kept_on_host)} on the host; recomputed {again:.0%} of {self.run} operations"
        )
        return "\n".join(lines)


def _line(point: CouplingPoint) -> str:
    sizes = [f"{binary_text(point.kept)} stored"] if point.kept else []
    sizes += [f"{binary_text(point.gathered)} gathered"] if point.gathered else []
    detail = ", ".join([_KINDS[point.kind], *sizes])
    return f"  {point.module or '(no module)'}: {point.operation} ({detail})"


def _whole_line(value: WholeValue) -> str:
    place = "backward pass" if value.backward else value.module or "(no module)"
    times = f"{value.times} times, " if value.times > 1 else ""
    return f"  {place}: {value.operation} ({times}{binary_text(value.nbytes)})"


def _count(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else ending}"
