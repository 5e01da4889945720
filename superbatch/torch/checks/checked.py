"""Result of a check of the declared loss, and whether it could have found a wrong declaration."""

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
ALIKE = "all samples have the same weight"
ONE_ALONE = "only one part has a loss other than 0, so a mean and a sum may agree"
ROUNDED = "rounding hides a share of the gradient"
NOT_EVALUATED = "loss_fn cannot be evaluated on parts of a micro-batch"
NOT_FINITE = "every loss is infinite or NaN"
NOT_REPEATABLE = "the loss draws random numbers that cannot be drawn again"


@dataclass(frozen=True)
class Checked:
    """Outcome of a check that found no contradiction.

    Args:
        informative: the check would have found a wrong declaration; if not, a later window is checked.
        reason: why the check would not have found it; empty if it is informative.

    Examples:
        >>> Checked.of([ALL_ZERO, ALIKE]), Checked.of([ALL_ZERO, ""]).informative
        (Checked(informative=False, reason='all samples have the same weight'), True)
    """

    informative: bool
    reason: str

    @classmethod
    def of(cls, reasons: Iterable[str]) -> Checked:
        """Combine the reasons of micro-batches: an empty one makes the check informative."""
        # From the check that compared most to the one that compared least; the first one found is reported.
        order = (ALIKE, ALL_ZERO, ONE_ALONE, ROUNDED, NOT_REPEATABLE)
        order += (NOT_EVALUATED, NOT_FINITE, WEIGHTLESS, NOT_CUT)
        reasons = set(reasons)
        first = "" if "" in reasons else next((reason for reason in order if reason in reasons), NOT_CUT)
        return cls(not first, first)


def count_alike(problem: Problem, microbatch: Any) -> bool:
    """Return whether labels, masks and weights give every sample of a micro-batch the same weight.

    If they do, a mean over tokens equals a mean over samples, and the check cannot distinguish them. Without
    labels, masks or weights the result is False.

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
        for leaf in leaves(microbatch, **problem.paths)
        if leaf.length is not None
    ]
    found = [count for count in counts if count is not None]
    # Without any count, nothing shows that weights are equal.
    return bool(found) and all(bool((count == count[0]).all()) for count in found)


def _counts(value: Any) -> Tensor | None:
    """Return for each sample the number of labels other than -100, or of ones in a mask; else None."""
    # Nested and sparse tensors have no rows to sum over.
    if not isinstance(value, Tensor) or not value.numel() or value.layout is not torch.strided:
        return None
    if value.is_floating_point() or value.is_complex():
        # A float tensor is a mask if it has zeros and ones only; others may be inputs.
        binary = not value.is_complex() and bool(((value == 0) | (value == 1)).all())
        return value.flatten(1).sum(1) if binary and value.ndim > 1 else None
    # PyTorch's default ignore_index. Others come from the loss modules (`sample_counts.Hints`).
    counted = value if value.dtype == torch.bool else value != -100
    return counted.reshape(len(value), -1).sum(1)
