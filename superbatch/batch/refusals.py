# pyright: strict
"""Errors about a batch: each text names the paths, the lengths or types, and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..errors import InputError, SplitError
from .containers import array_shape, is_record, is_scalar, is_torch_packed_sequence, kind_of
from .paths import ABSENT, Leaf, find, listed_paths

# What frameworks raise for an array that has a shape but no slices: sparse and nested tensors.
NOT_SLICED: Final = (RuntimeError, NotImplementedError, TypeError, IndexError, KeyError, ValueError)

# Each level costs three Python calls, of the thousand that the interpreter allows.
MOST_LEVELS: Final = 100


def too_deep(path: str) -> InputError:
    """The error for a batch that is nested without end, or nearly so.

    Args:
        path: where the walk gave up; empty where it is not known.

    Returns:
        The error.

    Examples:
        >>> str(too_deep("a.a.a.a.a.a")).partition(":")[0]
        "The batch is nested more than 100 levels deep, at path 'a.a.a.a...'"
    """
    where = f", at path '{'.'.join(path.split('.')[:4])}...'" if path else ""
    return InputError(
        f"The batch is nested more than {MOST_LEVELS} levels deep{where}: does it contain itself? "
        "Pass a flat dict or tuple of tensors."
    )


def agreed_length(leaves: Sequence[Leaf]) -> int:
    """The one number of samples that all leaves agree on.

    Args:
        leaves: all leaves of a batch.

    Returns:
        The number of samples, at least 1.

    Raises:
        SplitError: when no leaf is split, when lengths differ, or when there is no sample.

    Examples:
        >>> agreed_length([Leaf("x", 3), Leaf("scale", None), Leaf("y", 3)])
        3
    """
    lengths = [(leaf.path, leaf.length) for leaf in leaves if leaf.length is not None]
    described = ", ".join(f"{path!r}: {length}" for path, length in lengths)
    if not lengths:
        found = ", ".join(repr(leaf.path) for leaf in leaves) or "none"
        raise SplitError(
            "The batch has nothing to split: it holds only lone scalars, 0-d arrays and parts in unsplit= "
            f"({found}). Pass at least one array or list with one entry for each sample."
        )
    if len({length for _, length in lengths}) > 1:
        raise SplitError(
            f"Parts of the batch differ in length: {described}. Declare parts without samples in "
            "unsplit=(...), and lists of samples of different sizes in per_sample=(...)."
        )
    samples = lengths[0][1]
    if samples == 0:
        raise SplitError(
            f"The batch is empty: {described}. Leave out batches without samples; "
            "where only this rank has none, call accumulate(None)."
        )
    return samples


def refuse_hollow_lists(hollow: Sequence[Leaf], samples: int) -> None:
    """Refuse to keep a list whole that may hold one dict of scalars for each sample.

    Every micro-batch would see all of its entries, and pair the first ones with its own samples.

    Args:
        hollow: lists of containers in which nothing is cut, with their lengths.
        samples: the number of samples of the batch.

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
    """The error for a declared path that the walk over the batch did not meet.

    Args:
        batch: the batch.
        path: the declared path.

    Returns:
        The error; it lists the paths there are, or says that the path lies inside another leaf.

    Examples:
        >>> print(unmet({"x": 1}, "y"))
        The batch has no part at the declared path 'y'. Use one of the paths there are: 'x'.
    """
    if find(batch, path) is ABSENT:
        return InputError(
            f"The batch has no part at the declared path {path!r}. Use one of the paths there are: "
            f"{listed_paths(batch)}."
        )
    return InputError(
        f"The declared path {path!r} lies inside a part that is declared too, or that is split as one. "
        "Declare either the outer or the inner part."
    )


def listed_length(value: Any, path: str) -> int:
    """The number of entries of a part that is declared in `per_sample`.

    Args:
        value: the part.
        path: its path.

    Returns:
        How many samples it has.

    Raises:
        InputError: when it is no list, tuple, array or other object with a length and slices.

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
        f"per_sample=({path!r},) names a {kind.__name__}, and only a list, tuple or array has one entry for "
        f"each sample. Name the lists themselves; inside it there are: {listed_paths(value, path)}."
    )


def unknown(value: Any, path: str) -> SplitError:
    """The error for a part of which it is not known how to split it.

    Args:
        value: the part.
        path: its path.

    Returns:
        The error; torch's PackedSequence is refused by its name.

    Examples:
        >>> "The builtins.object at path 'graph'" in str(unknown(object(), "graph"))
        True
    """
    if is_torch_packed_sequence(value):
        return SplitError(
            f"The PackedSequence at path {path!r} is interleaved by time, so no slice of it is a sample. "
            "Pass padded sequences with their lengths and pack them in loss_fn, or pass the sequences end "
            "to end with their offsets as cu_seqlens."
        )
    kind = kind_of(value)
    outer, _, last = path.rpartition(".")
    listed = outer if last.isdigit() else path  # most often an entry of a list of samples
    return SplitError(
        f"The {kind.__module__}.{kind.__qualname__} at path {path!r} is no array, container or "
        f"plain scalar, and cannot be split. Declare unsplit=({path!r},) to give it to every micro-batch, or "
        f"per_sample=({listed!r},) for a list with one entry for each sample."
    )


def unsliceable(value: Any, path: str, error: Exception, *, ordered: bool = False) -> SplitError:
    """The error for an array whose framework cannot slice it, or cannot take a list of samples out of it.

    Args:
        value: the array.
        path: its path.
        error: what the framework said.
        ordered: whether samples were to be taken in another order than the array has them.

    Returns:
        The error.

    Examples:
        >>> "(TypeError: no slices)" in str(unsliceable(memoryview(b""), "x", TypeError("no slices")))
        True
    """
    kind = kind_of(value)
    said = str(error).partition("\n")[0][:200]
    if ordered:
        return SplitError(
            f"The samples of the {kind.__module__}.{kind.__qualname__} at path {path!r} cannot be sorted "
            f"({type(error).__name__}: {said}). Pass a tensor, a NumPy array or a list, or leave out "
            "sort=True."
        )
    return SplitError(
        f"The {kind.__module__}.{kind.__qualname__} at path {path!r} cannot be sliced along its first "
        f"dimension ({type(error).__name__}: {said}). Make it dense or padded, pass a list of samples with "
        f"per_sample=({path!r},), or keep it whole with unsplit=({path!r},)."
    )
