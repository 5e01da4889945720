"""Reports as JSON text: any frozen dataclass of this package.

The JSON is strict: a float that is not finite is the string ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from superbatch.errors import InputError

KIND = "report"  # first key of the JSON object; its value is the name of the report's class


def to_json(report: object) -> str:
    """Return a report as JSON text.

    Examples:
        >>> from superbatch.results.update import Update
        >>> update = Update(
        ...     loss=0.5, grad_norm=None, weight=3, samples=3, microbatches=2, learning_rates=(0.1,)
        ... )
        >>> '"loss": 0.5' in to_json(update)
        True
    """
    if not dataclasses.is_dataclass(report) or isinstance(report, type):
        raise InputError(f"A {type(report).__name__} is no report. Pass the result of a command or a study.")
    content = {KIND: type(report).__name__, **cast("dict[str, Any]", json_value(report, _name_of))}
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)


def json_value(value: Any, non_finite: Callable[[float], str | None]) -> Any:
    """Return a value in the types of JSON; `non_finite` replaces NaN and infinity, which JSON lacks.

    Examples:
        >>> json_value({"loss": (1.0, math.nan)}, str)
        {'loss': [1.0, 'nan']}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Not asdict(), which copies each value and fails for mappings other than dict.
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return {str(key): json_value(entry, non_finite) for key, entry in entries.items()}
    if isinstance(value, tuple | list):
        return [json_value(entry, non_finite) for entry in cast("tuple[Any, ...]", value)]
    return non_finite(value) if isinstance(value, float) and not math.isfinite(value) else value


def _name_of(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
