"""Weights of a window's micro-batches, known before the first backward or returned with each loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from superbatch import normalize
from superbatch.errors import InputError, LossSpecError

from ..window.sync.sync import Sync
from .losses import Losses, Sum, WindowLoss, check_loss

Weigh = Callable[[Any], Any] | Literal["samples", "returned"]
Ahead = tuple[list[normalize.Number], normalize.Number]


class Weights:
    """Weight of each micro-batch, and the factor of its loss.

    Args:
        weigh: a function of a micro-batch, or ``"samples"``, or ``"returned"``.
        reduction: reduction of the loss over a micro-batch.
        microbatches: the micro-batches of the window, on the host.
        samples: number of samples of each micro-batch; None if unknown.
        sync: the ranks that share the batch; the total weight is summed over them once, before the first
            backward.
        min_weight: lower bound of the total.
        ahead: weights and their total over all ranks, if `weigh_ahead` was already called for all terms.
        term: name of the loss among several.
    """

    def __init__(
        self,
        weigh: Weigh,
        reduction: normalize.Reduction,
        microbatches: list[Any],
        samples: list[int] | None,
        sync: Sync,
        *,
        min_weight: normalize.Number | None = None,
        ahead: Ahead | None = None,
        term: str = "",
    ) -> None:
        self.reduction: normalize.Reduction = reduction
        self._weigh: Weigh = weigh
        self._min_weight = min_weight
        self._term = term
        self._count = len(microbatches)
        # By micro-batch, filled by `factor`.
        self.returned: dict[int, normalize.Number] = {}
        # Divisor of each factor. 1 if the total is known only at the end of the window, which divides by it.
        self.planned: normalize.Number = 1
        self.ahead: list[normalize.Number] | None = None
        if weigh != "returned":
            if ahead is None:
                # Before the first backward, because every factor needs the total over all ranks.
                each, totals = weigh_ahead(lambda: [weights_of(weigh, microbatches, samples)], 1, sync)
                ahead = each[0], totals[0]
            self.ahead = ahead[0]
            self.planned = self._divided_by(ahead[1])

    def new_losses(self) -> Losses:
        """Return an empty object for the losses of the window."""
        return Losses()

    def is_known_zero(self, index: int) -> bool:
        """Return whether the weight of a micro-batch is known to be 0, so that its forward can be skipped."""
        weights = self.ahead
        if weights is None or weights[index]:
            return False
        # A sum of weight 0 may have a loss, but a mean has none.
        return not normalize.takes_part(weights[index], reduction=self.reduction)

    def may_have_zero_weight(self, index: int) -> bool:
        """Return whether the weight of a micro-batch may be 0, so that it has no loss for a backward."""
        return self.ahead is None or not self.ahead[index]

    def scaled(self, index: int, loss: Any, weight: Any) -> list[tuple[Tensor, float]]:
        """Return the tensors to run backward on, each with its factor.

        Raises:
            InputError: `loss` is not a tensor of one element with a graph; or, against the declaration, a
                weight is passed or missing.
        """
        if (
            isinstance(loss, Tensor)
            and not loss.requires_grad
            and self._is_sum_over_nothing(index, loss, weight)
        ):
            # `factor` checks the weight, and records a returned one.
            self.factor(index, weight)
            return []  # such a loss may be a constant without a graph
        check_loss(loss)
        # The usual case: the factor is known.
        if weight is None and self.ahead is not None:
            return [(loss, normalize.scale(self.ahead[index], self.planned, reduction=self.reduction))]
        return [(loss, self.factor(index, weight))]

    def factor(self, index: int, weight: Any) -> float:
        """Return the factor of a micro-batch's loss.

        Raises:
            InputError: `weight` is passed although weights are known already, or is missing although it is
                declared as ``"returned"``.
        """
        if self.ahead is not None:
            if weight is not None:
                raise InputError(
                    f"backward() got the weight {weight!r}, but the weights of micro-batches are already "
                    'declared. Call backward(loss), or make the Accumulator with weight="returned".'
                )
            return normalize.scale(self.ahead[index], self.planned, reduction=self.reduction)
        if weight is None or index in self.returned:
            wrong = "A loss has no weight" if weight is None else "A micro-batch got a second weight"
            raise InputError(
                f'{wrong}, but weight="returned" declares one weight for each micro-batch. Return (loss, '
                "weight) from loss_fn, or call backward(loss, weight)."
            )
        self.returned[index] = normalize.check_weight(weight, f"micro-batch {index}")
        # The total is unknown until the end of the window, where the sums are divided by it.
        return float(normalize.after_forward_scale(self.returned[index], reduction=self.reduction))

    def weigh_again(self, microbatches: list[Any], samples: list[int] | None) -> None:
        """Compute the weights again after micro-batches were cut differently.

        Raises:
            LossSpecError: the total has changed, although the divisor was computed from it.
        """
        self._count = len(microbatches)
        if self.ahead is None:
            return
        self.replace(weights_of(self._weigh, microbatches, samples))

    def replace(self, weights: list[normalize.Number]) -> None:
        """Replace the weights after micro-batches were cut differently.

        Raises:
            LossSpecError: the total has changed.
        """
        assert self.ahead is not None
        self._count = len(weights)
        if self.reduction == "total":  # a total is not divided by their sum
            self.ahead = weights
            return
        before, now = normalize.total_weight(self.ahead), normalize.total_weight(weights)
        # Sums in float32 may differ by rounding. The end of the window divides by the new total.
        tolerance = 0.0 if isinstance(before, int) and isinstance(now, int) else 1e-5
        if not math.isclose(before, now, rel_tol=tolerance):
            raise LossSpecError(
                f"weight= is not additive: the total is {before} with {len(self.ahead)} micro-batches and "
                f"{now} with {len(weights)}. Return a count or a sum over samples, such as a count of tokens."
            )
        self.ahead = weights

    def contributes(self, index: int) -> bool:
        """Return whether a micro-batch contributes, after its backward."""
        weight = self.returned[index] if self.ahead is None else self.ahead[index]
        return normalize.takes_part(weight, reduction=self.reduction)

    def counted(self, dropped: list[int]) -> list[normalize.Number]:
        """Return the weights in order, 0 for micro-batches that were left out."""
        # Returned weights: a micro-batch without a backward has the weight 0.
        weights = self.ahead or [self.returned.get(index, 0) for index in range(self._count)]
        return (
            [0 if index in dropped else weight for index, weight in enumerate(weights)]
            if dropped
            else weights
        )

    def took_part(self, dropped: list[int]) -> list[int]:
        """Return the micro-batches whose losses are in the sum."""
        weights = self.counted(dropped)
        return [
            index
            for index, weight in enumerate(weights)
            if index not in dropped and normalize.takes_part(weight, reduction=self.reduction)
        ]

    def not_finite(self, losses: list[float], dropped: list[int]) -> list[int]:
        """Return the micro-batches in the sum whose losses are NaN or infinite."""
        # The usual case first, because it needs no list.
        if all(map(math.isfinite, losses)):
            return []
        return [index for index in self.took_part(dropped) if not math.isfinite(losses[index])]

    def sums(self, losses: list[float], dropped: list[int]) -> list[Sum]:
        """Return the sum of losses and weights on this rank."""
        if dropped:
            losses = [0.0 if index in dropped else loss for index, loss in enumerate(losses)]
        weights = self.counted(dropped)
        total = normalize.loss_sum(losses, weights, reduction=self.reduction)
        return [Sum(total, normalize.total_weight(weights), nonzero=any(losses))]

    def result(self, sums: list[Sum]) -> WindowLoss:
        """Return the loss of the batch from the sums over all ranks.

        Raises:
            LossSpecError: a loss is not 0, but the weight of the window is.
        """
        (found,) = sums
        weight = self._divided_by(found.weight)
        if not normalize.takes_part(found.weight, reduction=self.reduction):
            weight = 0
        # A loss that is not finite raises another error.
        elif not weight and found.nonzero and math.isfinite(found.total):
            raise no_divisor(found, self._term)
        return WindowLoss(
            normalize.per_weight(found.total, weight), weight, normalize.divisor(self.planned or 1, weight)
        )

    def loss_of(self, losses: list[float], index: int) -> tuple[float, str]:
        """Return the loss of a micro-batch, and the name of its term."""
        return losses[index], self._term

    def one_per_microbatch(self, losses: list[float]) -> list[float]:
        """Return one loss for each micro-batch."""
        return losses

    def by_name(self, index: int, loss: Tensor) -> dict[str, Tensor]:
        """Return the losses of a micro-batch that have a gradient, by the name of the term."""
        del index
        return {self._term: loss} if loss.requires_grad else {}

    def _is_sum_over_nothing(self, index: int, loss: Tensor, weight: Any) -> bool:
        weight = weight if self.ahead is None else self.ahead[index]
        # E.g. a sum over no labels, which may be a constant 0 without a graph.
        return self.reduction == "sum" and loss.numel() == 1 and weight is not None and not weight

    def _divided_by(self, counted: normalize.Number) -> normalize.Number:
        return normalize.window_weight(counted, reduction=self.reduction, min_weight=self._min_weight)


def no_divisor(found: Sum, term: str) -> LossSpecError:
    """Return the error for a window of weight 0 in which a loss is not 0."""
    name = f" of the term {term!r}" if term else ""
    bound = f"weight={{{term!r}: at_least(1, ...)}}" if term else "weight=at_least(1, ...)"
    return LossSpecError(
        f"The losses{name} in this window sum to {found.total:g}, but the weight of the window is 0, so the "
        f"sum cannot be divided; no update was made. Pass a lower bound of the weight, such as {bound}."
    )


def weights_of(weigh: Weigh, microbatches: list[Any], samples: list[int] | None) -> list[normalize.Number]:
    """Return the weight of each micro-batch.

    Raises:
        InputError: a weight is not a finite number >= 0.

    Examples:
        >>> weights_of(sum, [[1, 2], [4]], None)
        [3, 4]
    """
    if weigh == "samples":
        # None if the declaration does not need the number of samples.
        return list(samples) if samples is not None else [1] * len(microbatches)
    assert callable(weigh)
    return [
        normalize.check_weight(weigh(microbatch), f"micro-batch {index}")
        for index, microbatch in enumerate(microbatches)
    ]


def weigh_ahead(
    compute: Callable[[], list[list[normalize.Number]]], terms: int, sync: Sync
) -> tuple[list[list[normalize.Number]], list[normalize.Number]]:
    """Return the weights of each term, and their totals over all ranks, with one all-reduce.

    Raises:
        InputError: a weight is not a finite number >= 0.
        RankError: another rank has failed.

    Examples:
        >>> from superbatch.torch.window.sync.local import Local
        >>> weigh_ahead(lambda: [[2, 1], [3, 3]], 2, Local())
        ([[2, 1], [3, 3]], [3, 6])
    """
    weights = compute()
    totals: list[normalize.Number] = list(map(normalize.total_weight, weights))
    if sync.shared:
        totals = list(sync.sum_numbers(totals))
    return weights, totals
