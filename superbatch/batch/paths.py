# pyright: strict
"""Paths: names of the parts of a nested batch, and lookup by them.

A path joins keys, indices and field names with dots: "labels", "0.images", "meta.ids"; the batch itself is
"".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

from ..errors import InputError
from .containers import array_shape, children, is_flat

_LISTED: Final = 30  # most paths that an error text lists
ABSENT: Final = object()  # returned by `find` when there is no such part, as None may be a part


@dataclass(frozen=True, slots=True)
class Leaf:
    """A part of a batch that is not walked further: it is cut into samples, or kept whole.

    Args:
        path: its path, "" for the batch itself.
        length: number of its samples; None if it is kept whole.

    Examples:
        >>> Leaf("labels", 8)
        Leaf(path='labels', length=8)
    """

    path: str
    length: int | None


def get(batch: Any, path: str) -> Any:
    """Look up one part of a batch by its path.

    Args:
        batch: any nested batch.
        path: keys (as text), indices and field names, joined by dots; "" is the batch itself. Keys may
            contain dots; if a path can be read in two ways, the longest key is taken.

    Returns:
        The part.

    Raises:
        InputError: when there is no such path; the text lists the paths of the batch.

    Examples:
        >>> get({"inputs": [10, 20], 7: "seven"}, "inputs.1"), get({7: "seven"}, "7")
        (20, 'seven')
    """
    if type(path) is not str:
        raise InputError(f'path={path!r} is not a str. Pass a path such as "inputs.labels".')
    part = find(batch, path)
    if part is ABSENT:
        raise InputError(
            f"The batch has no part at path {path!r}. Pass one of its paths: {listed_paths(batch)}."
        )
    return part


def join(path: str, name: str) -> str:
    """Return the path of an entry of a container.

    Examples:
        >>> join("", "x"), join("inputs", "ids")
        ('x', 'inputs.ids')
    """
    return f"{path}.{name}" if path else name


def find(node: Any, path: str) -> Any:
    """Look up a part as `get` does, but return ABSENT in place of raising.

    Examples:
        >>> find({"a.b": {"c": 1}, "a": {"b": 2}}, "a.b.c"), find({}, "a") is ABSENT
        (1, True)
    """
    if not path:
        return node
    if type(node) is dict and path in node:  # the usual case; of the keys 1 and "1" it takes the text
        return cast("dict[Any, Any]", node)[path]
    entries = dict(children(node) or [])
    if path in entries:
        return entries[path]
    end = path.rfind(".")
    while end > 0:  # the longest key first, as keys may contain dots
        if path[:end] in entries and path[end + 1 :]:
            part = find(entries[path[:end]], path[end + 1 :])
            if part is not ABSENT:
                return part
        end = path.rfind(".", 0, end)
    return ABSENT


def all_paths(batch: Any, path: str = "") -> Iterator[str]:
    """List the paths of a batch, which itself has the path `path`, outer parts before inner ones.

    Examples:
        >>> list(all_paths({"x": [1, 2], "meta": {"ids": "a"}}))
        ['x', 'meta', 'meta.ids']
    """
    if array_shape(batch) is not None or is_flat(batch):
        return  # its entries are samples, which have no paths
    for name, value in children(batch) or []:
        yield join(path, name)
        yield from all_paths(value, join(path, name))


def listed_paths(batch: Any, path: str = "") -> str:
    """List the paths of a batch for an error text, at most 30 of them.

    Examples:
        >>> listed_paths({"x": [1, 2], "meta": {"ids": "a"}})
        "'x', 'meta', 'meta.ids'"
    """
    paths = list(all_paths(batch, path))
    if not paths:
        return f"{path!r} only, which has no parts"
    more = f" and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
    return ", ".join(repr(path) for path in paths[:_LISTED]) + more
