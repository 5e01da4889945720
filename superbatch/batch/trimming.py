# pyright: strict
"""Padding cut off: of leaves of shape (samples, length, ...), what is behind a micro-batch's longest sample.

Only padding is ever cut off: what lies behind must be one value (for each feature), or numbers that count on
(positions). Anything else means that the stated lengths are not those of this leaf, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InputError, SplitError
from .containers import array_shape, kind_of
from .packed import Samples, Take

Rows = Callable[[Any, Samples], Any]


def trim_take(node: Any, path: str, rows: Rows) -> Take:
    """Pieces of a padded array, cut to the longest sample of each.

    Args:
        node: an array of shape (samples, length, ...).
        path: where it is in the batch.
        rows: rows(array, samples) takes samples out of an array.

    Returns:
        take(samples, longest).

    Examples:
        >>> trim_take(memoryview(b"abc"), "x", lambda node, samples: bytes(node))(range(3), None)
        b'abc'
    """

    def take(samples: Samples, longest: int | None) -> Any:
        if longest is None or longest >= node.shape[1]:
            return rows(node, samples)
        longest = max(longest, 1)  # samples without any token still have a shape
        rest = rows(node[:, longest:], samples)
        if not _is_padding(rest):
            raise _more_than_padding(path, longest, node.shape[1])
        # As a list, which copies: loss functions flatten labels with .view(-1), which a cut view refuses.
        return rows(node[:, :longest], list(samples))

    return take


def check_trimmed(node: Any, path: str, *, packed: bool) -> int:
    """Check that a part can be trimmed.

    Args:
        node: the part.
        path: where it is in the batch.
        packed: whether it belongs to packed sequences.

    Returns:
        Its length, padding included.

    Raises:
        InputError: when it is no array of shape (samples, length, ...).

    Examples:
        >>> check_trimmed([1, 2], "labels", packed=False)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        superbatch.errors.InputError: trim=('labels',) names a list, ...
    """
    shape = array_shape(node)
    if shape is not None and len(shape) >= 2 and not packed:
        return shape[1]
    named = f"a {kind_of(node).__name__}" if shape is None else f"an array of shape {tuple(shape)}"
    wrong = (
        "packed sequences have no padding"
        if packed
        else "only arrays of shape (samples, length, ...) have padding that can be cut off"
    )
    raise InputError(
        f"trim=({path!r},) names {named}, and {wrong}. Name the padded arrays, such as input_ids and labels."
    )


def check_widths(widths: Mapping[str, int]) -> None:
    """Check that all trimmed parts are padded to the same length.

    Args:
        widths: the length of each, padding included, by path.

    Raises:
        InputError: when they differ, so that one list of lengths cannot be meant for all.

    Examples:
        >>> check_widths({"ids": 7, "labels": 7})
    """
    if len(set(widths.values())) > 1:
        listed = ", ".join(f"{path!r}: {width}" for path, width in widths.items())
        raise InputError(
            f"trim= names parts that are padded to different lengths ({listed}), so a cut behind a sample's "
            "end in one of them is no cut in another. Name only parts of which lengths= counts the "
            "positions."
        )


def _is_padding(rest: Any) -> bool:
    """Return whether everything has the value of the last position, or every row counts on (positions)."""
    last = rest[:1, -1:]
    if bool(((rest == last) | ((rest != rest) & (last != last))).all()):  # NaN may pad too
        return True
    return rest.shape[1] > 1 and bool((rest[:, 1:] == rest[:, :-1] + 1).all())


def _more_than_padding(path: str, longest: int, width: int) -> SplitError:
    return SplitError(
        f"trim=({path!r},) would lose values: the longest sample of a micro-batch has {longest} of {width} "
        f"positions, and behind them {path!r} holds more than padding. Check that lengths= counts every "
        f"position of {path!r} that matters, or leave it out of trim=."
    )
