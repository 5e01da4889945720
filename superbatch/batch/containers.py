# pyright: strict
"""Leaves and containers of a batch: scalars, arrays, and containers that can be rebuilt from their parts.

Types are recognised by duck typing, so no framework is imported. Three rules hold for every container:

* The rebuilder takes the values that `children` lists, in the same order.
* A rebuilt container has the type of the original and shares no mutable storage with it.
* A container that cannot be rebuilt safely raises `SplitError`.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import enum
import numbers
import pathlib
import types
import uuid
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any, cast

from ..errors import SplitError

SCALARS: tuple[type, ...] = (
    str,
    int,
    float,
    type(None),
    bytes,
    bytearray,
    complex,
    enum.Enum,
    pathlib.PurePath,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    uuid.UUID,
    numbers.Number,  # Decimal, Fraction, the scalars of NumPy
)

Rebuild = Callable[[list[Any]], Any]


def kind_of(value: Any) -> Any:
    """Return the type of a value as `Any`, so that its methods can be tested without type errors.

    Examples:
        >>> kind_of([1]).__name__
        'list'
    """
    return cast("Any", type(value))


def is_scalar(value: Any) -> bool:
    """Return True for a single piece of data without samples: a number, a text, a date, None.

    Examples:
        >>> is_scalar("a text"), is_scalar(None), is_scalar([1])
        (True, True, False)
    """
    return isinstance(value, SCALARS)


def array_shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of an array of any framework, or None if the value is not an array.

    An array has a `shape` with a length and can be indexed. A container is not an array just because one of
    its entries is called "shape": a mapping needs `shape` on its class, and fields of tuples and dataclasses
    do not count.

    Examples:
        >>> array_shape(memoryview(b"abc")), array_shape([1, 2])
        ((3,), None)
    """
    kind = kind_of(value)
    # A namedtuple may have a field "shape", and a mapping an entry.
    if isinstance(value, (tuple, list, dict)) or not hasattr(kind, "__getitem__"):
        return None
    if isinstance(value, Mapping) and not hasattr(kind, "shape"):
        return None  # its __getattr__ may return an entry named "shape"
    if "shape" in getattr(kind, "__dataclass_fields__", ()):
        return None  # a field of the user's dataclass
    try:
        shape = cast("Any", value).shape
    except (AttributeError, RuntimeError):  # torch's strided NestedTensor raises RuntimeError
        return None
    if isinstance(shape, tuple):
        # A TensorDict without a batch size is walked as a mapping; with one it is sliced like an array.
        return cast("tuple[int, ...]", shape) if shape or not isinstance(value, Mapping) else None
    return _shape_of_other_type(shape)


def _shape_of_other_type(shape: Any) -> tuple[int, ...] | None:
    """Convert a shape such as TensorFlow's TensorShape; None for an attribute of another meaning."""
    try:
        return tuple(int(size) for size in shape)
    except TypeError:
        return None


def is_record(value: Any) -> bool:
    """Return True for a tuple with named fields (namedtuple, structseq): its entries are not samples.

    Examples:
        >>> import collections
        >>> is_record(collections.namedtuple("Pair", "x y")(1, 2)), is_record((1, 2))
        (True, False)
    """
    kind = kind_of(value)
    # `_fields` marks a namedtuple, `n_sequence_fields` a structseq such as time.struct_time.
    return isinstance(value, tuple) and (hasattr(kind, "_fields") or hasattr(kind, "n_sequence_fields"))


def is_flat(value: Any) -> bool:
    """Return True for a list or tuple of scalars and 0-d arrays only, or empty: its entries are samples.

    Examples:
        >>> is_flat(["a", "b"]), is_flat(["a", ["b"]]), is_flat("ab")
        (True, False, False)
    """
    if not isinstance(value, (list, tuple)) or is_record(value):
        return False
    entries = cast("list[Any]", value)
    if all(issubclass(kind, SCALARS) for kind in set(map(type, entries))):
        return True  # one check per type, as a list of texts may be long
    return all(is_scalar(entry) or array_shape(entry) == () for entry in entries)


def is_list_subclass(value: Any) -> bool:
    """Return True for a subclass of list or tuple, whose slices are plain lists or tuples.

    Examples:
        >>> is_list_subclass([1]), is_list_subclass(type("Names", (list,), {})())
        (False, True)
    """
    return isinstance(value, (list, tuple)) and kind_of(value) not in (list, tuple)


def is_torch_packed_sequence(value: Any) -> bool:
    """Return True for torch's PackedSequence, a namedtuple of data interleaved by time.

    Examples:
        >>> is_torch_packed_sequence((1, 2))
        False
    """
    return isinstance(value, tuple) and kind_of(value).__name__ == "PackedSequence"


def children(value: Any) -> list[tuple[str, Any]] | None:
    """Return the entries of a container as (name, value), or None if the value is not a container.

    Returns:
        Keys, indices or field names as text, each with its value.

    Examples:
        >>> children({"x": 1, 7: 2}), children(["a"]), children("text")
        ([('x', 1), ('7', 2)], [('0', 'a')], None)
    """
    if isinstance(value, Mapping):
        return [(str(key), entry) for key, entry in cast("Mapping[Any, Any]", value).items()]
    if isinstance(value, tuple) and hasattr(kind_of(cast("Any", value)), "_fields"):
        fields = cast("Any", value)._fields
        return list(zip(fields, cast("Any", value), strict=True))
    if isinstance(value, (list, tuple)):
        return [(str(index), entry) for index, entry in enumerate(cast("list[Any]", value))]
    if _is_dataclass(value):
        return [(name, getattr(value, name)) for name in _set_fields(value)]
    return None


def rebuilder(value: Any, path: str) -> Rebuild:
    """Return a function that makes a container like this one from new values.

    Raises:
        SplitError: by the returned function, when the container's type cannot be constructed from new values.

    Examples:
        >>> rebuilder((1, 2), "")([3, 4])
        (3, 4)
    """
    kind = kind_of(value)
    # The built-in types need no guard: nothing in their construction can fail.
    if kind is tuple:
        return tuple
    if kind is list:
        return list
    if kind is dict:
        keys = list(value)
        return lambda values: dict(zip(keys, values, strict=True))
    return lambda values: _rebuild_guarded(value, values, path)


def _rebuild_guarded(value: Any, values: list[Any], path: str) -> Any:
    kind = kind_of(value)
    try:
        if isinstance(value, Mapping):
            return _rebuild_mapping(cast("Mapping[Any, Any]", value), values)
        if isinstance(value, tuple):
            return kind._make(values) if hasattr(kind, "_fields") else kind(values)
        if isinstance(value, list):
            new = copy.copy(cast("list[Any]", value))  # keeps the attributes of a subclass
            new[:] = values
            return new
        return _rebuild_dataclass(value, values)
    except Exception as error:  # the constructor of the user's type may raise anything
        raise SplitError(
            f"The {kind.__module__}.{kind.__qualname__} at path {path!r} cannot be constructed from its "
            f"entries ({type(error).__name__}: {error}). Pass a dict, list, tuple, namedtuple or dataclass, "
            f"or declare unsplit=({path!r},)."
        ) from error


def _rebuild_mapping(value: Mapping[Any, Any], values: list[Any]) -> Any:
    kind = kind_of(value)
    items = dict(zip(value.keys(), values, strict=True))  # not iter(value): a TensorDict yields rows there
    if not isinstance(value, (dict, UserDict)) and not hasattr(kind, "__copy__"):
        # copy.copy would share storage with the original, and the writes below would change the user's batch.
        new = kind(items)
        # The constructor may have taken the dict for something else, such as options.
        if len(new.keys()) != len(items) or any(new[key] is not entry for key, entry in items.items()):
            raise TypeError("its constructor does not take a dict of its entries")
        return new
    new = copy.copy(cast("Any", value))
    attributes = getattr(value, "__dict__", {})
    if attributes is value:
        new.__dict__ = new  # else the attributes of the copy would still be the entries of the original
    for key, entry in items.items():
        new[key] = entry
        if key in attributes and attributes[key] is value[key]:
            new.__dict__[key] = entry  # some mappings hold each entry as an attribute too
    return new


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _set_fields(value: Any) -> list[str]:
    """Return the names of fields that have a value; a field with init=False may have none."""
    names = [field.name for field in dataclasses.fields(value)]
    return [name for name in names if hasattr(value, name)]


def _rebuild_dataclass(value: Any, values: list[Any]) -> Any:
    """Copy a dataclass instance with new values for its fields."""
    kind = kind_of(value)
    # Not through __init__: fields with init=False and InitVars cannot be passed to it.
    new = kind.__new__(kind)
    for name in _slots(kind):
        if hasattr(value, name):
            object.__setattr__(new, name, getattr(value, name))
    if hasattr(value, "__dict__"):
        new.__dict__.update(value.__dict__)
    for name, entry in zip(_set_fields(value), values, strict=True):
        object.__setattr__(new, name, entry)  # works for frozen dataclasses too
    return new


def _slots(kind: Any) -> list[str]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    # Other slots, such as `__dict__` and `__weakref__`, are not copied as values.
    return [name for name in names if isinstance(getattr(kind, name, None), types.MemberDescriptorType)]
