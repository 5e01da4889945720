"""The weights of one window's micro-batches: known before the first backward, or returned with each loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from .. import normalize
from ..errors import InputError, StatementError, explain
from .sync import Ranks

Weigh = Callable[[Any], Any] | Literal["samples", "returned"]


class Weights:
    """What each micro-batch counts, and so the factor of its loss.

    Args:
        weigh: a function of a micro-batch, or ``"samples"``, or ``"returned"``.
        reduction: what the loss is over a micro-batch.
        microbatches: of the window, on the host.
        samples: of each micro-batch, where they are known.
        ranks: share the batch; the total weight is summed over them here, once, before the first backward.
    """

    def __init__(
        self,
        weigh: Weigh,
        reduction: normalize.Reduction,
        microbatches: list[Any],
        samples: list[int] | None,
        ranks: Ranks,
    ) -> None:
        self._reduction: normalize.Reduction = reduction
        self._weigh: Weigh = weigh
        self._count = len(microbatches)
        self.returned: dict[int, normalize.Number] = {}
        # Where the total is known only afterwards, losses are summed first and divided by it at the boundary.
        self.planned: normalize.Number = 1
        self.ahead: list[normalize.Number] | None = None
        if weigh != "returned":
            self.ahead, self.planned = _weigh_ahead(weigh, microbatches, samples, ranks)

    def has_none(self, index: int) -> bool:
        """Whether a micro-batch is known to have no weight, so that its forward can be left out."""
        return self.ahead is not None and not self.ahead[index]

    def factor(self, index: int, weight: Any) -> float:
        """Return what a micro-batch's loss is multiplied by.

        Raises:
            InputError: `weight` is given where weights are known ahead, or is missing where they are
            returned.
        """
        if self.ahead is not None:
            if weight is not None:
                raise InputError(
                    explain(
                        f"a loss with a weight ({weight!r})",
                        "the weight of each micro-batch is already stated, and known before the first "
                        "backward",
                        'return the loss alone, or state weight="returned"',
                    )
                )
            return normalize.scale(self.ahead[index], self.planned, reduction=self._reduction)
        if weight is None or index in self.returned:
            raise InputError(
                explain(
                    "a loss without a weight" if weight is None else "a second weight for one micro-batch",
                    'weight="returned" states that each micro-batch\'s loss comes with its weight, once',
                    "return (loss, weight) from loss_fn, or call backward(loss, weight)",
                )
            )
        self.returned[index] = normalize.check_weight(weight, f"micro-batch {index}")
        return float(normalize.after_forward_scale(self.returned[index], reduction=self._reduction))

    def weigh_again(self, microbatches: list[Any], samples: list[int] | None) -> None:
        """Weigh the micro-batches again after some were cut otherwise.

        Raises:
            StatementError: together they weigh something else than before, when the divisor was computed.
        """
        self._count = len(microbatches)
        if self.ahead is None:
            return
        weights = _weigh(self._weigh, microbatches, samples)
        before, now = normalize.total_weight(self.ahead), normalize.total_weight(weights)
        # A sum taken in float32 is rounded. The boundary divides by the weights as they are now.
        tolerance = 0.0 if isinstance(before, int) and isinstance(now, int) else 1e-5
        if not math.isclose(before, now, rel_tol=tolerance):
            raise StatementError(
                explain(
                    f"a window that weighs {before} in {len(self.ahead)} micro-batches",
                    f"cut otherwise, in {len(weights)}, the same samples weigh {now}",
                    "let weight= be a sum over samples, such as a count of tokens",
                )
            )
        self.ahead = weights

    def counted(self, dropped: list[int]) -> list[normalize.Number]:
        """Return the weights in order, 0 for micro-batches that were left out."""
        weights = self.ahead or [self.returned.get(index, 0) for index in range(self._count)]
        return (
            [0 if index in dropped else weight for index, weight in enumerate(weights)]
            if dropped
            else weights
        )


def _weigh(weigh: Weigh, microbatches: list[Any], samples: list[int] | None) -> list[normalize.Number]:
    if weigh == "samples":
        assert samples is not None
        return list(samples)
    assert callable(weigh)
    return [
        normalize.check_weight(weigh(microbatch), f"micro-batch {index}")
        for index, microbatch in enumerate(microbatches)
    ]


def _weigh_ahead(
    weigh: Weigh, microbatches: list[Any], samples: list[int] | None, ranks: Ranks
) -> tuple[list[normalize.Number], normalize.Number]:
    """The weights, and their total over all ranks."""
    weights: list[normalize.Number] = []
    total: normalize.Number = math.nan
    try:
        weights = _weigh(weigh, microbatches, samples)
        total = normalize.total_weight(weights)
    finally:
        # Also on the way out with an error: the other ranks wait for this rank's part of the sum, and learn
        # from it.
        if ranks.shared:
            total = ranks.sum([total])[0]
    if math.isnan(total):
        raise InputError(
            explain(
                "a window without a total weight",
                "the weight of a micro-batch on another rank is wrong",
                "look at that rank's error",
            )
        )
    return weights, total
