"""Result of a check of the declared loss: whether a wrong declaration could have shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from superbatch.batch.tree import get, leaves

from .probing.problem import Problem

NOT_CUT = "no micro-batch can be cut in two"
WEIGHTLESS = "every micro-batch has weight 0"
ALL_ZERO = "every loss and every gradient is 0"
ALIKE = "all samples count alike"
ONE_ALONE = "one part alone has a loss other than 0, which a mean and a sum may share"
ROUNDED = "rounding hides a part of the gradient"
NOT_EVALUATED = "loss_fn cannot be evaluated on parts of a micro-batch"
NOT_FINITE = "every loss is infinite or NaN"
NOT_REPEATABLE = "the loss draws random numbers that cannot be repeated"


@dataclass(frozen=True)
class Checked:
    """Outcome of a check that found no contradiction.

    Args:
        informative: False where a wrong declaration could not have shown: a later window may tell more.
        reason: why it could not, as a text; empty where it was informative.

    Examples:
        >>> Checked.of([ALL_ZERO, ALIKE]), Checked.of([ALL_ZERO, ""]).informative
        (Checked(informative=False, reason='all samples count alike'), True)
    """

    informative: bool
    reason: str

    @classmethod
    def of(cls, reasons: Iterable[str]) -> Checked:
        """Sum up micro-batches: one that could have contradicted is enough, else the most telling reason."""
        # From a check that nearly told to one that compared nothing; the first is reported.
        order = (ALIKE, ALL_ZERO, ONE_ALONE, ROUNDED, NOT_REPEATABLE)
        order += (NOT_EVALUATED, NOT_FINITE, WEIGHTLESS, NOT_CUT)
        reasons = set(reasons)
        first = "" if "" in reasons else next((reason for reason in order if reason in reasons), NOT_CUT)
        return cls(not first, first)


def count_alike(problem: Problem, microbatch: Any) -> bool:
    """Return whether labels, masks and weights give every sample of a micro-batch the same weight.

    A mean over tokens is then a mean over samples too, and the check cannot tell them apart. A batch without
    labels, masks or weights has nothing that could count unequally.

    Examples:
        >>> problem = Problem(torch.nn.Linear(1, 1), lambda batch: batch["x"].sum())
        >>> x, full = torch.randn(2, 1), torch.tensor([[1, 2], [3, 1]])
        >>> count_alike(problem, {"x": x, "labels": full})
        True
        >>> count_alike(problem, {"x": x, "labels": torch.tensor([[1, 2], [3, -100]])})
        False
        >>> count_alike(problem, {"x": x})
        False
    """
    counts = [
        _counts(get(microbatch, leaf.path))
        for leaf in leaves(microbatch, unsplit=problem.unsplit, per_sample=problem.per_sample)
        if leaf.length is not None
    ]
    known = [count for count in counts if count is not None]
    # Without any count nothing is known, which is not the same as equal counts.
    return bool(known) and all(bool((count == count[0]).all()) for count in known)


def _counts(value: Any) -> Tensor | None:
    """Count the labels other than -100 of each sample, or the ones of a mask."""
    # Nested and sparse tensors have no rows to sum over.
    if not isinstance(value, Tensor) or not value.numel() or value.layout is not torch.strided:
        return None
    if value.is_floating_point() or value.is_complex():
        # Only zeros and ones are a mask; other floats may be inputs.
        binary = not value.is_complex() and bool(((value == 0) | (value == 1)).all())
        return value.flatten(1).sum(1) if binary and value.ndim > 1 else None
    # -100 is PyTorch's default of ignore_index; other ones are known from hints (`sample_counts`).
    kept = value if value.dtype == torch.bool else value != -100
    return kept.reshape(len(value), -1).sum(1)
