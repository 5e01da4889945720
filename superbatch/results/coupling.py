"""Report of a virtual batch: where samples were coupled, what was stored for it, and what was recomputed."""

from __future__ import annotations

# pyright: strict
from dataclasses import dataclass
from typing import Literal

from .memory import binary_text

CouplingKind = Literal["statistic", "gathered", "unknown"]

_KINDS: dict[CouplingKind, str] = {
    "statistic": "statistic of all samples",
    "gathered": "gathered: it is read whole",
    "unknown": "gathered: no rule for the operator",
}


@dataclass(frozen=True)
class CouplingPoint:
    """A point of the forward at which samples met.

    Attributes:
        module: path of the module, "" for what no module did (the loss function).
        operation: the operator.
        kind: how: "statistic" (a sum over samples that flows back into them), "gathered" (an operator that
            needs one of its inputs whole), "unknown" (an operator that no rule knows runs on whole tensors).
        kept: bytes that were kept for all samples, since they are read again after it.
        gathered: bytes of whole tensors that were put together.

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
    """Values of the batch that an operator gave in one tensor, not one micro-batch at a time.

    Attributes:
        module: path of the module, "" for what no module did.
        operation: the operator.
        backward: it ran in a backward pass.
        times: how many such values there were.
        nbytes: bytes of all of them; `CouplingReport.whole_on_device` says how many at a time.

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
        samples: of the batch.
        microbatches: into which it was cut.
        points: where samples met in the forward, in order.
        backward_points: how often they met in backward passes.
        sweeps: passes over all micro-batches.
        recorded: operations on the batch.
        run: operations on micro-batches.
        repeated: of these, recomputed because their result was not kept.
        kept_on_device: largest number of bytes that were kept for all samples at a time, on the device.
        kept_on_host: the same in the host's memory.
        unknown: operators that no rule knows and whose results flow back into no sample (a metric, say), and
            what was put together for them, in order.
        whole: values that grow with the batch and were there in one tensor, forward and backward: rows taken
            out of the batch, gathered embeddings and their gradient, inputs and results of operators that run
            on the whole batch.
        whole_on_device: largest number of bytes of these at a time. They stay on the device, also beyond its
            budget, and leave less of it to what is kept.

    Examples:
        >>> report = CouplingReport(8, 2, (), 0, 1, 10, 20, 0, 0, 0)
        >>> print(report)
        8 samples in 2 micro-batches, 1 sweep: samples do not meet
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
            return f"{self.samples} samples: nothing was computed by micro-batches"
        parts, sweeps = _count(self.microbatches, "micro-batch", "es"), _count(self.sweeps, "sweep")
        head = f"{self.samples} samples in {parts}, {sweeps}"
        lines = [f"{head}; samples meet at", *map(_line, self.points)]
        if not self.points and not self.backward_points:
            told = {(point.module, point.operation) for point in self.unknown}
            apart = all((value.module, value.operation) in told for value in self.whole)
            lines = [f"{head}: samples do not meet" if apart else head]
            if not self.unknown and not self.whole:
                return lines[0]
        if self.backward_points:
            lines.append(f"  and {_count(self.backward_points, 'time')} on the way back")
        if self.unknown:
            lines += ["and no sample sees again", *map(_line, self.unknown)]
        if self.whole:
            lines += ["whole values, larger than a micro-batch's", *map(_whole_line, self.whole)]
            lines.append(f"  at most {binary_text(self.whole_on_device)} of them at a time")
        again = self.repeated / self.run if self.run else 0.0
        lines.append(
            f"kept at most {binary_text(self.kept_on_device)} on the device and "
            f"{binary_text(self.kept_on_host)} on the host; {again:.0%} of {self.run} operations were done "
            "again"
        )
        return "\n".join(lines)


def _line(point: CouplingPoint) -> str:
    sizes = [f"{binary_text(point.kept)} kept"] if point.kept else []
    sizes += [f"{binary_text(point.gathered)} gathered"] if point.gathered else []
    detail = ", ".join([_KINDS[point.kind], *sizes])
    return f"  {point.module or '(no module)'}: {point.operation} ({detail})"


def _whole_line(value: WholeValue) -> str:
    place = "backward pass" if value.backward else value.module or "(no module)"
    times = f"{value.times} times, " if value.times > 1 else ""
    return f"  {place}: {value.operation} ({times}{binary_text(value.nbytes)})"


def _count(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else ending}"
