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
from .sample_counts import contrast, counts_in, extremes, spread, uneven

_SEVERAL = 4  # samples to check if micro-batches have fewer; if they do not fit in memory, halves are checked
ENOUGH = 0.1
"""Relative difference of counts that is visible in any precision."""


def first_microbatches(pieces: MicrobatchList) -> list[Any]:
    """Return a few micro-batches with two samples or more, spread over the window.

    If their samples have nearly equal counts and others of the window do not, a micro-batch of the most
    unequal samples is included; so is one of four samples if every micro-batch has fewer, or has labels that
    all are equal or all differ, unlike those of the window.

    Args:
        pieces: micro-batches of the window.
    """
    if not pieces.microbatches:  # a rank without data
        return []
    given = pieces.to_check()
    able = [piece for piece in given if _samples(piece, pieces) > 1]
    # Evenly spaced: neighbours in a sorted dataset are alike, and a wrong weight does not show on them.
    chosen = able[:: max(1, len(able) // MOST_CHECKED)][:MOST_CHECKED]
    several = _several_samples(pieces, chosen)
    uneven_ones = _uneven_samples(pieces, [*chosen, several] if several is not None else chosen)
    more = [piece for piece in (uneven_ones, several) if piece is not None]
    if not able and not more:
        # A micro-batch of one sample cannot be cut, so two of them are joined.
        pair = pieces.pick([0, 1]) if len(pieces) > 1 and sum(pieces.samples or ()) > 1 else None
        return given if pair is None else [pair]
    return [*chosen[: MOST_CHECKED - len(more)], *more]


def with_repeated_label(samples: Sequence[int], pieces: MicrobatchList) -> list[int]:
    """Return two samples, and a third one so that two of the three share a label; without labels, the two.

    Args:
        samples: two samples, indexed as in `pieces.parts`.
        pieces: micro-batches of the window.
    """
    labels = _labels(pieces.parts(), pieces)
    mine = {labels[place] for place in samples} if labels else set()
    # With weights by class frequency the loss agrees for every pair: both labels are equally frequent in it.
    for place, label in enumerate(labels):
        if place not in samples and (label in mine) == (len(mine) > 1):
            return [*samples, place]
    return list(samples)


def _several_samples(pieces: MicrobatchList, chosen: list[Any]) -> Any:
    """Return four samples if micro-batches have fewer, or have no equal and different labels; else None.

    With weights by class frequency the loss agrees for every pair, whose two classes are equally frequent,
    and differs for more samples. So two of the four share a label if the window has such samples.
    """
    if sum(pieces.samples or ()) < 3:
        return None
    large = [piece for piece in chosen if _samples(piece, pieces) >= _SEVERAL]
    # In micro-batches of one label each, as of a sorted dataset, all classes are equally frequent too.
    if large and (not _labels(pieces.parts(), pieces) or any(_labels([piece], pieces) for piece in large)):
        return None
    picked = pieces.firsts(range(len(pieces)))
    return pieces.pick(_with_unlike_labels(picked, pieces))


def _with_unlike_labels(picked: list[int], pieces: MicrobatchList) -> list[int]:
    """Exchange one sample so that some labels are equal and some differ, if the window has such samples."""
    labels = _labels(pieces.parts(), pieces)
    mine = [labels[place] for place in picked] if labels else []
    if not 1 < len(set(mine)) < len(mine):
        alike = len(set(mine)) > 1  # all labels differ, so a second sample of one of them is needed
        for place, label in enumerate(labels):
            if place not in picked and (label in mine) == alike:
                out = max(index for index, other in enumerate(mine) if not (alike and other == label))
                return [*picked[:out], place, *picked[out + 1 :]]
    return picked


def _labels(parts: Sequence[Any], pieces: MicrobatchList) -> list[int]:
    """Return the label of each sample of micro-batches; empty if no leaf has equal and different labels."""
    found: list[int] = []
    with contextlib.suppress(SplitError, InputError):
        for leaf in leaves(parts[0], **pieces.paths):
            values = [get(part, leaf.path) for part in parts] if leaf.length is not None else []
            if values and all(map(_is_label, values)):
                labels = [int(label) for value in values for label in value.tolist()]
                # The last leaf is taken: labels mostly follow the inputs, as in (x, y).
                found = labels if 1 < len(set(labels)) < len(labels) else found
    return found


def _is_label(value: Any) -> bool:
    integer = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return integer and value.ndim == 1


def _uneven_samples(pieces: MicrobatchList, chosen: list[Any]) -> Any:
    """Return the samples that differ most in a count, if the chosen micro-batches hardly differ in it."""
    parts, paths = pieces.parts(), pieces.paths
    found = counts_in(parts[0], unsplit=paths.get("unsplit", ()), per_sample=paths.get("per_sample", ()))
    for count, values, _ in uneven(found, parts):
        most = spread(values)
        if most > 0 and max((_contrast(count.of([piece])) for piece in chosen), default=0.0) < min(
            most, ENOUGH
        ):
            return pieces.pick(extremes(values, 2))
    return None


def _contrast(counts: Any) -> float:
    return 0.0 if counts is None else contrast(counts)


def _samples(piece: Any, pieces: MicrobatchList) -> int:
    try:
        return count_samples(piece, **pieces.paths)
    except SplitError:  # this micro-batch cannot be cut, though others may be
        return 0
