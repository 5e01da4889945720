"""Choose the micro-batches that the check of the first window compares with their parts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from superbatch.batch.tree import count_samples, get, leaves
from superbatch.errors import InputError, SplitError

from ..window.microbatches import MicrobatchList
from .declared_loss import MOST_CHECKED
from .sample_counts import contrast_of_cut, contrast_of_extremes, counts_in, extremes, uneven

_SEVERAL = 4  # samples to check if micro-batches have fewer; if they do not fit in memory, halves are checked
ENOUGH = 0.1
"""Relative difference of counts from which a wrong weight is visible in any precision."""


def first_microbatches(window: MicrobatchList) -> list[Any]:
    """Return a few micro-batches with two samples or more, spread over the window.

    Up to two others are added if these cannot reveal a wrong weight:

    * the most unequal samples of the window, if all chosen ones have nearly equal counts;
    * four samples, if every micro-batch has fewer, or if in each one the labels are all equal or all
      different.
    """
    if not window.microbatches:  # a rank without data
        return []
    given = window.to_check()
    divisible = [microbatch for microbatch in given if _samples(microbatch, window) > 1]
    # Evenly spaced: neighbours in a sorted dataset are alike, and a wrong weight does not show on them.
    chosen = divisible[:: max(1, len(divisible) // MOST_CHECKED)][:MOST_CHECKED]
    several = _several_samples(window, chosen)
    unequal = _unequal_samples(window, [*chosen, several] if several is not None else chosen)
    more = [microbatch for microbatch in (unequal, several) if microbatch is not None]
    if not divisible and not more:
        # A micro-batch of one sample cannot be cut, so two of them are joined.
        pair = window.pick([0, 1]) if len(window) > 1 and sum(window.samples or ()) > 1 else None
        return given if pair is None else [pair]
    return [*chosen[: MOST_CHECKED - len(more)], *more]


def with_repeated_label(samples: Sequence[int], window: MicrobatchList) -> list[int]:
    """Add a third sample to two, so that exactly two of the three share a label; without labels, add none.

    Samples are given by their index in `window.source_batches`.
    """
    labels = _labels(window.source_batches(), window)
    chosen_labels = {labels[sample] for sample in samples} if labels else set()
    # With weights by class frequency the loss agrees for every pair: both labels are equally frequent in it.
    for sample, label in enumerate(labels):
        if sample not in samples and (label in chosen_labels) == (len(chosen_labels) > 1):
            return [*samples, sample]
    return list(samples)


def _several_samples(window: MicrobatchList, chosen: list[Any]) -> Any:
    """Return a micro-batch of four samples if those chosen cannot reveal weights by class frequency.

    With such weights the loss of every pair agrees, because its two classes are equally frequent. So two of
    the four samples share a label, if the window has such samples.

    Returns:
        The micro-batch; None if the window has fewer than three samples. Also None if a chosen micro-batch
        has four samples or more, and either repeats some of its labels or the window has no labels.
    """
    if sum(window.samples or ()) < 3:
        return None
    large = [microbatch for microbatch in chosen if _samples(microbatch, window) >= _SEVERAL]
    # In micro-batches of one label each, as of a sorted dataset, all classes are equally frequent too.
    if large and (
        not _labels(window.source_batches(), window)
        or any(_labels([microbatch], window) for microbatch in large)
    ):
        return None
    picked = window.spread_samples(range(len(window)))
    return window.pick(_with_unlike_labels(picked, window))


def _with_unlike_labels(picked: list[int], window: MicrobatchList) -> list[int]:
    """Exchange one sample so that some labels are equal and some differ, if the window has such samples."""
    labels = _labels(window.source_batches(), window)
    chosen_labels = [labels[sample] for sample in picked] if labels else []
    if not 1 < len(set(chosen_labels)) < len(chosen_labels):
        alike = len(set(chosen_labels)) > 1  # all labels differ, so a second sample of one of them is needed
        for sample, label in enumerate(labels):
            if sample not in picked and (label in chosen_labels) == alike:
                out = max(
                    index for index, other in enumerate(chosen_labels) if not (alike and other == label)
                )
                return [*picked[:out], sample, *picked[out + 1 :]]
    return picked


def _labels(parts: Sequence[Any], window: MicrobatchList) -> list[int]:
    """Return the label of each sample of micro-batches; empty if no leaf has labels of which some repeat."""
    found: list[int] = []
    with contextlib.suppress(SplitError, InputError):
        for leaf in leaves(parts[0], **window.paths):
            values = [get(part, leaf.path) for part in parts] if leaf.length is not None else []
            if values and all(map(_is_label, values)):
                labels = [int(label) for value in values for label in value.tolist()]
                # The last leaf is taken: labels mostly follow the inputs, as in (x, y).
                found = labels if 1 < len(set(labels)) < len(labels) else found
    return found


def _is_label(value: Any) -> bool:
    integer = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return integer and value.ndim == 1


def _unequal_samples(window: MicrobatchList, chosen: list[Any]) -> Any:
    """Return the samples with the most unequal counts, if counts in the chosen micro-batches are alike."""
    parts, paths = window.source_batches(), window.paths
    found = counts_in(parts[0], unsplit=paths.get("unsplit", ()), per_sample=paths.get("per_sample", ()))
    for count, values, _ in uneven(found, parts):
        most = contrast_of_extremes(values)
        if most > 0 and max(
            (_contrast_of_cut(count.of([microbatch])) for microbatch in chosen), default=0.0
        ) < min(most, ENOUGH):
            return window.pick(extremes(values, 2))
    return None


def _contrast_of_cut(counts: Any) -> float:
    return 0.0 if counts is None else contrast_of_cut(counts)


def _samples(microbatch: Any, window: MicrobatchList) -> int:
    try:
        return count_samples(microbatch, **window.paths)
    except SplitError:  # this micro-batch cannot be cut, though others may be
        return 0
