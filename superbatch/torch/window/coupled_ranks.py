"""Coupled samples on several ranks, each of which has a part of the batch.

The forward and backward of `virtual_batch` sum over the ranks at each coupling point. The window weights each
rank's loss by the rank's samples. If one rank runs out of memory, all ranks begin again. A loss that couples
only the samples of one rank raises.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from superbatch import normalize
from superbatch.errors import CoupledSamplesError, InputError
from superbatch.results.coupling import CouplingPoint

from ..memory.out_of_memory import out_of_memory
from ..virtual.block import VirtualBatch
from ..warn import warn
from .lockstep import Failure
from .participants.gradient_sum import LOW_PRECISION
from .sync.sync import Sync


def positive_weight(weight: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a weight function that raises `InputError` for 0: other ranks wait for this rank's forward.

    Examples:
        >>> positive_weight(len)([1, 2])
        2
    """

    def checked(batch: Any) -> Any:
        found = normalize.check_weight(weight(batch), "the batch of a rank")
        if not found:
            raise InputError(
                "The batch of this rank has the weight 0, but a batch of coupled samples cannot be left out. "
                "Give each rank a batch with a positive weight."
            )
        return found

    return checked


def scaled(loss: Tensor, factor: float) -> Tensor:
    """Return the contribution of a rank's loss to the loss of the batch.

    Args:
        loss: the loss of this rank's samples.
        factor: weight of this rank divided by that of all ranks.

    Examples:
        >>> import torch
        >>> scaled(torch.tensor(3.0), 0.5)
        tensor(1.5000)
        >>> scaled(torch.tensor(3.0, dtype=torch.bfloat16), 1 / 3).dtype  # 1/3 in bfloat16 is 0.2 % off
        torch.float32
    """
    # With one rank the factor is exactly 1.0, and no multiplication is recorded.
    if factor == 1.0:
        return loss
    # In float32, because a rounded factor would scale the whole gradient of this rank.
    return (loss.float() if loss.dtype in LOW_PRECISION else loss) * factor


class CountAndWeight(NamedTuple):
    """The count that this rank's loss is divided by, and the weight of the rank.

    The loss may be a mean over counted elements, such as labels. Then the weighted means of the ranks add up
    to the mean over all ranks only if each rank's weight is proportional to its count.

    Attributes:
        counted: number of elements that the loss is divided by; 0 if it is not divided by a count.
        weight: weight of the rank.
    """

    counted: float
    weight: float

    def squares(self) -> list[float]:
        """Return three numbers; their sums over the ranks are the argument of `proportional`."""
        # Cauchy-Schwarz: sum(c^2) * sum(w^2) equals sum(c*w)^2 only if c is proportional to w.
        return [self.counted**2, self.counted * self.weight, self.weight**2]

    @staticmethod
    def proportional(sums: list[float]) -> bool:
        """Return whether the counts of the ranks are proportional to their weights.

        Args:
            sums: `squares`, summed over the ranks.

        Examples:
            >>> CountAndWeight.proportional([4 + 16, 2 + 8, 1 + 4])
            True
            >>> CountAndWeight.proportional([4 + 16, 4 + 4, 4 + 1])
            False
        """
        counts, products, weights = sums
        # 1e-12 for the rounding of float64 sums, whose order may differ.
        return math.isclose(counts * weights, products**2, rel_tol=1e-12)


def require_every_rank(virtual: VirtualBatch, weight: float, *, declared: bool) -> CountAndWeight:
    """Check that the loss couples the samples of all ranks; return this rank's count and weight.

    The virtual batch itself computes BatchNorm over all ranks. For other coupling `loss_fn` must communicate.

    Args:
        virtual: the batch of this rank.
        weight: weight of the rank.
        declared: whether the user has passed ``weight=``.

    Raises:
        CoupledSamplesError: the loss couples the samples of this rank only.
    """
    count = 0.0
    # loss_fn communicates, so the coupling is over all ranks.
    if virtual.ranks.communicates:
        return CountAndWeight(0.0, weight)
    _warn_of_unknown(virtual.report().unknown)
    for point, number, counts in virtual.logged_points():
        # The virtual batch sums BatchNorm's statistics over the ranks.
        if point.operation == "batch_norm":
            continue
        # E.g. a mean over this rank's labels: part of the global mean if the rank's weight counts its labels.
        if number is not None and (counts or declared):
            count += number
            continue
        if point.kind == "unknown":
            _warn_of_unknown([point])
            continue
        where = f" in {point.module!r}" if point.module else ""
        raise CoupledSamplesError(
            f"{point.operation}{where} couples the samples of this rank without those of the other ranks, so "
            "the loss is not that of the whole batch. Gather embeddings in loss_fn by all_gather, or sum "
            "statistics by all_reduce, both of torch.distributed.nn.functional."
        )
    return CountAndWeight(count, weight)


def _warn_of_unknown(points: Sequence[CouplingPoint]) -> None:
    """Warn of operators without a rule, after which coupling points cannot be found."""
    names = sorted({f"{p.operation} in {p.module!r}" if p.module else p.operation for p in points})
    if names:
        warn(
            f"There is no rule for {', '.join(names)}, so it cannot be checked whether the loss couples the "
            "samples of this rank without those of the other ranks. If it does, gather embeddings in loss_fn "
            "by all_gather, or sum statistics by all_reduce, both of torch.distributed.nn.functional."
        )


def is_answered(error: Exception | None, virtual: VirtualBatch | None) -> bool:
    """Return whether this rank can still exchange with others, which may wait inside the virtual batch."""
    return error is None or (
        virtual is not None and (virtual.ranks.peer_failed or virtual.ranks.peers_released)
    )


def failure_of_any(
    error: Exception | None, virtual: VirtualBatch | None, parts: CountAndWeight, sync: Sync
) -> Failure | None:
    """Return the failure if memory ran out on any rank; None if no rank has failed.

    Raises:
        Exception: the error of this rank, if it is not out of memory.
        RankError: another rank has failed.
        CoupledSamplesError: the weights of the ranks are not proportional to their counts.
    """
    # None if all ranks know the error already.
    own = None if virtual is not None and virtual.ranks.peer_failed else error
    memory = own is not None and out_of_memory(own)
    if own is not None and not memory:
        raise own
    # One exchange for memory and counts, because each costs a round trip.
    lacking, *squares = sync.sum_numbers([memory, *parts.squares()])
    if error is not None and memory:
        # The frames of the traceback hold activations, whose memory the retry needs.
        traceback.clear_frames(error.__traceback__)
        return Failure(str(error) or type(error).__name__, here=True)
    if error is not None and not lacking:
        raise error
    if lacking:
        return Failure("on another rank", here=False)
    # Last, because a rank that ran out of memory has no count.
    if squares[0] and not CountAndWeight.proportional(squares):
        raise CoupledSamplesError(
            f"loss_fn divides by a count over this rank's samples ({parts.counted:g}), but this rank has the "
            f"weight {parts.weight:g}, and the ranks' weights are not proportional to their counts. Pass the "
            'count as weight=, such as weight=count_tokens("labels").'
        )
    return None
