"""Micro-batches that the first window's check compares with their parts."""

from __future__ import annotations

from typing import Any

from superbatch.batch.tree import count_samples
from superbatch.errors import SplitError

from ..window.microbatches import MicrobatchList
from .declared_loss import MOST_PIECES
from .sample_counts import contrast, counts_in, extremes, spread, uneven

_SEVERAL = 4  # samples: at most twice as many as a micro-batch of two has, whose memory is known to be there
ENOUGH = 0.1
"""A relative difference of counts that a check tells apart in any precision."""


def first_pieces(pieces: MicrobatchList) -> list[Any]:
    """Return a few micro-batches of two samples or more, spread over the window.

    Where their samples count alike, and others of the window do not, those take the place of one. So do four
    samples where each micro-batch has two or three.

    Args:
        pieces: of the window.
    """
    given = pieces.to_check()
    able = [piece for piece in given if _samples(piece, pieces) > 1]
    if not able:
        pair = pieces.pick([0, 1]) if len(pieces) > 1 and sum(pieces.samples or ()) > 1 else None
        return given if pair is None else [pair]
    chosen = able[:: max(1, len(able) // MOST_PIECES)][:MOST_PIECES]
    picked = (_uneven_samples(pieces, chosen), _several_samples(pieces, given))
    more = [piece for piece in picked if piece is not None]
    return [*chosen[: MOST_PIECES - len(more)], *more]


def _several_samples(pieces: MicrobatchList, given: list[Any]) -> Any:
    """Four samples where micro-batches have two or three; None elsewhere.

    A loss may agree for each pair and for no more samples: two classes of a pair are equally frequent.
    """
    most = max(pieces.samples or [0])
    if not 2 <= most < _SEVERAL or sum(pieces.samples or ()) < _SEVERAL or given is not pieces.microbatches:
        return None
    return pieces.pick(pieces.firsts(range(len(pieces))))


def _uneven_samples(pieces: MicrobatchList, chosen: list[Any]) -> Any:
    """The samples that count least and most, if the chosen pieces hardly show that there are any."""
    parts, paths = pieces.parts(), pieces.paths
    found = counts_in(parts[0], whole=paths.get("whole", ()), per_sample=paths.get("per_sample", ()))
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
