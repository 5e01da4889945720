"""Comparison of a micro-batch with the prediction from its parts under a declaration, per parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superbatch import normalize

SURE = 30.0  # multiples of the measured rounding: beyond them, a difference is no rounding
CANCELLED = 1e-14  # of the largest gradient of a parameter, in float64


@dataclass(frozen=True)
class Evaluated:
    """Loss, weight and gradient of one micro-batch.

    Args:
        loss: a number.
        weight: as declared.
        gradient: sums of each parameter's gradient, shape (parameters, sums); None where it cannot be had.
    """

    loss: float
    weight: normalize.Number
    gradient: Tensor | None = None

    @property
    def finite(self) -> bool:
        """Return whether loss and gradient can be compared with others."""
        return math.isfinite(self.loss) and (self.gradient is None or bool(self.gradient.isfinite().all()))


@dataclass(frozen=True)
class Rounding:
    """Differences to be expected of a right declaration.

    Args:
        loss: relative to the loss.
        gradient: relative to each parameter's gradient.
        measured: of each parameter's gradient, shape (parameters,): absolute; None: not measured.
    """

    loss: float
    gradient: float
    measured: Tensor | None = None


@dataclass(frozen=True)
class Difference:
    """Differences between a union and the prediction that a declaration makes from its parts.

    Args:
        loss: relative to the largest loss.
        gradient: of each parameter, shape (parameters,); None where there is no gradient.
        size: of each parameter's gradient.
    """

    loss: float
    gradient: Tensor | None
    size: Tensor | None

    def beyond(self, rounding: Rounding) -> Tensor:
        """Return the parameters whose gradient differs by more than rounding, ``[-1]`` for the loss.

        The gradient decides where it is known. A wrong weight hardly shows in the losses of an untrained
        model, which are all alike; and a loss that is a small difference of large numbers differs by
        rounding alone.
        """
        # Without a gradient (shards, a loss that is 0 everywhere) the loss alone can be compared.
        if self.gradient is None or self.size is None or not bool(self.size.any()):
            return torch.tensor([-1] if self.loss > rounding.loss else [], dtype=torch.int64)
        # A gradient that cancels, as a softmax's of a bias that all classes share, is rounding of its terms.
        allowed = rounding.gradient * self.size + CANCELLED * self.size.max()
        # Absolute, as rounding of large terms that cancel is large beside a small sum.
        if rounding.measured is not None:
            allowed = allowed + SURE * rounding.measured
        return (self.gradient > allowed).nonzero().flatten()


@dataclass(frozen=True)
class Cut:
    """A micro-batch (`union`) and the parts that it was cut into.

    Args:
        union: result of the whole micro-batch.
        parts: result of each part.
        spans: the positions of each part's samples in the micro-batch.
        replayed: False where random draws of the parts cannot be those of the union.
        by_sample: the parts draw one after the other, as the union draws sample after sample.
    """

    union: Evaluated
    parts: tuple[Evaluated, ...]
    spans: tuple[tuple[int, ...], ...]
    replayed: bool = True
    by_sample: bool = False

    @property
    def in_order(self) -> bool:
        """Return whether the parts, one after the other, are the union."""
        # e.g. ((0, 2), (1, 3)) is not: code that draws sample after sample draws others there.
        places = [place for span in self.spans for place in span]
        return places == sorted(places)

    @property
    def usable(self) -> bool:
        """Return whether every part that counts has a finite loss and gradient."""
        # A mean over nothing has weight 0 and a loss of NaN; `against` leaves it out.
        return all(part.finite for part in self.parts if part.weight or part.gradient is not None)

    def difference(
        self, reduction: normalize.Reduction, weights: Sequence[normalize.Number] | None = None
    ) -> Difference:
        """Return the difference of the union from the prediction of a declared reduction.

        Args:
            reduction: of the declaration.
            weights: of the parts; None: as declared.
        """
        weights = [part.weight for part in self.parts] if weights is None else weights
        return self.against(_factors(reduction, weights))

    def against(self, factors: Sequence[float]) -> Difference:
        """Return the difference of the union from the sum of its parts, each times a factor.

        Args:
            factors: of the parts; a part of factor 0 is left out.
        """
        counted = [(factor, part) for factor, part in zip(factors, self.parts, strict=True) if factor]
        # fsum rounds once: many parts that cancel must not add a rounding of their own.
        predicted = math.fsum(factor * part.loss for factor, part in counted)
        # Relative to the largest term, since a union near 0 would make rounding a large share of it.
        largest = max([abs(self.union.loss), *(abs(part.loss) for _, part in counted)])
        error = abs(self.union.loss - predicted)
        loss = error / largest if largest else error
        if self.union.gradient is None or any(part.gradient is None for _, part in counted):
            return Difference(loss, None, None)
        sums = torch.zeros_like(self.union.gradient)
        for factor, part in counted:
            assert part.gradient is not None
            sums += factor * part.gradient
        # [parameters, buckets] -> [parameters]; the larger norm, as the union may be 0 and its parts not.
        size = torch.maximum(self.union.gradient.norm(dim=1), sums.norm(dim=1))
        return Difference(loss, (self.union.gradient - sums).norm(dim=1), size)


def _factors(reduction: normalize.Reduction, weights: Sequence[normalize.Number]) -> list[float]:
    """Return the weights of the parts' losses and gradients in the union's."""
    # Sums add up as they are; only a mean is divided by the weights.
    if reduction != "mean":
        return [1.0] * len(weights)
    total = normalize.total_weight(weights)
    return [normalize.scale(weight, total, reduction="mean") for weight in weights]
