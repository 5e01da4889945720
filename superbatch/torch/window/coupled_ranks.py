"""A batch of coupled samples that several ranks share, each with its own part of it.

The forward and backward of `virtual_batch` sum over the ranks wherever samples meet. What is left to the
window: each rank's loss weighs as its samples do, a rank without memory lets all of them begin again, and a
loss that couples the samples of one rank alone is another loss than that of the batch.
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
    """Return the weight of a rank's batch, which cannot be left out: other ranks wait for its forward.

    Args:
        weight: of a batch.

    Raises:
        InputError: the weight is zero.

    Examples:
        >>> positive_weight(len)([1, 2])
        2
    """

    def checked(batch: Any) -> Any:
        found = normalize.check_weight(weight(batch), "the batch of a rank")
        # `weight=` is a user function: 0 can only be found by calling it.
        if not found:
            raise InputError(
                "The batch of this rank has the weight 0, and a batch of coupled samples cannot be left out. "
                "Give each rank one with a positive weight."
            )
        return found

    return checked


def scaled(loss: Tensor, factor: float) -> Tensor:
    """Return the part that the loss of a rank has in the loss of the batch.

    Args:
        loss: of the samples of this rank.
        factor: what they weigh, of all.

    Examples:
        >>> import torch
        >>> scaled(torch.tensor(3.0), 0.5)
        tensor(1.5000)
        >>> scaled(torch.tensor(3.0, dtype=torch.bfloat16), 1 / 3).dtype  # whose 1/3 is wrong by 0.2 %
        torch.float32
    """
    # Equality is exact here: one rank has the factor 1.0, and no multiplication is recorded.
    if factor == 1.0:
        return loss
    # In float32: the rounded factor would scale the whole gradient of this rank.
    return (loss.float() if loss.dtype in LOW_PRECISION else loss) * factor


class Parts(NamedTuple):
    """Count that the loss of this rank is divided by, and the weight of the rank.

    A mean over something that is counted in each rank, such as labels, is part of a mean over all ranks only
    where each of them weighs as much as it counts.

    Attributes:
        counted: the sum of what it counts; 0 where it counts nothing.
        weight: of the rank.
    """

    counted: float
    weight: float

    def squares(self) -> list[float]:
        """Return numbers whose sums over the ranks tell whether counts and weights are in proportion."""
        # Cauchy-Schwarz: sum(c^2) * sum(w^2) equals sum(c*w)^2 only where c is proportional to w.
        return [self.counted**2, self.counted * self.weight, self.weight**2]

    @staticmethod
    def proportional(sums: list[float]) -> bool:
        """Return whether they are.

        Args:
            sums: of `squares`, over the ranks.

        Examples:
            >>> Parts.proportional([4 + 16, 2 + 8, 1 + 4]), Parts.proportional([4 + 16, 4 + 4, 4 + 1])
            (True, False)
        """
        counts, products, weights = sums
        # 1e-12: the sums are of float64 numbers, added in another order on each run.
        return math.isclose(counts * weights, products**2, rel_tol=1e-12)


def require_every_rank(virtual: VirtualBatch, weight: float, *, stated: bool) -> Parts:
    """Check that samples which the loss couples are those of all ranks; return what it counts here.

    BatchNorm is over all of them. For anything else the program has to exchange something itself.

    Args:
        virtual: the batch of this rank.
        weight: of the rank.
        stated: the user has stated it.

    Raises:
        CoupledSamplesError: samples met on this rank alone.
    """
    count = 0.0
    # The program gathers by itself, so the coupling is over all ranks.
    if virtual.ranks.exchanges:
        return Parts(0.0, weight)
    _warn_of_unknown(virtual.report().unknown)
    for point, number, counts in virtual.logged_points():
        # BatchNorm's statistics are summed over the ranks by the virtual batch.
        if point.operation == "batch_norm":
            continue
        # E.g. a mean over the labels of this rank: part of the global mean if the rank weighs its labels.
        if number is not None and (counts or stated):
            count += number
            continue
        if point.kind == "unknown":
            _warn_of_unknown([point])
            continue
        where = f" in {point.module!r}" if point.module else ""
        raise CoupledSamplesError(
            f"The samples of this rank meet at {point.operation}{where} without those of the other ranks, so "
            "the loss is not that of the batch. In loss_fn gather embeddings by "
            "torch.distributed.nn.functional.all_gather, or sum statistics by its all_reduce."
        )
    return Parts(count, weight)


def _warn_of_unknown(points: Sequence[CouplingPoint]) -> None:
    """Warn of operators without a rule: what follows them is whole, so that no coupling point shows there."""
    names = sorted({f"{p.operation} in {p.module!r}" if p.module else p.operation for p in points})
    if names:
        warn(
            f"No rule is known for {', '.join(names)}, so it is not checked whether the loss couples the "
            "samples of this rank without those of the others. If it does, gather embeddings in loss_fn by "
            "torch.distributed.nn.functional.all_gather, or sum statistics by its all_reduce."
        )


def is_answered(error: Exception | None, virtual: VirtualBatch | None) -> bool:
    """Return whether the other ranks are in no exchange of the block, where none of this rank's reaches them.

    Args:
        error: of this rank.
        virtual: the batch of this rank; None where there was none.
    """
    return error is None or (virtual is not None and (virtual.ranks.heard or virtual.ranks.settled))


def failure_of_any(
    error: Exception | None, virtual: VirtualBatch | None, parts: Parts, sync: Sync
) -> Failure | None:
    """Return how memory ran out on any rank; None where no rank has failed.

    Args:
        error: of this rank.
        virtual: the batch of this rank; None where there was none.
        parts: what the loss of this rank counts.
        sync: the ranks.

    Raises:
        Exception: of this rank.
        RankError: another rank has failed.
        CoupledSamplesError: the ranks do not weigh as they count.
    """
    # An error that all ranks have heard of is raised by the exchange itself.
    own = None if virtual is not None and virtual.ranks.heard else error
    memory = own is not None and out_of_memory(own)
    if own is not None and not memory:
        raise own
    # One exchange for both questions: each costs a round trip over the network.
    lacking, *squares = sync.sum_numbers([memory, *parts.squares()])
    if error is not None and memory:
        # The frames hold activations, and the retry needs their memory.
        traceback.clear_frames(error.__traceback__)
        return Failure(str(error) or type(error).__name__, here=True)
    if error is not None and not lacking:
        raise error
    if lacking:
        return Failure("on another rank", here=False)
    # Only after memory: a rank that failed has counted nothing.
    if squares[0] and not Parts.proportional(squares):
        raise CoupledSamplesError(
            f"loss_fn divides by a count of this rank's samples ({parts.counted:g} here; the rank weighs "
            f"{parts.weight:g}), and the ranks do not weigh in proportion to theirs. Pass the count as "
            'weight=, such as weight=count_tokens("labels").'
        )
    return None
