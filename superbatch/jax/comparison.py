# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Comparison of loss and gradient of a few rows ("the whole") with weighted sums over parts of these rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .loop import Call
from .probe import Evaluated, Evidence

ADDITIVE = 1e-4  # largest relative difference of the whole's weight from the sum over its parts


def sum_of(factors: Sequence[float], parts: Sequence[Evaluated], term: str) -> tuple[float, list[np.ndarray]]:
    """Return the sums of losses and of gradients times these factors; a part with factor 0 may be NaN."""
    used = [(factor, part) for factor, part in zip(factors, parts, strict=True) if factor]
    loss = sum(factor * part.losses[term] for factor, part in used)
    leaves = range(len(parts[0].gradients[term]))
    return loss, [sum((f * p.gradients[term][i] for f, p in used), start=np.zeros(())) for i in leaves]


def agrees(evidence: Evidence, factors: Sequence[float], term: str, *, of_whole: float = 1.0) -> bool:
    """Return True if losses and gradients of the parts, times factors, add up to those of the whole.

    Args:
        evidence: the whole and the parts.
        factors: the factor of each part.
        term: the name of the term; "" for one loss.
        of_whole: a factor of the whole.
    """
    loss, gradients = sum_of(factors, evidence.parts, term)
    wanted = [of_whole * leaf for leaf in evidence.whole.gradients[term]]
    size = [float(np.linalg.norm(leaf)) for leaf in wanted]
    limit = evidence.tolerance
    largest = sum(abs(f * p.losses[term]) for f, p in zip(factors, evidence.parts, strict=True) if f)
    if abs(loss - of_whole * evidence.whole.losses[term]) > limit * (
        largest + abs(of_whole * evidence.whole.losses[term])
    ):
        return False
    # The gradient of a leaf may be 0 but for rounding, such as that of one bias for all inputs of a softmax.
    floor = 1e-2 * max(size, default=0.0)
    return all(
        float(np.linalg.norm(got - leaf)) <= limit * (norm + floor)
        for got, leaf, norm in zip(gradients, wanted, size, strict=True)
    )


def shares(weights: Sequence[float]) -> list[float]:
    """Return weights divided by their sum; zeros if the sum is 0."""
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]


def wrong_terms(call: Call, evidence: Evidence) -> list[str]:
    """Return the names of the terms that contradict their declared weight or reduction; "" for one loss."""
    wrong = []
    for term in evidence.whole.losses:
        weights = [part.weights[term] for part in evidence.parts]
        if sum(weights) <= 0 or min(weights) < 0:
            continue  # no divisor: these rows show nothing
        mean = call.options.reduction_of(term) == "mean"
        if not agrees(evidence, shares(weights) if mean else [1.0] * len(weights), term) or not_additive(
            evidence, term
        ):
            wrong.append(term)
    return wrong


def not_additive(evidence: Evidence, term: str) -> bool:
    """Return True if the weight of the whole is not the sum of the weights of the parts."""
    total = sum(part.weights[term] for part in evidence.parts)
    return abs(total - evidence.whole.weights[term]) > ADDITIVE * total
