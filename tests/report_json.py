"""Read a report from its JSON, to test that the JSON contains every field."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from superbatch.lab.report.json import KIND

T = TypeVar("T")


def from_json(kind: type[T], text: str) -> T:
    """Read the report that `to_json` wrote; raise AssertionError if a field is missing or of another type."""
    content: dict[str, Any] = json.loads(text)
    assert content.pop(KIND) == kind.__name__
    return _dataclass(kind, content)


def _dataclass(kind: type[T], content: Mapping[str, Any]) -> T:
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
    assert set(content) == set(names), kind.__name__
    return kind(**{name: _read(hints[name], content[name], f"{kind.__name__}.{name}") for name in names})


def _read(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        # An int stays an int in a field of type `int | float`.
        for each in sorted(get_args(hint), key=lambda hint: hint is float):
            with contextlib.suppress(AssertionError):
                return _read(each, value, where)
    if origin is Literal and value in get_args(hint):
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_read(get_args(hint)[0], each, where) for each in value)
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _read(get_args(hint)[1], each, where) for key, each in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _dataclass(hint, value)  # pyright: ignore[reportArgumentType]
    if hint is type(None) and value is None:
        return None
    words = ("NaN", "Infinity", "-Infinity")
    if hint is float and (type(value) in (int, float) or value in words):
        return float(value)
    # `type() is`, because isinstance(True, int) is true.
    assert hint in (int, str, bool) and type(value) is hint, f"{where} is {value!r:.80}"
    return value
