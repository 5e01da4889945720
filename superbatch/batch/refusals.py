# pyright: strict
"""Errors about a batch. Each text names the paths, the lengths or types, and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..errors import InputError, SplitError
from .containers import array_shape, is_record, is_scalar, is_torch_packed_sequence, kind_of
from .paths import ABSENT, Leaf, find, listed_paths

# Exceptions of frameworks for arrays that cannot be sliced: sparse and nested tensors.
NOT_SLICED: Final = (RuntimeError, NotImplementedError, TypeError, IndexError, KeyError, ValueError)

# Each level takes three Python calls, and the interpreter allows about a thousand.
MOST_LEVELS: Final = 100


def too_deep(path: str) -> InputError:
    """Return the error for a batch that contains itself, or is nested too deeply.

    Examples:
        >>> str(too_deep("a.a.a.a.a.a")).partition(";")[0]
        "The batch is nested more than 100 levels deep, at path 'a.a.a.a...'"
    """
    where = f", at path '{'.'.join(path.split('.')[:4])}...'" if path else ""
    return InputError(
        f"The batch is nested more than {MOST_LEVELS} levels deep{where}; it may contain itself. "
        "Pass a flat dict or tuple of tensors."
    )


def agreed_length(leaves: Sequence[Leaf]) -> int:
    """Return the number of samples, which must be the same for all leaves that are cut.

    Raises:
        SplitError: when no leaf is split, when lengths differ, or when there is no sample.

    Examples:
        >>> agreed_length([Leaf("x", 3), Leaf("scale", None), Leaf("y", 3)])
        3
    """
    lengths = [(leaf.path, leaf.length) for leaf in leaves if leaf.length is not None]
    described = ", ".join(f"{path!r}: {length}" for path, length in lengths)
    if not lengths:
        unsplit = ", ".join(repr(leaf.path) for leaf in leaves) or "none"
        raise SplitError(
            f"The batch has nothing to split: its entries ({unsplit}) are scalars, 0-d arrays or kept "
            "whole. Pass at least one array or list with one entry for each sample."
        )
    if len({length for _, length in lengths}) > 1:
        raise SplitError(
            f"Parts of the batch differ in length: {described}. Declare in unsplit=(...) the parts that all "
            "samples share, and in per_sample=(...) the lists of samples of different sizes."
        )
    samples = lengths[0][1]
    if samples == 0:
        raise SplitError(
            "The batch has 0 samples. Skip batches without samples; if only this rank has none, call "
            "accumulate(None)."
        )
    return samples


def refuse_hollow_lists(hollow: Sequence[Leaf], samples: int) -> None:
    """Raise if a list that would be kept whole may hold one dict of scalars for each sample.

    Every micro-batch would get all of its entries and pair the first ones with its own samples.

    Raises:
        SplitError: when such a list has as many entries as the batch has samples.

    Examples:
        >>> refuse_hollow_lists([Leaf("stages", 3)], samples=8)
    """
    for leaf in hollow:
        if leaf.length == samples > 1:
            raise SplitError(
                f"Nothing in the list of {leaf.length} containers at path {leaf.path!r} can be split, but it "
                f"may hold one entry for each of the {samples} samples. Declare per_sample=({leaf.path!r},) "
                f"or unsplit=({leaf.path!r},)."
            )


def unmet(batch: Any, path: str) -> InputError:
    """Return the error for a declared path that the walk over the batch did not reach.

    Examples:
        >>> print(unmet({"x": 1}, "y"))
        The batch has no part at the declared path 'y'. Pass one of its paths: 'x'.
    """
    if find(batch, path) is ABSENT:
        return InputError(
            f"The batch has no part at the declared path {path!r}. Pass one of its paths: "
            f"{listed_paths(batch)}."
        )
    return InputError(
        f"The declared path {path!r} lies inside a part that is declared itself or split as one array or "
        "list. Declare either the outer or the inner part."
    )


def listed_length(value: Any, path: str) -> int:
    """Return the number of entries of a part that is declared in `per_sample`.

    Raises:
        InputError: when it is not a list, tuple, array or other object with a length and slices.

    Examples:
        >>> listed_length([{"boxes": 1}, {"boxes": 2}], "targets")
        2
    """
    shape = array_shape(value)
    if shape:
        return shape[0]
    kind = kind_of(value)
    sliceable = shape is None and hasattr(kind, "__len__") and hasattr(kind, "__getitem__")
    if sliceable and not (is_scalar(value) or is_record(value) or isinstance(value, Mapping)):
        return len(value)
    raise InputError(
        f"per_sample=({path!r},) names a {kind.__name__}, not a list, tuple or array with one entry for each "
        f"sample. Pass the paths of the lists themselves; the paths inside are {listed_paths(value, path)}."
    )


def unknown(value: Any, path: str) -> SplitError:
    """Return the error for a part of unknown type, or for torch's PackedSequence.

    Examples:
        >>> "The builtins.object at path 'graph'" in str(unknown(object(), "graph"))
        True
    """
    if is_torch_packed_sequence(value):
        return SplitError(
            f"The PackedSequence at path {path!r} is interleaved by time and cannot be cut into samples. "
            "Pass padded sequences with their lengths and pack them in loss_fn, or pass the sequences end "
            "to end with their offsets as cu_seqlens."
        )
    kind = kind_of(value)
    outer, _, last = path.rpartition(".")
    listed = outer if last.isdigit() else path  # most often an entry of a list of samples
    return SplitError(
        f"The {kind.__module__}.{kind.__qualname__} at path {path!r} is not an array, container or plain "
        f"scalar, so it cannot be split. Declare unsplit=({path!r},) to give it to every micro-batch, or "
        f"per_sample=({listed!r},) for a list with one entry for each sample."
    )


def unsliceable(value: Any, path: str, error: Exception, *, ordered: bool = False) -> SplitError:
    """Return the error for an array that its framework cannot slice, or cannot index with a list (`ordered`).

    Examples:
        >>> "(TypeError: no slices)" in str(unsliceable(memoryview(b""), "x", TypeError("no slices")))
        True
    """
    kind = kind_of(value)
    first_line = str(error).partition("\n")[0][:200]  # some frameworks append a traceback of C++
    if ordered:
        return SplitError(
            f"The {kind.__module__}.{kind.__qualname__} at path {path!r} cannot be indexed with a list of "
            f"samples ({type(error).__name__}: {first_line}). Pass a tensor, a NumPy array or a list, or "
            "leave out sort=True."
        )
    return SplitError(
        f"The {kind.__module__}.{kind.__qualname__} at path {path!r} cannot be sliced along its first "
        f"dimension ({type(error).__name__}: {first_line}). Pass a dense or padded array, pass a list of "
        f"samples with per_sample=({path!r},), or keep it whole with unsplit=({path!r},)."
    )
