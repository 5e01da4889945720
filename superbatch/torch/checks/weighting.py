"""Search for weights under which a micro-batch is the weighted mean of its parts.

If the loss is a mean, every evaluated set S of samples that is cut into parts P satisfies::

    sum over P of w(P) (g(P) - g(S)) = 0        w(P) = sum of the weights of its samples

where g is the gradient. These equations are linear in the weights of the samples. If the residual of least
squares exceeds rounding, no weights explain the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .agreement import SURE, Cut, Evaluated, Rounding

_SHOWS = 10.0  # in units of rounding: smaller singular values do not determine a weight
_NONE = 1e-6  # share of the total weight below which a weight is 0


@dataclass(frozen=True)
class Weighting:
    """Weights that were found, or the reason why there are none.

    Args:
        kind: "weights": unique weights; "open": weights exist, but the cuts do not determine them; "divisor":
            the parts need factors that do not come from weights, e.g. for a divisor that is not additive;
            "none": no factors explain the loss.
        factors: factor of each part of the first cut.
    """

    kind: Literal["weights", "open", "divisor", "none"]
    factors: tuple[float, ...] = ()


def find_weights(cuts: Sequence[Cut], rounding: Rounding) -> Weighting:
    """Find weights of samples under which every cut of a micro-batch is a weighted mean of its parts.

    Args:
        cuts: cuts of one micro-batch. A part without a finite loss is empty: a mean over nothing.
        rounding: largest differences that rounding explains.

    Examples:
        >>> def seen(loss, *gradient):
        ...     return Evaluated(loss, 1, torch.tensor([gradient], dtype=torch.float64))
        >>> whole, parts = seen(2.5, 0.25, 0.75), (seen(1.0, 1.0, 0.0), seen(3.0, 0.0, 1.0))
        >>> found = find_weights([Cut(whole, parts, ((0,), (1,)))], Rounding(1e-7, 1e-6))
        >>> found.kind, [round(factor, 6) for factor in found.factors]
        ('weights', [0.25, 0.75])
        >>> coupled = Cut(whole, (parts[0], seen(3.0, 1.0, 1.0)), ((0,), (1,)))
        >>> find_weights([coupled], Rounding(1e-7, 1e-6)).kind
        'none'
    """
    families = [family for family in _families(cuts) if _comparable(family)]
    if not families:
        return Weighting("open")
    atoms = _atoms(families)
    shares, smallest = _solve(families, atoms, rounding)
    # Atoms are sets of samples that no cut separates: only their total weights can be determined.
    weights = [[float(shares[_inside(span, atoms)].sum()) for span in family.spans] for family in families]
    right = [
        _agrees(family, _normalized(those), rounding) for family, those in zip(families, weights, strict=True)
    ]
    if all(right):
        # Some change of the weights has an effect smaller than rounding.
        if smallest < _SHOWS:
            return Weighting("open")
        # The error of a share is up to 1 / smallest, so a share below three times that may be 0.
        least = max(_NONE, 3 / smallest)
        counted = zip(families, weights, strict=True)
        if not any(_counts_nothing(family, those, least) for family, those in counted):
            return Weighting("weights", tuple(_normalized(weights[0])))
        return Weighting("none")
    # Factors that no weights give, e.g. for a sum divided by max(count, 1).
    factors = [_free_factors(family, rounding) for family in families]
    if all(one is not None for one in factors):
        return Weighting("divisor", factors[0] or ())
    return Weighting("none")


def _families(cuts: Sequence[Cut]) -> list[Cut]:
    """Return the cuts, and a further cut for each part that consists of several parts of another cut."""
    found = {(frozenset(sum(cut.spans, ())), frozenset(cut.spans)): cut for cut in cuts}
    for outer in cuts:
        for part, span in zip(outer.parts, outer.spans, strict=True):
            for cut in cuts:
                inner = [(p, s) for p, s in zip(cut.parts, cut.spans, strict=True) if set(s) <= set(span)]
                spans = tuple(s for _, s in inner)
                # Together the inner parts have all samples of the outer one.
                if len(inner) > 1 and sum(map(len, spans)) == len(span):
                    key = (frozenset(span), frozenset(spans))
                    found.setdefault(key, Cut(part, tuple(p for p, _ in inner), spans))
    return list(found.values())


def _comparable(family: Cut) -> bool:
    if not family.union.finite:
        return False
    with_gradient = family.union.gradient is not None
    return all(_empty(part) or (part.gradient is not None) == with_gradient for part in family.parts)


def _empty(part: Evaluated) -> bool:
    return not math.isfinite(part.loss)


def _atoms(families: Sequence[Cut]) -> list[frozenset[int]]:
    """Return the largest sets of samples that no cut separates."""
    by_parts: dict[tuple[tuple[int, ...], ...], set[int]] = {}
    spans = list(dict.fromkeys(span for family in families for span in family.spans))
    for position in sorted({position for span in spans for position in span}):
        by_parts.setdefault(tuple(span for span in spans if position in span), set()).add(position)
    return [frozenset(positions) for positions in by_parts.values()]


def _inside(span: tuple[int, ...], atoms: Sequence[frozenset[int]]) -> list[int]:
    return [number for number, atom in enumerate(atoms) if atom <= set(span)]


def _solve(
    families: Sequence[Cut], atoms: Sequence[frozenset[int]], rounding: Rounding
) -> tuple[Tensor, float]:
    """Return the shares of the atoms, and the smallest singular value of the system."""
    blocks: list[Tensor] = []
    empty: set[int] = set()  # atoms without weight
    for family in families:
        union, parts = _rows(family, rounding)
        block = torch.zeros(len(union), len(atoms), dtype=torch.float64)
        # w(P) (g(P) - g(S)): one column of the block for each atom of the part.
        for column, part, span in zip(parts.unbind(1), family.parts, family.spans, strict=True):
            inside = _inside(span, atoms)
            # A part without a finite loss is a mean over nothing: its samples weigh 0.
            if _empty(part):
                empty.update(inside)
            else:
                block[:, inside] += (column - union)[:, None]
        blocks.append(block)
    system = torch.cat(blocks)
    # A large factor on this row makes least squares keep the sum of the weights at 1.
    heavy = 1e3 * max(1.0, float(system.norm(dim=0).max()))
    total = torch.full((1, len(atoms)), heavy, dtype=torch.float64)
    nothing = heavy * torch.eye(len(atoms), dtype=torch.float64)[sorted(empty)]
    system = torch.cat([system, total, nothing])
    given = torch.zeros(len(system), dtype=torch.float64)
    given[len(given) - 1 - len(nothing)] = heavy
    # SVD: the smallest singular value shows how well the weights are determined.
    u, values, v = torch.linalg.svd(system, full_matrices=False)
    determined = values > max(1e-12 * float(values[0]), 1e-9)
    projected = torch.where(determined, (u.T @ given) / values.clamp(min=1e-300), 0.0)
    return v.T @ projected, float(values[-1])


def _rows(family: Cut, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Return the union, and its parts as columns, in units of the rounding of each parameter."""
    if family.union.gradient is None:
        size = max(abs(seen.loss) for seen in (family.union, *family.parts) if not _empty(seen))
        # If all losses are 0, the unit would be 0.
        unit = rounding.loss * size or 1.0
        losses = [0.0 if _empty(part) else part.loss / unit for part in family.parts]
        return torch.tensor([family.union.loss / unit]).double(), torch.tensor([losses]).double()
    gradients = [
        torch.zeros_like(family.union.gradient) if part.gradient is None else part.gradient
        for part in family.parts
    ]
    sizes = torch.stack([g.norm(dim=1) for g in (family.union.gradient, *gradients)]).amax(0)
    unit = rounding.gradient * sizes
    if rounding.measured is not None and rounding.measured.numel():
        unit = unit + SURE * rounding.measured
    # Without parameters whose gradient is 0: their unit is 0.
    nonzero = sizes > 0
    scaled = [(g[nonzero] / unit[nonzero, None]).flatten() for g in (family.union.gradient, *gradients)]
    return scaled[0], torch.stack(scaled[1:], 1)


def _agrees(family: Cut, factors: Sequence[float], rounding: Rounding) -> bool:
    effective = [0.0 if _empty(part) else factor for factor, part in zip(factors, family.parts, strict=True)]
    return not len(family.against(effective).beyond(rounding))


def _normalized(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total if abs(total) > _NONE else 0.0 for weight in weights]


def _counts_nothing(family: Cut, weights: Sequence[float], least: float) -> bool:
    """Return whether a part has a gradient but no weight, as in a loss over the hardest samples."""
    largest = max((_size(part) for part in (family.union, *family.parts)), default=0.0)
    parts = zip(family.parts, weights, strict=True)
    return any(weight < least and _size(part) > 1e-6 * largest for part, weight in parts)


def _size(seen: Evaluated) -> float:
    if _empty(seen):
        return 0.0
    return abs(seen.loss) if seen.gradient is None else float(seen.gradient.norm())


def _free_factors(family: Cut, rounding: Rounding) -> tuple[float, ...] | None:
    """Return positive factors with which the parts add up to the union; None if there are none or several."""
    filled = [position for position, part in enumerate(family.parts) if not _empty(part)]
    union, parts = _rows(family, rounding)
    parts = parts[:, filled]
    # With as many unknowns as equations, a solution always exists and shows nothing.
    if not filled or len(union) <= len(filled) or float(torch.linalg.svdvals(parts)[-1]) < _SHOWS:
        return None
    solved = torch.linalg.lstsq(parts, union[:, None], driver="gelsd").solution[:, 0]
    factors = [0.0] * len(family.parts)
    for position, factor in zip(filled, solved.tolist(), strict=True):
        factors[position] = factor
    if float(solved.min()) <= _NONE or not _agrees(family, factors, rounding):
        return None
    return tuple(factors)
