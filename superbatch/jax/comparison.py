# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Comparison of the losses and gradients of parts with those of the whole, under a declaration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .loop import Call
from .probe import Evaluated, Evidence

ADDITIVE = 1e-4  # relative difference of a weight from the sum over its parts


def sum_of(factors: Sequence[float], parts: Sequence[Evaluated], term: str) -> tuple[float, list[np.ndarray]]:
    """Return the sum of losses and of gradients with these factors; a factor of 0 leaves a NaN out."""
    kept = [(factor, part) for factor, part in zip(factors, parts, strict=True) if factor]
    loss = sum(factor * part.losses[term] for factor, part in kept)
    leaves = range(len(parts[0].gradients[term]))
    return loss, [sum((f * p.gradients[term][i] for f, p in kept), start=np.zeros(())) for i in leaves]


def agrees(found: Evidence, factors: Sequence[float], term: str, *, of_whole: float = 1.0) -> bool:
    """Tell whether parts with these factors give the whole, times a factor: the loss and every gradient.

    Args:
        found: the whole and the parts.
        factors: of the parts.
        term: its name; "" for one loss.
        of_whole: factor of the whole.
    """
    loss, gradients = sum_of(factors, found.parts, term)
    wanted = [of_whole * leaf for leaf in found.whole.gradients[term]]
    size = [float(np.linalg.norm(leaf)) for leaf in wanted]
    limit = found.tolerance
    largest = sum(abs(f * p.losses[term]) for f, p in zip(factors, found.parts, strict=True) if f)
    if abs(loss - of_whole * found.whole.losses[term]) > limit * (
        largest + abs(of_whole * found.whole.losses[term])
    ):
        return False
    # A leaf whose gradient vanishes, such as the bias before a softmax, consists of rounding alone.
    floor = 1e-2 * max(size, default=0.0)
    return all(
        float(np.linalg.norm(got - leaf)) <= limit * (norm + floor)
        for got, leaf, norm in zip(gradients, wanted, size, strict=True)
    )


def shares(weights: Sequence[float]) -> list[float]:
    """Return weights over their sum; zeros where that is 0."""
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]


def wrong_terms(call: Call, found: Evidence) -> list[str]:
    """Return the terms for which the declaration does not hold; one loss has the name ""."""
    wrong = []
    for term in found.whole.losses:
        weights = [part.weights[term] for part in found.parts]
        if sum(weights) <= 0 or min(weights) < 0:
            continue
        mean = call.options.reduction_of(term) == "mean"
        if not agrees(found, shares(weights) if mean else [1.0] * len(weights), term) or not_additive(
            found, term
        ):
            wrong.append(term)
    return wrong


def not_additive(found: Evidence, term: str) -> bool:
    """Tell whether the weight of the whole is another number than the sum over the parts."""
    total = sum(part.weights[term] for part in found.parts)
    return abs(total - found.whole.weights[term]) > ADDITIVE * total
