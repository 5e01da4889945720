# pyright: strict
"""Removal of padding after the longest sample of a micro-batch, in leaves of shape (samples, length, ...).

Only padding is removed: the values after the longest sample must be one constant (for each feature), or
consecutive numbers (positions). Any other values raise an error, as the declared lengths are then not those
of this leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InputError, SplitError
from .containers import array_shape, kind_of
from .packed import Samples, Take

Rows = Callable[[Any, Samples], Any]


def trim_take(node: Any, path: str, rows: Rows) -> Take:
    """Return a function that cuts a padded array to the longest sample of a micro-batch.

    Examples:
        >>> trim_take(memoryview(b"abc"), "x", lambda node, samples: bytes(node))(range(3), None)
        b'abc'
    """

    def take(samples: Samples, longest: int | None) -> Any:
        if longest is None or longest >= node.shape[1]:
            return rows(node, samples)
        longest = max(longest, 1)  # a length of 0 would break models if no sample has a token
        rest = rows(node[:, longest:], samples)
        if not _is_padding(rest):  # checked for every micro-batch: only there the cut positions are known
            raise _more_than_padding(path, longest, node.shape[1])
        # A list copies. A view would not be contiguous, and labels.view(-1) in a loss function would raise.
        return rows(node[:, :longest], list(samples))

    return take


def check_trimmed(node: Any, path: str, *, packed: bool) -> int:
    """Check that a part can be trimmed, and return its length, padding included.

    Raises:
        InputError: when it is not an array of shape (samples, length, ...).

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
        f"trim=({path!r},) names {named}, and {wrong}. Pass the paths of padded arrays, such as "
        'trim=("input_ids", "labels").'
    )


def check_widths(widths: Mapping[str, int]) -> None:
    """Check that all trimmed parts are padded to the same length.

    Raises:
        InputError: when they differ, so one list of lengths cannot apply to all.

    Examples:
        >>> check_widths({"ids": 7, "labels": 7})
    """
    if len(set(widths.values())) > 1:
        listed = ", ".join(f"{path!r}: {width}" for path, width in widths.items())
        raise InputError(
            f"trim= names parts that are padded to different lengths: {listed}. Pass only parts that are "
            "padded to the length that lengths= refers to."
        )


def _is_padding(rest: Any) -> bool:
    """Return True if all values equal that of the last position, or each row has consecutive numbers."""
    last = rest[:1, -1:]
    if bool(((rest == last) | ((rest != rest) & (last != last))).all()):  # NaN may pad too
        return True
    # Position ids count on over padding.
    return rest.shape[1] > 1 and bool((rest[:, 1:] == rest[:, :-1] + 1).all())


def _more_than_padding(path: str, longest: int, width: int) -> SplitError:
    return SplitError(
        f"trim=({path!r},) would lose values: the longest sample of a micro-batch has {longest} of {width} "
        f"positions, and {path!r} holds more than padding after them. Correct lengths= so that it counts "
        f"every used position of {path!r}, or leave it out of trim=."
    )
