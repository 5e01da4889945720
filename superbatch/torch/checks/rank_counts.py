"""Counts that are equal for all samples of each rank, but differ between ranks.

No single rank can find such a difference. A hash in the window's all-reduce shows that ranks differ. Then two
ranks send one sample each, and all ranks check the loss on both samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from superbatch.batch.tree import map_arrays, plan
from superbatch.errors import InputError, SplitError

from .sample_counts import Count

CountsByName = Mapping[str, float]
_BITS = 20  # of the hash: the sum of its squares over the ranks is exact in float64


def first_sample_counts(counts: Sequence[Count], part: Any) -> dict[str, float]:
    """Return the counts of a micro-batch's first sample, by name, without those that differ by chance.

    Examples:
        >>> import torch
        >>> first_sample_counts([Count("y", -100)], {"y": torch.tensor([[1, -100, -100], [2, 2, 2]])})
        {"'y' (without -100)": 1.0}
    """
    # The unpadded share of a row differs between any two samples, so it is left out.
    found = {str(count): count.of_first(part) for count in counts if not count.unpadded}
    return {name: value for name, value in found.items() if value is not None}


def digest(counts: CountsByName) -> int:
    """Return a 20-bit hash of a rank's counts; 0 without counts.

    Examples:
        >>> digest({}), digest({"y": 1.0}) != digest({"y": 2.0})
        (0, True)
    """
    # Not hash(): it differs between processes.
    return zlib.crc32(repr(sorted(counts.items())).encode()) % (1 << _BITS) if counts else 0


def differing_counts(
    by_rank: Sequence[CountsByName], seen: CountsByName
) -> tuple[list[str], tuple[int, int] | None]:
    """Return the names of the counts that differ between ranks, and the two ranks to compare.

    These ranks have the lowest and the highest value of the most unequal count; None if no contrast exceeds
    twice that of earlier checks, `seen`.

    Examples:
        >>> differing_counts([{"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 8.0}], {})
        (['b'], (0, 1))
    """
    # A count that one rank lacks is not compared.
    names = [name for name in sorted(by_rank[0]) if all(name in counts for counts in by_rank)]
    names = [name for name in names if len({counts[name] for counts in by_rank}) > 1]
    best, chosen = 0.0, None
    for name in names:
        values = [counts[name] for counts in by_rank]
        some = [value for value in values if value > 0]
        contrast = 1 - min(some) / max(some) if some else 0.0
        # More than twice the contrast of earlier checks, or every window would be checked again.
        if contrast > max(best, 2 * seen.get(name, 0.0)):
            best, chosen = contrast, (values.index(min(some)), values.index(max(some)))
    return names, chosen


def first_sample(part: Any, paths: Mapping[str, Any]) -> Any:
    """Return a copy of a micro-batch's first sample on the host; None if it cannot be taken."""
    try:
        # On the host: it is pickled for the other ranks.
        return map_arrays(_on_host, plan(part, **paths).take(0, 1))
    except (SplitError, InputError):
        return None


def _on_host(array: Any) -> Any:
    return array.detach().cpu().clone() if isinstance(array, Tensor) else array.copy()
