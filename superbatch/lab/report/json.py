"""Reports as JSON text and back: any frozen dataclass of this package, by its field types.

* Strict JSON: a float that is not finite is the string ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.
* Reading checks: a missing field, an unknown field or a value of another type is an error that names its
  place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from superbatch.errors import InputError

T = TypeVar("T")

KIND = "report"  # name of the first field of the text: the class of the report

_WORDS: Mapping[str, float] = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(report: object) -> str:
    """Write a report as JSON.

    Examples:
        >>> from superbatch.results.update import Update
        >>> update = Update(
        ...     loss=0.5, grad_norm=None, weight=3, samples=3, microbatches=2, learning_rates=(0.1,)
        ... )
        >>> from_json(Update, to_json(update)) == update
        True
    """
    if not dataclasses.is_dataclass(report) or isinstance(report, type):
        raise InputError(f"A {type(report).__name__} is no report. Pass what a study returned.")
    content = {KIND: type(report).__name__, **cast("dict[str, Any]", _plain(report))}
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)


def from_json(kind: type[T], text: str) -> T:
    """Read a report that `to_json` wrote.

    Examples:
        >>> from superbatch.results.update import Update
        >>> from_json(Update, '{"report": "Update", "loss": 1}')
        Traceback (most recent call last):
        superbatch.errors.InputError: A report in JSON: Update has no field grad_norm. ...
    """
    try:
        content: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise _unreadable(f"it is no JSON: {error}") from error
    if not isinstance(content, dict) or cast("dict[str, Any]", content).get(KIND) != kind.__name__:
        raise _unreadable(f'it does not say "{KIND}": "{kind.__name__}"')
    return cast(
        "T", _dataclass(kind, {k: v for k, v in cast("dict[str, Any]", content).items() if k != KIND})
    )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in cast("tuple[Any, ...]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _dataclass(kind: type[Any], content: Mapping[str, Any]) -> Any:
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    for name in names:
        if name not in content:
            raise _unreadable(f"{kind.__name__} has no field {name}")
    if unknown := sorted(set(content) - set(names)):
        raise _unreadable(f"{kind.__name__} has the unknown field {unknown[0]}")
    return kind(**{name: _read(hints[name], content[name], f"{kind.__name__}.{name}") for name in names})


def _read(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        # An int stays an int where both are allowed (`weight: int | float`); the last kind names the fault.
        *others, last = sorted(get_args(hint), key=lambda hint: hint is float)
        for each in others:
            with contextlib.suppress(InputError):
                return _read(each, value, where)
        return _read(last, value, where)
    if origin is Literal and value in get_args(hint):
        return value
    if origin is tuple and isinstance(value, list):
        item = get_args(hint)[0]
        return tuple(_read(item, each, where) for each in cast("list[Any]", value))
    if origin in (dict, Mapping) and isinstance(value, dict):
        item = get_args(hint)[1]
        return {key: _read(item, each, where) for key, each in cast("dict[str, Any]", value).items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return _dataclass(hint, cast("dict[str, Any]", value))
    return _read_scalar(hint, value, where)


def _read_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is type(None) and value is None:
        return None
    if hint is float and isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    if hint is float and type(value) in (int, float):
        return float(value)
    # `type() is`, not `isinstance`: a bool is no int here.
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise _unreadable(f"{where} is {value!r:.80}")


def _unreadable(wrong: str) -> InputError:
    return InputError(f"A report in JSON: {wrong}. Give a file that this version of superbatch wrote.")
