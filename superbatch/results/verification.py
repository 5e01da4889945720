"""Result of `superbatch.torch.verify`: differences per parameter, the verdict, and the causes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import instruction
from .coupling import CouplingPoint
from .memory import aligned


@dataclass(frozen=True)
class Finding:
    """One reason why accumulated gradients differ from those of the batch.

    Args:
        kind: `"batchnorm"`, `"coupled"` (a module mixes samples), `"coupled_loss"`, `"weight"`, `"sum"`,
            `"mean"`, `"batch_size"`, `"random"`, `"state"`, `"nondeterminism"`, `"precision"` or `"unknown"`.
        module: a path of `model.named_modules()`, or `"loss_fn"` outside every module.
        evidence: relative size of the effect; NaN if it was found by the type of a module alone.
        found_by: the test that found it.
        detail: the observation, in one sentence.
        remedy: the remedy, as an instruction.
        term: name of the loss term, if `loss_fn` returns several.

    Examples:
        >>> finding = Finding("batchnorm", "1", 0.3, "type", "BatchNorm1d in training mode", "model.eval()")
        >>> print(finding)
        batchnorm in 1 (type, 0.3): BatchNorm1d in training mode. model.eval().
    """

    kind: str
    module: str
    evidence: float
    found_by: str
    detail: str
    remedy: str
    term: str = ""

    def __str__(self) -> str:
        where = self.module or "the model itself"
        if self.term:
            where = f"{where}, term {self.term!r}"
        found = f"{self.kind} in {where} ({self.found_by}, {self.evidence:.3g})"
        return f"{found}: {self.detail}. {instruction(self.remedy)}."


@dataclass(frozen=True)
class ParameterDifference:
    """Difference of a parameter's accumulated gradient from the reference.

    Args:
        name: the parameter, as in `model.named_parameters()`.
        norm: Euclidean norm of the reference gradient.
        difference: Euclidean norm of accumulated minus reference.
        relative: `difference / max(norm, 1e-3 * norm of the whole reference gradient)`. The second argument
            of `max` prevents a large ratio for a gradient that is zero up to rounding, such as that of a
            bias before a normalisation.

    Examples:
        >>> ParameterDifference("weight", norm=2.0, difference=0.5, relative=0.25).relative
        0.25
    """

    name: str
    norm: float
    difference: float
    relative: float


@dataclass(frozen=True)
class GradientComparison:
    """The accumulated gradient against the reference, in one dtype.

    Args:
        dtype: dtype of the computation, such as `"float64"`.
        against: `"batch"` (one pass over the whole batch) or `"splits"` (another split of it).
        split: samples of each micro-batch under test.
        reference_split: samples of each micro-batch of the reference.
        loss: the accumulated loss of the batch.
        reference_loss: the loss of the reference.
        parameters: one entry for each parameter with a gradient in either.
        tolerance: the largest relative difference that counts as rounding.
        term: name of the loss term, if `loss_fn` returns several.

    Examples:
        >>> weight = ParameterDifference("weight", norm=2.0, difference=0.5, relative=0.25)
        >>> comparison = GradientComparison("float64", "batch", (2, 2), (4,), 1.0, 1.0, (weight,), 1e-12)
        >>> comparison.largest, comparison.exact
        (0.25, False)
    """

    dtype: str
    against: str
    split: tuple[int, ...]
    reference_split: tuple[int, ...]
    loss: float
    reference_loss: float
    parameters: tuple[ParameterDifference, ...]
    tolerance: float
    term: str = ""

    @property
    def largest(self) -> float:
        """Return the largest relative difference of any parameter; NaN if one is NaN."""
        # max() alone would return NaN only if it came first.
        differences = [parameter.relative for parameter in self.parameters]
        return math.nan if any(map(math.isnan, differences)) else max(differences, default=0.0)

    @property
    def exact(self) -> bool:
        """True if every parameter is within the tolerance."""
        return self.largest <= self.tolerance


@dataclass(frozen=True)
class Verification:
    """The verdict on a model, a loss and a batch.

    Args:
        exact: True if accumulation in micro-batches gives the batch's gradient.
        samples: samples of the batch.
        comparisons: the measured differences, one entry for each dtype (and each term of the loss).
        causes: causes of the difference, in the order in which to fix them; empty if exact.
        findings: all findings of the tests, also those without effect on this gradient.
        notes: measurements that could not be made, and why.
        coupling_points: the operators that couple samples, if coupling is a cause.

    Examples:
        >>> print(Verification(True, 4, (), (), (), ()))
        exact: accumulated gradients equal the batch's (4 samples)
    """

    exact: bool
    samples: int
    comparisons: tuple[GradientComparison, ...]
    causes: tuple[Finding, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    coupling_points: tuple[CouplingPoint, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain dicts, lists, numbers and strings, for JSON.

        Returns:
            All fields, and `largest` and `exact` of each comparison.

        Examples:
            >>> Verification(True, 4, (), (), (), ()).to_dict()["samples"]
            4
        """
        # asdict() leaves properties out.
        comparisons = [
            {**asdict(comparison), "largest": comparison.largest, "exact": comparison.exact}
            for comparison in self.comparisons
        ]
        return {**asdict(self), "comparisons": comparisons}

    def rows(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return the differences as a table: one row for each parameter, one column for each dtype.

        Returns:
            The header and the rows, as strings; a cell is empty if a dtype has no such gradient.

        Examples:
            >>> Verification(True, 4, (), (), (), ()).rows()
            (('parameter',), [])
        """
        by_dtype = [{p.name: p.relative for p in comparison.parameters} for comparison in self.comparisons]
        # Every name once, in order: a parameter may have a gradient in one dtype only.
        names = dict.fromkeys(name for column in by_dtype for name in column)
        columns = [f"{c.term}: " * bool(c.term) + f"{c.dtype} vs {c.against}" for c in self.comparisons]
        header = ("parameter", *columns)
        cells = [[f"{column[name]:.1e}" if name in column else "" for column in by_dtype] for name in names]
        return header, [(name, *row) for name, row in zip(names, cells, strict=True)]

    def lines(self) -> list[str]:
        """Return the verdict, each cause with its remedy, and each note, one line each.

        Returns:
            The lines, of which the first is the verdict.

        Examples:
            >>> Verification(True, 4, (), (), (), ("a note",)).lines()
            ["exact: accumulated gradients equal the batch's (4 samples)", '  note: a note']
        """
        verdict = "exact: accumulated gradients equal"
        if not self.exact:
            # The loss may contradict its declaration although the gradients agree at this size.
            agree = self.comparisons and all(comparison.exact for comparison in self.comparisons)
            verdict = (
                "NOT exact in other splits: in this one accumulated gradients equal"
                if agree
                else "NOT exact: accumulated gradients differ from"
            )
        lines = [f"{verdict} the batch's ({self.samples} samples)"]
        lines += [f"  cause: {cause}" for cause in self.causes]
        for point in self.coupling_points:
            lines.append(
                f"  samples are coupled in {point.module or 'loss_fn'}: {point.operation} ({point.kind})"
            )
        return lines + [f"  note: {note}" for note in self.notes]

    def __str__(self) -> str:
        lines = self.lines()
        header, rows = self.rows()
        if not rows:
            return "\n".join(lines)
        return "\n".join([*lines, *aligned([header, *rows])])


def united(reports: Mapping[str, Verification]) -> Verification:
    """Return one report of all terms of a loss, each entry with the name of its term.

    Args:
        reports: reports by the name of the term; the name is "" if the loss has one term.

    Examples:
        >>> report = Verification(True, 8, (), (), (), ("a note",))
        >>> united({"words": report}).notes
        ('words: a note',)
    """
    every = list(reports.items())
    return Verification(
        all(report.exact for _, report in every),
        every[0][1].samples,
        tuple(replace(one, term=name) for name, report in every for one in report.comparisons),
        tuple(replace(one, term=name) for name, report in every for one in report.causes),
        tuple(replace(one, term=name) for name, report in every for one in report.findings),
        tuple(f"{name}: {note}" if name else note for name, report in every for note in report.notes),
        # Terms share the model, so their coupling points repeat.
        tuple(dict.fromkeys(point for _, report in every for point in report.coupling_points)),
    )
