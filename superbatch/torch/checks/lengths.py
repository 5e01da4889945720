"""Check of losses whose samples have one length within a micro-batch, but not across micro-batches or ranks.

In a micro-batch of equal lengths, a mean over all entries equals a mean over samples. The divisors in the
graph of the loss show which of the two it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.batch.tree import get, leaves, plan
from superbatch.errors import InputError, LossSpecError, SplitError

from .declared_loss import divisions_of
from .divisions import entries_per_sample, ratios
from .probing.problem import Problem

_shape = attrgetter("shape")
Pair = tuple[Any, Any]


def lengths_in(part: Any, paths: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of entries of one sample in each leaf of a micro-batch, by the leaf's path.

    `paths` are the options `unsplit` and `per_sample`.

    Examples:
        >>> lengths_in({"x": torch.ones(2, 5), "y": torch.ones(2)}, {})
        {'x': 5}
    """
    try:
        found = {leaf.path: get(part, leaf.path) for leaf in leaves(part, **paths) if leaf.length is not None}
    except (SplitError, InputError, TypeError, LookupError):
        return {}
    return {path: value[0].numel() for path, value in found.items() if _has_length(value)}


def ragged(parts: Sequence[Any], paths: Sequence[str]) -> tuple[int, int] | None:
    """Return the indices of the micro-batches with the shortest and longest samples; None if all are equal.

    `paths` are those of leaves with a length.

    Examples:
        >>> ragged([torch.ones(2, 5), torch.ones(1, 3)], [""])
        (1, 0)
    """
    for path in paths if len(parts) > 1 else ():
        shapes = _shapes(parts, path)
        if len(set(shapes)) < 2:  # the usual case
            continue
        # Without the first dimension: micro-batches may have different numbers of samples.
        entries = [shape[1:].numel() for shape in shapes]
        if min(entries) < max(entries):
            return entries.index(min(entries)), entries.index(max(entries))
    return None


def check_lengths(problem: Problem, pair: Pair, *, frozen: Sequence[nn.Module]) -> None:
    """Check that the weight of a mean over all entries of a micro-batch counts these entries, or samples.

    The problem has ``reduction="mean"``, and weights by samples or by a function. The samples of the two
    micro-batches in `pair` have different lengths.

    Raises:
        LossSpecError: the loss is a mean over all entries, but the declared weight is left out, or counts
            something other than entries or samples.
    """
    paths = problem.paths
    of_pair = [lengths_in(one, paths) for one in pair]
    # A leaf that only one of the two has is not compared.
    apart = {path: (n, of_pair[1][path]) for path, n in of_pair[0].items() if of_pair[1].get(path, n) != n}
    try:
        first, second = (plan(one, **paths) for one in pair)
    except SplitError:  # e.g. flattened patches: no samples can be taken from it
        return
    # A sample taken twice doubles a divisor that counts entries; a sample of another length changes it too.
    tried = [first.take(0, 1), first.take(0, 2, order=(0, 0)), second.take(0, 2, order=(0, 0))]
    seen = divisions_of(problem, tried, frozen=frozen) if apart else None
    if seen is None:
        return
    entries = entries_per_sample(seen[0], seen[1], seen[2], list(apart.values()))
    if entries is None:
        return
    # Prefer labels, because most losses are means over labels; of several leaves take the last one.
    labels = [path for path in apart if not get(pair[0], path).is_floating_point()]
    path = (labels or list(apart))[-1]
    if callable(problem.weight):
        declared = _weight_ratio(problem.weight, tried[0], second.take(0, 1))
        _check_weights(declared, ratios(*seen), path, apart[path])
        return
    few, many = sorted(apart[path])
    # One entry less in each sample: a causal language model shifts its labels.
    shift = ", shift=True" if entries == apart[path][0] - 1 else ""
    remedy = (
        f"count_tokens({path!r}{shift})" if labels else f"a function that returns the entries of {path!r}"
    )
    raise LossSpecError(
        f"loss_fn returns a mean over all entries of a micro-batch, but samples of {path!r} have {few} "
        f"entries in one micro-batch and {many} in another, so with equal weights per sample, entries of "
        f"short samples would weigh more. Pass weight={remedy}, or, to keep equal weights per sample, a "
        "function that returns the number of samples."
    )


def _weight_ratio(weigh: Callable[[Any], Any], one: Any, other: Any) -> float | None:
    """Return the ratio of the weights of two samples; None if one of them has weight 0."""
    first, second = float(weigh(one)), float(weigh(other))
    return first / second if first > 0 and second > 0 else None


def _check_weights(
    declared: float | None, right: Sequence[float], path: str, entries: tuple[int, int]
) -> None:
    """Check that two samples have equal weights, or weights in the ratio of the loss's divisors."""
    if declared is None or not right:
        return
    # 1.0: a user may want equal weights per sample.
    if any(math.isclose(declared, each, rel_tol=1e-6) for each in (1.0, *right)):
        return
    raise LossSpecError(
        f"weight= gives a sample with {entries[0]} entries of {path!r} {declared:.4g} times the weight of "
        f"a sample with {entries[1]} entries, but the mean over all entries that loss_fn returns needs "
        f"{right[0]:.4g} times the weight. Return the divisor of the loss, for example with count_tokens, or "
        "the number of samples for equal weights per sample."
    )


def _shapes(parts: Sequence[Any], path: str) -> list[torch.Size]:
    """Return the shape of a leaf in each micro-batch; an empty list if it is no tensor in one of them."""
    try:
        if "." in path or not path:
            return [get(part, path).shape for part in parts]
        key = int(path) if type(parts[0]) is tuple else path  # fast path: one C call for all micro-batches
        return list(map(_shape, map(itemgetter(key), parts)))
    except (TypeError, ValueError, LookupError, AttributeError):
        return []


def _has_length(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.ndim > 1 and len(value) > 0
