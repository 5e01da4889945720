"""Samples of different lengths in different micro-batches or on different ranks, never in one micro-batch.

Within a micro-batch all samples have one length, so that a mean over all entries and a mean over samples are
the same number. Which of the two a loss is shows in the entries that it divides by.
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
    """Return the entries that each sample of a micro-batch has, by the path of the leaf.

    Args:
        part: a micro-batch.
        paths: `unsplit` and `per_sample` declarations.

    Examples:
        >>> lengths_in({"x": torch.ones(2, 5), "y": torch.ones(2)}, {})
        {'x': 5}
    """
    try:
        found = {leaf.path: get(part, leaf.path) for leaf in leaves(part, **paths) if leaf.length is not None}
    except (SplitError, InputError, TypeError, LookupError):
        return {}
    return {path: value[0].numel() for path, value in found.items() if _has_length(value)}


def ragged(parts: Sequence[Any], known: Sequence[str]) -> tuple[int, int] | None:
    """Return the micro-batches with the shortest and the longest samples; None if all have one length.

    Args:
        parts: of a window.
        known: paths of leaves with a length.

    Examples:
        >>> ragged([torch.ones(2, 5), torch.ones(1, 3)], [""])
        (1, 0)
    """
    for path in known if len(parts) > 1 else ():
        shapes = _shapes(parts, path)
        if len(set(shapes)) < 2:  # mostly
            continue
        # Without the first dimension: micro-batches may differ in their number of samples.
        entries = [shape[1:].numel() for shape in shapes]
        if min(entries) < max(entries):
            return entries.index(min(entries)), entries.index(max(entries))
    return None


def check_lengths(problem: Problem, pair: Pair, *, frozen: Sequence[nn.Module]) -> None:
    """Check that a loss that is a mean over all entries of a micro-batch is declared as one.

    Args:
        problem: a mean, weighed by samples or by a function.
        pair: two micro-batches with samples of different lengths.
        frozen: modules to run in evaluation mode.

    Raises:
        LossSpecError: samples are declared to count alike, or by a function that counts other things than
            samples or those entries.
    """
    paths = {"unsplit": problem.unsplit, "per_sample": problem.per_sample}
    of_pair = [lengths_in(one, paths) for one in pair]
    # A leaf that one of the two lacks counts as equal.
    apart = {path: (n, of_pair[1][path]) for path, n in of_pair[0].items() if of_pair[1].get(path, n) != n}
    try:
        first, second = (plan(one, **paths) for one in pair)
    except SplitError:  # such as flattened patches: no samples can be taken from it
        return
    # The same sample twice doubles a divisor that counts entries; another length then changes it.
    tried = [first.take(0, 1), first.take(0, 2, order=(0, 0)), second.take(0, 2, order=(0, 0))]
    seen = divisions_of(problem, tried, frozen=frozen) if apart else None
    if seen is None:
        return
    entries = entries_per_sample(seen[0], seen[1], seen[2], list(apart.values()))
    if entries is None:
        return
    # The labels, as losses are mostly means over labels; of several leaves the last one.
    labels = [path for path in apart if not get(pair[0], path).is_floating_point()]
    path = (labels or list(apart))[-1]
    if callable(problem.weight):
        declared = _times(problem.weight, tried[0], second.take(0, 1))
        _check_weights(declared, ratios(*seen), path, apart[path])
        return
    few, many = sorted(apart[path])
    # One entry less in each sample: a causal language model shifts its labels.
    shift = ", shift=True" if entries == apart[path][0] - 1 else ""
    remedy = (
        f"count_tokens({path!r}{shift})" if labels else f"a function that returns the entries of {path!r}"
    )
    raise LossSpecError(
        f"loss_fn returns a mean over all entries of a micro-batch, and samples of {path!r} have {few} of "
        f"them in one micro-batch and {many} in another: where samples count alike, an entry of a short one "
        f"counts more. Instead pass weight={remedy}, or a function that returns the number of samples if "
        "they are to count alike."
    )


def _times(weigh: Callable[[Any], Any], one: Any, other: Any) -> float | None:
    """Return how many times the weight of a sample is that of another one; None where one has none."""
    first, second = float(weigh(one)), float(weigh(other))
    return first / second if first > 0 and second > 0 else None


def _check_weights(
    declared: float | None, right: Sequence[float], path: str, entries: tuple[int, int]
) -> None:
    """Check that samples of two lengths weigh alike, or as much as the loss divides by."""
    if declared is None or not right:
        return
    # 1.0: samples that count alike are a loss of their own, and a user may want it.
    if any(math.isclose(declared, each, rel_tol=1e-6) for each in (1.0, *right)):
        return
    raise LossSpecError(
        f"weight= gives a sample with {entries[0]} entries of {path!r} {declared:.4g} times the weight of "
        f"one with {entries[1]}, but loss_fn is a mean over all entries of a micro-batch and divides by "
        f"{right[0]:.4g} times as many. Return what the loss is divided by, for example with count_tokens, "
        "or the number of samples if they are to count alike."
    )


def _shapes(parts: Sequence[Any], path: str) -> list[torch.Size]:
    """The shapes of a leaf in each micro-batch; none where it is no tensor in some of them."""
    try:
        if "." in path or not path:
            return [get(part, path).shape for part in parts]
        key = int(path) if type(parts[0]) is tuple else path  # without a call of ours for each micro-batch
        return list(map(_shape, map(itemgetter(key), parts)))
    except (TypeError, ValueError, LookupError, AttributeError):
        return []


def _has_length(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.ndim > 1 and len(value) > 0
