"""Micro-batches that the first window's check compares with their parts."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from superbatch.batch.tree import count_samples, get, leaves
from superbatch.errors import InputError, SplitError

from ..window.microbatches import MicrobatchList
from .declared_loss import MOST_PIECES
from .sample_counts import contrast, counts_in, extremes, spread, uneven

_SEVERAL = 4  # samples, where micro-batches have fewer; without the memory for them, halves are checked
ENOUGH = 0.1
"""Relative difference of counts that shows in any precision."""


def first_pieces(pieces: MicrobatchList) -> list[Any]:
    """Return a few micro-batches of two samples or more, spread over the window.

    Where their samples count alike and others of the window do not, those take the place of one micro-batch;
    so do four samples where every micro-batch has fewer.

    Args:
        pieces: the micro-batches of the window.
    """
    if not pieces.microbatches:  # of a rank without data
        return []
    given = pieces.to_check()
    able = [piece for piece in given if _samples(piece, pieces) > 1]
    # Evenly spaced: in a sorted dataset neighbours are alike and show no wrong weight.
    chosen = able[:: max(1, len(able) // MOST_PIECES)][:MOST_PIECES]
    several = _several_samples(pieces, able)
    uneven_ones = _uneven_samples(pieces, [*chosen, several] if several is not None else chosen)
    more = [piece for piece in (uneven_ones, several) if piece is not None]
    if not able and not more:
        # Micro-batches of one sample have no parts to be compared with, so two of them are joined.
        pair = pieces.pick([0, 1]) if len(pieces) > 1 and sum(pieces.samples or ()) > 1 else None
        return given if pair is None else [pair]
    return [*chosen[: MOST_PIECES - len(more)], *more]


def _several_samples(pieces: MicrobatchList, able: list[Any]) -> Any:
    """Return four samples where micro-batches have fewer, else None.

    A loss may agree for every pair and for no more samples, e.g. weights by class frequency: two classes of a
    pair are equally frequent. So two samples share a label where the window allows it.
    """
    if sum(pieces.samples or ()) < 3 or any(_samples(piece, pieces) >= _SEVERAL for piece in able):
        return None
    picked = pieces.firsts(range(len(pieces)))
    return pieces.pick(_with_unlike_labels(picked, pieces))


def _with_unlike_labels(picked: list[int], pieces: MicrobatchList) -> list[int]:
    """Exchange a sample so that some labels are alike and some are not, where the window has such labels."""
    labels = _labels(pieces)
    mine = [labels[place] for place in picked] if labels else []
    if not 1 < len(set(mine)) < len(mine):
        alike = len(set(mine)) > 1  # all are unlike: one that is there already is wanted
        for place, label in enumerate(labels):
            if place not in picked and (label in mine) == alike:
                out = max(index for index, other in enumerate(mine) if not (alike and other == label))
                return [*picked[:out], place, *picked[out + 1 :]]
    return picked


def _labels(pieces: MicrobatchList) -> list[int]:
    """Return the label of each sample, in the order of `parts`; empty without a leaf that repeats labels."""
    parts = pieces.parts()
    found: list[int] = []
    with contextlib.suppress(SplitError, InputError):
        for leaf in leaves(parts[0], **pieces.paths):
            values = [get(part, leaf.path) for part in parts] if leaf.length is not None else []
            if values and all(map(_is_label, values)):
                labels = [int(label) for value in values for label in value.tolist()]
                # A later leaf wins: labels mostly stand behind the inputs, e.g. (x, y).
                found = labels if 1 < len(set(labels)) < len(labels) else found
    return found


def _is_label(value: Any) -> bool:
    integer = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return integer and value.ndim == 1


def _uneven_samples(pieces: MicrobatchList, chosen: list[Any]) -> Any:
    """Return the samples that count least and most, if the chosen pieces hardly differ in that count."""
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
    except SplitError:  # some micro-batches may be cut, others not
        return 0
