"""Comparison of the loss and gradient of a micro-batch with those predicted from its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superbatch import normalize

SURE = 30.0  # a difference larger than this many times the measured rounding is an error
CANCELLED = 1e-14  # rounding where terms cancel in float64, as a share of the largest gradient


@dataclass(frozen=True)
class Evaluated:
    """Loss, weight and gradient of one micro-batch.

    Args:
        weight: weight of the micro-batch, as declared by `weight`.
        gradient: sums of each parameter's gradient (`sketch`), shape (parameters, sums); None if it is
            unknown.
    """

    loss: float
    weight: normalize.Number
    gradient: Tensor | None = None

    @property
    def finite(self) -> bool:
        """True if loss and gradient are finite, so that they can be compared."""
        return math.isfinite(self.loss) and (self.gradient is None or bool(self.gradient.isfinite().all()))


@dataclass(frozen=True)
class Rounding:
    """Largest differences that rounding explains under a correct declaration.

    Args:
        loss: difference of the loss, relative to the loss.
        gradient: difference of each parameter's gradient, relative to that gradient.
        measured: measured absolute rounding of each parameter's gradient, shape (parameters,); None if it was
            not measured.
    """

    loss: float
    gradient: float
    measured: Tensor | None = None


@dataclass(frozen=True)
class Difference:
    """Differences between a micro-batch and the prediction of a declaration from its parts.

    Args:
        loss: difference of the loss, relative to the largest loss.
        gradient: difference of each parameter's gradient, shape (parameters,); None without gradients.
        size: norm of each parameter's gradient, shape (parameters,); None without gradients.
    """

    loss: float
    gradient: Tensor | None
    size: Tensor | None

    def beyond(self, rounding: Rounding) -> Tensor:
        """Return the indices of the parameters whose gradient differs by more than rounding.

        A known gradient decides alone: samples of an untrained model have nearly equal losses, which hide a
        wrong weight. Without a gradient the loss decides, and the result is ``[-1]`` if it differs.
        """
        # No gradient: parameters are sharded, or the loss is 0 everywhere.
        if self.gradient is None or self.size is None or not bool(self.size.any()):
            return torch.tensor([-1] if self.loss > rounding.loss else [], dtype=torch.int64)
        # Where the terms of a gradient cancel (softmax and a bias that all classes share), rounding remains.
        allowed = rounding.gradient * self.size + CANCELLED * self.size.max()
        # An absolute bound: the rounding of large terms that cancel is large relative to their small sum.
        if rounding.measured is not None:
            allowed = allowed + SURE * rounding.measured
        return (self.gradient > allowed).nonzero().flatten()


@dataclass(frozen=True)
class Cut:
    """Results of a micro-batch (the union) and of the parts that it was cut into.

    Args:
        union: result of the uncut micro-batch.
        parts: result of each part.
        spans: positions of each part's samples in the micro-batch.
        replayed: False if the parts drew other random numbers than the union.
        by_sample: the parts continue each other's random numbers, as the union draws sample after sample.
    """

    union: Evaluated
    parts: tuple[Evaluated, ...]
    spans: tuple[tuple[int, ...], ...]
    replayed: bool = True
    by_sample: bool = False

    @property
    def in_order(self) -> bool:
        """True if the parts, one after the other, have the samples in the order of the union."""
        # E.g. not ((0, 2), (1, 3)): code that draws per sample would give samples 1 and 2 other numbers.
        positions = [position for span in self.spans for position in span]
        return positions == sorted(positions)

    @property
    def usable(self) -> bool:
        """True if every part that counts has a finite loss and gradient."""
        # A mean over nothing has weight 0 and a loss of NaN; `against` leaves it out.
        return all(part.finite for part in self.parts if part.weight or part.gradient is not None)

    def difference(
        self, reduction: normalize.Reduction, weights: Sequence[normalize.Number] | None = None
    ) -> Difference:
        """Return the difference between the union and its prediction; `weights` replace the declared ones."""
        weights = [part.weight for part in self.parts] if weights is None else weights
        return self.against(_factors(reduction, weights))

    def against(self, factors: Sequence[float]) -> Difference:
        """Return the difference between the union and the sum of factors times parts; 0 leaves a part out."""
        counted = [(factor, part) for factor, part in zip(factors, self.parts, strict=True) if factor]
        # fsum rounds once: a sum over many parts that cancel must not add rounding.
        predicted = math.fsum(factor * part.loss for factor, part in counted)
        # Relative to the largest term: relative to a union near 0, rounding would look like a large error.
        largest = max([abs(self.union.loss), *(abs(part.loss) for _, part in counted)])
        error = abs(self.union.loss - predicted)
        loss = error / largest if largest else error
        if self.union.gradient is None or any(part.gradient is None for _, part in counted):
            return Difference(loss, None, None)
        sums = torch.zeros_like(self.union.gradient)
        for factor, part in counted:
            assert part.gradient is not None
            sums += factor * part.gradient
        # [parameters, buckets] -> [parameters]. The larger norm: the union may be 0 although parts are not.
        size = torch.maximum(self.union.gradient.norm(dim=1), sums.norm(dim=1))
        return Difference(loss, (self.union.gradient - sums).norm(dim=1), size)


def _factors(reduction: normalize.Reduction, weights: Sequence[normalize.Number]) -> list[float]:
    """Return the factor of each part in the loss of the union."""
    # Sums add up without factors; a mean is divided by the total weight.
    if reduction != "mean":
        return [1.0] * len(weights)
    total = normalize.total_weight(weights)
    return [normalize.scale(weight, total, reduction="mean") for weight in weights]
