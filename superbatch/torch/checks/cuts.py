"""Cuts of a micro-batch into the parts that the check of the loss compares with it."""

from __future__ import annotations

from math import gcd

FEW = 8  # up to this many samples are also cut into single ones; of more, four single ones and the rest

Order = tuple[int, ...]
"""Positions of the samples of a part in the micro-batch."""


def first_part(samples: int) -> int:
    """Return how many samples the first part of a checked micro-batch has: near a third of them, at least 1.

    Examples:
        >>> [first_part(samples) for samples in (2, 3, 4, 6, 8, 9, 12)]
        [1, 1, 1, 1, 3, 2, 5]
    """
    # Near a third: with two halves, a mean that ignores the numbers of samples would pass.
    third = -(-samples // 3)
    # Without a common divisor: otherwise all parts may have the label frequencies of the micro-batch. Then a
    # loss with weights by class frequency would agree with a plain mean by chance.
    near = (third + sign * distance for distance in range(third) for sign in (-1, 1))
    return next((cut for cut in near if gcd(cut, samples) == 1), 1)


def orders(samples: int, turn: int) -> list[tuple[Order, ...]]:
    """Return two cuts of a micro-batch: after about a third, and into single samples.

    A loss over the hardest samples may agree by chance with one cut, but not with single samples. Of more
    than `FEW` samples, four are single: for an even `turn` (index of the micro-batch) the first ones, else
    the last.

    Examples:
        >>> orders(3, 0)
        [((0,), (1, 2)), ((0,), (1,), (2,))]
        >>> [len(parts) for parts in orders(9, 0)[1]], [len(parts) for parts in orders(9, 1)[1]]
        ([1, 1, 1, 1, 5], [5, 1, 1, 1, 1])
    """
    every = tuple(range(samples))
    third = first_part(samples)
    cuts: list[tuple[Order, ...]] = [(every[:third], every[third:])]
    single = [(position,) for position in every]
    if 2 < samples <= FEW:
        cuts.append(tuple(single))
    elif samples > FEW and turn % 2:
        cuts.append((every[:-4], *single[-4:]))
    elif samples > FEW:
        cuts.append((*single[:4], every[4:]))
    return cuts


def other_orders(samples: int) -> list[tuple[Order, ...]]:
    """Return cuts without single samples, for losses that are undefined for one sample.

    Examples:
        >>> other_orders(4)
        [((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0, 1), (2, 3))]
    """
    if samples < 4:
        return []
    every = tuple(range(samples))
    half = samples // 2
    first = max(1, half // 2)
    # One part has both ends, the other the middle.
    outer = (*every[:first], *every[samples - (half - first) :])
    cuts = [
        (every[::2], every[1::2]),
        (outer, tuple(position for position in every if position not in outer)),
    ]
    # Keep neighbours together, unlike the first two cuts: `extremes` sorts samples by their counts.
    near = 2 if samples < 6 else 3
    return [*cuts, (every[:near], every[near:])]
