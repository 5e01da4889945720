"""Counts that are equal for all samples of a rank, and differ between ranks.

No rank sees anything unequal. A number in the sum that every window makes shows that ranks differ; then two
of them send one sample each, and all ranks check the loss on both.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from superbatch.batch.tree import map_arrays, plan
from superbatch.errors import InputError, SplitError

from .sample_counts import Count

Levels = Mapping[str, float]
_BITS = 20  # its square summed over the ranks stays exact in float64


def levels_of(counts: Sequence[Count], part: Any) -> dict[str, float]:
    """Return the counts of a micro-batch's first sample, by the name of the count.

    Args:
        counts: to compare; those that differ by chance, such as of the class 0, are left out.
        part: a micro-batch.

    Examples:
        >>> import torch
        >>> levels_of([Count("y", -100)], {"y": torch.tensor([[1, -100, -100], [2, 2, 2]])})
        {"'y' (without -100)": 1.0}
    """
    # The share of a row without its padding differs between any two samples.
    found = {str(count): count.of_first(part) for count in counts if not count.unpadded}
    return {name: value for name, value in found.items() if value is not None}


def digest(levels: Levels) -> int:
    """Return a hash of levels in 20 bits; 0 without levels.

    Examples:
        >>> digest({}), digest({"y": 1.0}) != digest({"y": 2.0})
        (0, True)
    """
    # Not hash(), which differs between processes.
    return zlib.crc32(repr(sorted(levels.items())).encode()) % (1 << _BITS) if levels else 0


def apart(every: Sequence[Levels], seen: Levels) -> tuple[list[str], tuple[int, int] | None]:
    """Return the counts in which ranks differ, and the ranks with the least and most of the most unequal one.

    Args:
        every: the levels of each rank.
        seen: the largest contrast of each count that was compared already.

    Examples:
        >>> apart([{"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 8.0}], {})
        (['b'], (0, 1))
    """
    # A count that some rank lacks is not compared.
    names = [name for name in sorted(every[0]) if all(name in levels for levels in every)]
    names = [name for name in names if len({levels[name] for levels in every}) > 1]
    best, chosen = 0.0, None
    for name in names:
        values = [levels[name] for levels in every]
        some = [value for value in values if value > 0]
        contrast = 1 - min(some) / max(some) if some else 0.0
        # Twice as unequal as before, or every window would bring news.
        if contrast > max(best, 2 * seen.get(name, 0.0)):
            best, chosen = contrast, (values.index(min(some)), values.index(max(some)))
    return names, chosen


def first_sample(part: Any, paths: Mapping[str, Any]) -> Any:
    """Return a copy of a micro-batch's first sample on the host; None where it cannot be taken."""
    try:
        # On the host, since it is pickled for the other ranks.
        return map_arrays(_on_host, plan(part, **paths).take(0, 1))
    except (SplitError, InputError):
        return None


def _on_host(array: Any) -> Any:
    return array.detach().cpu().clone() if isinstance(array, Tensor) else array.copy()
