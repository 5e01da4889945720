# pyright: strict
"""Sizes of the micro-batches: near-equal in samples, or near-equal in tokens under a budget.

Sizes are a plain list of ints that sum to the samples of the batch. They affect memory and time, but not the
update.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

from ..integers import positive_int as positive_int
from .packing import Packing, pack
from .packing import near_equal_cost as near_equal_cost
from .plan import Plan, plan
from .token_budget import TokenBudget as TokenBudget


def near_equal(samples: int, microbatch_size: int) -> list[int]:
    """Divide samples into the fewest micro-batches of at most a given size, all nearly equal.

    The K = ceil(samples / microbatch_size) sizes differ by at most 1, larger first, so no small micro-batch
    wastes the device.

    Args:
        samples: number of samples in the batch, at least 1.
        microbatch_size: largest number of samples in a micro-batch, at least 1.

    Returns:
        The sizes, K of them; their sum is `samples`.

    Raises:
        InputError: when an argument is not a positive int.

    Examples:
        >>> near_equal(10, 4), near_equal(3, 8)
        ([4, 3, 3], [3])
    """
    return sizes_of(positive_int("samples", samples), positive_int("microbatch_size", microbatch_size))


def sizes_of(samples: int, most: int) -> list[int]:
    """Return `near_equal` without checking the arguments.

    Args:
        samples: number of samples in the batch.
        most: largest number of samples in a micro-batch.

    Examples:
        >>> sizes_of(10, 4)
        [4, 3, 3]
    """
    count = -(-samples // most)
    size, larger = divmod(samples, count)
    return [size + 1] * larger + [size] * (count - larger)


def split(
    batch: Any,
    microbatch_size: int | TokenBudget,
    *,
    unsplit: Collection[str] = (),
    per_sample: Collection[str] = (),
) -> list[Any]:
    """Cut a batch into near-equal micro-batches, in order unless a TokenBudget has ``sort=True``.

    Args:
        batch: any nested batch (see `superbatch.batch.tree.plan`).
        microbatch_size: largest number of samples in a micro-batch, or a TokenBudget.
        unsplit: paths of parts that every micro-batch gets whole.
        per_sample: paths of lists of any objects with one entry for each sample.

    Returns:
        The micro-batches. Arrays are views of the batch where the framework has views.

    Raises:
        InputError: when microbatch_size is not a positive int or a TokenBudget, a TokenBudget's lengths
            are not one int for each sample, or a declared path is not in the batch.
        SplitError: when the batch cannot be split (see `tree.plan`), or one sample exceeds the budget.

    Examples:
        >>> split({"text": ["a", "b", "c", "d", "e"], "scale": 0.5}, 3)
        [{'text': ['a', 'b', 'c'], 'scale': 0.5}, {'text': ['d', 'e'], 'scale': 0.5}]
        >>> split(["aaaa", "bb", "c", "ddd"], TokenBudget(6, lambda texts: [len(text) for text in texts]))
        [['aaaa', 'bb'], ['c', 'ddd']]
    """
    trim = microbatch_size.trim if isinstance(microbatch_size, TokenBudget) else ()
    planned = plan(batch, unsplit=unsplit, per_sample=per_sample, trim=trim)
    return cut_packed(planned, packing_of(batch, planned.samples, microbatch_size))


def sizes(batch: Any, samples: int, microbatch_size: int | TokenBudget) -> list[int]:
    """Return the number of samples of each micro-batch.

    Raises:
        InputError, SplitError: as `split`.

    Examples:
        >>> sizes(["a", "b", "c"], 3, 2)
        [2, 1]
    """
    return packing_of(batch, samples, microbatch_size).sizes


def packing_of(batch: Any, samples: int, microbatch_size: int | TokenBudget) -> Packing:
    """Return the assignment of samples to micro-batches.

    Raises:
        InputError, SplitError: as `split`.

    Examples:
        >>> packing_of(["a", "b", "c"], 3, 2)
        Packing(order=None, sizes=[2, 1], reach=None)
    """
    if isinstance(microbatch_size, TokenBudget):
        return pack(batch, samples, microbatch_size)
    return Packing(None, near_equal(samples, microbatch_size))


def cut_packed(planned: Plan, packed: Packing) -> list[Any]:
    """Cut a planned batch into the micro-batches of a packing.

    The batch must be planned with the budget's `trim`.

    Raises:
        SplitError: when more than padding would be cut off, or an array cannot be cut like this.

    Examples:
        >>> cut_packed(plan(["a", "b", "c"]), Packing([2, 0, 1], [1, 2]))
        [['c'], ['a', 'b']]
    """
    ends = list(accumulate(packed.sizes))
    assert ends[-1] == planned.samples
    return [packed.take(planned, stop - size, stop) for size, stop in zip(packed.sizes, ends, strict=True)]


def cut(planned: Plan, counts: Sequence[int]) -> list[Any]:
    """Cut a planned batch into consecutive micro-batches.

    Args:
        planned: the batch (see `superbatch.batch.tree.plan`).
        counts: the samples of each micro-batch; their sum is planned.samples.

    Returns:
        The micro-batches.

    Examples:
        >>> cut(plan(["a", "b", "c"]), [1, 2])
        [['a'], ['b', 'c']]
    """
    return cut_packed(planned, Packing(None, list(counts)))
