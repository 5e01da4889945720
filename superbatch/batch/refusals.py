# pyright: strict
"""Errors about a batch: each text names the paths, the lengths or types, and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..errors import InputError, SplitError, explain
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
            explain(
                f"a batch with nothing to split (its parts: {found})",
                "it holds only lone scalars, 0-d arrays and parts declared whole",
                "pass at least one array or list with one entry for each sample",
            )
        )
    if len({length for _, length in lengths}) > 1:
        raise SplitError(
            explain(
                f"parts of different lengths, {described}",
                "every part that is split needs one entry for each sample",
                "declare parts without samples in unsplit=(...), and lists of samples of different sizes in "
                "per_sample=(...)",
            )
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
                explain(
                    f"a list of {leaf.length} containers at path {leaf.path!r}, beside {samples} samples",
                    "nothing in it can be split, but it may hold one entry for each sample",
                    f"declare per_sample=({leaf.path!r},) or unsplit=({leaf.path!r},)",
                )
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
        declared path 'y': the batch has no such part. Use one of the paths there are: 'x'.
    """
    if find(batch, path) is ABSENT:
        remedy = f"use one of the paths there are: {listed_paths(batch)}"
        return InputError(explain(f"declared path {path!r}", "the batch has no such part", remedy))
    return InputError(
        explain(
            f"declared path {path!r}",
            "it lies inside a part that is declared too, or that is split as one",
            "declare either the outer or the inner part",
        )
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
        explain(
            f"per_sample=({path!r},), which names a {kind.__name__}",
            "only a list, tuple or array has one entry for each sample",
            f"name the lists themselves; inside it there are: {listed_paths(value, path)}",
        )
    )


def unknown(value: Any, path: str) -> SplitError:
    """The error for a part of which it is not known how to split it.

    Args:
        value: the part.
        path: its path.

    Returns:
        The error; torch's PackedSequence is refused by its name.

    Examples:
        >>> "type builtins.object at path 'graph'" in str(unknown(object(), "graph"))
        True
    """
    if is_torch_packed_sequence(value):
        return SplitError(
            explain(
                f"a PackedSequence at path {path!r}",
                "its data are interleaved by time, so no slice of it is a sample",
                "pass padded sequences with their lengths and pack them in loss_fn, or pass the sequences "
                "end to end with their offsets as cu_seqlens",
            )
        )
    kind = kind_of(value)
    outer, _, last = path.rpartition(".")
    listed = outer if last.isdigit() else path  # most often an entry of a list of samples
    return SplitError(
        explain(
            f"an object of type {kind.__module__}.{kind.__qualname__} at path {path!r}",
            "it is neither an array, a container nor a plain scalar, so it is not known how to split it",
            f"declare unsplit=({path!r},) to give it to every micro-batch, or per_sample=({listed!r},) for a "
            "list with one entry for each sample",
        )
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
            explain(
                f"a {kind.__module__}.{kind.__qualname__} at path {path!r}, in a window that is sorted",
                f"a list of its samples cannot be taken ({type(error).__name__}: {said})",
                "pass a tensor, a NumPy array or a list, or leave out sort=True",
            )
        )
    return SplitError(
        explain(
            f"a {kind.__module__}.{kind.__qualname__} at path {path!r}",
            f"it cannot be sliced along its first dimension ({type(error).__name__}: {said})",
            f"make it dense or padded, pass a list of samples with per_sample=({path!r},), or keep it whole "
            f"with unsplit=({path!r},)",
        )
    )
