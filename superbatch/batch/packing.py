# pyright: strict
"""Packing of samples of unequal lengths: the fewest micro-batches under a budget.

* Without sorting, micro-batches are consecutive samples of the batch. With sorting and padding, they are
  consecutive samples of the batch sorted by length. For the cost ``samples x longest`` this is optimal: no
  other grouping has fewer micro-batches or a smaller largest cost. Proof: swap samples of two micro-batches
  until the longer ones are together; neither cost rises.
* With sorting and without padding this is bin packing, solved by best fit, largest sample first. It needs at
  most 11/9 of the fewest micro-batches plus a constant (Johnson et al. 1974, doi:10.1137/0203025), and is
  used only if it needs no more than the batch's own order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import Any

from ..errors import InputError, SplitError
from ..integers import checked_costs, positive_int
from .plan import Plan
from .token_budget import TokenBudget

Fill = Callable[[list[int], int], list[int]]


@dataclass(frozen=True, slots=True)
class Packing:
    """Assignment of the samples of one batch to micro-batches.

    Args:
        order: positions in the batch, micro-batch after micro-batch; None: the order of the batch.
        sizes: the number of samples of each micro-batch.
        reach: number of positions to keep of each sample, in the order of the batch; None: no trimming.

    Examples:
        >>> packing = Packing([2, 0, 1], [1, 2], [3, 1, 9])
        >>> packing.longest(0, 1), packing.longest(1, 3)
        (9, 3)
    """

    order: list[int] | None
    sizes: list[int]
    reach: list[int] | None = None

    def longest(self, start: int, stop: int) -> int | None:
        """Return how many positions trimming keeps for samples start..stop of the order; None: all."""
        if self.reach is None:
            return None
        return max(self.reach[i] for i in self.indices(start, stop))

    def indices(self, start: int, stop: int) -> list[int]:
        """Return the positions in the batch of samples start..stop of the order.

        They also identify the samples' random streams.

        Examples:
            >>> Packing([2, 0, 1], [1, 2]).indices(1, 3), Packing(None, [1, 2]).indices(1, 3)
            ([0, 1], [1, 2])
        """
        return list(range(start, stop) if self.order is None else self.order[start:stop])

    def take(self, planned: Plan, start: int, stop: int) -> Any:
        """Cut samples start..stop of the order out of the batch, trimmed to the longest of them.

        The range need not be one of `sizes`.

        Raises:
            SplitError: when more than padding would be cut off, or an array cannot be cut like this.

        Examples:
            >>> from superbatch.batch.plan import plan
            >>> Packing([2, 0, 1], [1, 2]).take(plan(["a", "b", "c"]), 1, 3)
            ['a', 'b']
        """
        return planned.take(start, stop, order=self.order, longest=self.longest(start, stop))


def pack(batch: Any, samples: int, budget: TokenBudget) -> Packing:
    """Decide which samples of a batch share a micro-batch.

    Raises:
        InputError: when the lengths are not one int for each sample.
        SplitError: when one sample alone is above the budget.

    Examples:
        >>> pack({"lengths": [1, 9, 2, 8]}, 4, TokenBudget(18, padded=True, sort=True)).order
        [1, 3, 2, 0]
    """
    tokens, reach = budget.sample_lengths(batch)
    if len(tokens) != samples:
        raise InputError(
            f"{budget!r} gives {len(tokens)} lengths for a batch of {samples} samples. Pass lengths= that "
            "gives one length for each sample."
        )
    costs, fill = (reach, _fill_padded) if budget.padded else (tokens, _fill)
    _refuse_above(costs, budget.tokens)
    trimmed = reach if budget.trim else None
    if not budget.sort:
        return Packing(None, _even(costs, budget.tokens, fill), trimmed)
    if budget.padded or budget.trim:
        # Samples of similar length share a micro-batch, so that little padding is left.
        order = sorted(range(samples), key=lambda i: -reach[i])
        sizes = _even([costs[i] for i in order], budget.tokens, fill)
    else:
        order, sizes = _bins(costs, budget.tokens)
    # Without an order, micro-batches are slices of the batch, which most frameworks do not copy.
    return Packing(None if order == list(range(samples)) else order, sizes, trimmed)


def near_equal_cost(costs: Sequence[int], budget: int, *, padded: bool = False) -> list[int]:
    """Divide samples, in order, into the fewest micro-batches under a budget, near-equal in cost.

    Micro-batches are consecutive samples, and each costs at most `budget`. Their number is as small as
    possible; given this number, the cost of the most expensive one is as low as possible. A micro-batch costs
    the sum of its samples' costs; with `padded`, the number of its samples times the largest cost.

    Args:
        costs: cost of each sample (for example its tokens), ints >= 0, at least one sample.
        budget: largest cost of a micro-batch, at least 1.
        padded: every sample of a micro-batch costs as much as the largest.

    Returns:
        The number of samples of each micro-batch; their sum is len(costs).

    Raises:
        InputError: when `costs` or `budget` is not as described.
        SplitError: when one sample alone is above the budget.

    Examples:
        >>> near_equal_cost([5, 1, 1, 1, 4, 2], 8)  # costs 7 and 7, not 8 and 6
        [3, 3]
        >>> near_equal_cost([5, 1, 1, 1, 4, 2], 8, padded=True)  # costs 5, 3 and 8
        [1, 3, 2]
    """
    budget = positive_int("budget", budget)
    checked = checked_costs(costs)
    _refuse_above(checked, budget)
    return _even(checked, budget, _fill_padded if padded else _fill)


def _refuse_above(costs: list[int], budget: int) -> None:
    most = max(costs)
    if most > budget:
        raise SplitError(
            f"Sample {costs.index(most)} costs {most}, more than the budget of {budget} for a micro-batch. "
            "Raise the budget, or shorten or leave out the sample."
        )


def _even(costs: list[int], budget: int, fill: Fill) -> list[int]:
    """Return sizes of the fewest consecutive parts under the budget, the largest as small as possible."""
    fewest = len(fill(costs, budget))
    # No part can cost less than its largest sample, and one part costs at least the mean over parts.
    low, high = max(*costs, -(-sum(costs) // fewest)), budget
    # Bisection is valid: a smaller cap never needs fewer parts.
    while low < high:
        cap = (low + high) // 2
        low, high = (low, cap) if len(fill(costs, cap)) <= fewest else (cap + 1, high)
    return fill(costs, low)


def _fill(costs: list[int], cap: int) -> list[int]:
    """Fill each part up to the cap before starting the next, which gives the fewest parts."""
    sizes: list[int] = []
    size = spent = 0
    for cost in costs:
        if size and spent + cost > cap:  # `size and`: a part has at least one sample
            sizes.append(size)
            size = spent = 0
        size, spent = size + 1, spent + cost
    return [*sizes, size]


def _fill_padded(costs: list[int], cap: int) -> list[int]:
    """Fill parts as `_fill` does, with each sample of a part costing as much as the longest."""
    sizes: list[int] = []
    size = longest = 0
    for cost in costs:
        longest = max(longest, cost)
        if size and (size + 1) * longest > cap:
            sizes.append(size)
            size, longest = 0, cost
        size += 1
    return [*sizes, size]


def _bins(costs: list[int], budget: int) -> tuple[list[int], list[int]]:
    """Return order and sizes of few parts under the budget, near-equal in cost, samples in any order."""
    largest_first = sorted(range(len(costs)), key=lambda i: -costs[i])
    bins = _best_fit(costs, largest_first, budget)
    in_order = _even(costs, budget, _fill)
    if len(in_order) < len(bins):  # rare: best fit is a heuristic
        return list(range(len(costs))), in_order
    # Lower bounds: the total over the budget, and the samples above half of the budget, which never share.
    least = max(-(-sum(costs) // budget), sum(2 * cost > budget for cost in costs), 1)
    for count in range(len(bins), least - 1, -1):
        evened = _evened(costs, largest_first, count)
        if max(sum(costs[i] for i in part) for part in evened) > budget:
            break
        bins = evened  # near-equal, and sometimes one part fewer
    bins.sort(key=lambda part: -sum(costs[i] for i in part))
    return [i for part in bins for i in part], [len(part) for part in bins]


def _best_fit(costs: list[int], largest_first: list[int], budget: int) -> list[list[int]]:
    """Put each sample into the part where it leaves the least room, or into a new part if none has room."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, part), sorted
    for i in largest_first:
        at = bisect_left(rooms, (costs[i], -1))  # the smallest room that is large enough
        if at == len(rooms):
            bins.append([])
            room, part = budget, len(bins) - 1
        else:
            room, part = rooms.pop(at)
        bins[part].append(i)
        insort(rooms, (room - costs[i], part))
    return bins


def _evened(costs: list[int], largest_first: list[int], count: int) -> list[list[int]]:
    """Put each sample into the part with the least cost so far."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, part) for part in range(count)]
    for i in largest_first:
        load, part = loads[0]
        bins[part].append(i)
        heapreplace(loads, (load + costs[i], part))
    return bins
