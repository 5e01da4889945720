"""Reports as JSON text: any frozen dataclass of this package.

The JSON is strict: a float that is not finite is the string ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, cast

from superbatch.errors import InputError

KIND = "report"  # name of the first field of the text: the class of the report


def to_json(report: object) -> str:
    """Write a report as JSON.

    Examples:
        >>> from superbatch.results.update import Update
        >>> update = Update(
        ...     loss=0.5, grad_norm=None, weight=3, samples=3, microbatches=2, learning_rates=(0.1,)
        ... )
        >>> '"loss": 0.5' in to_json(update)
        True
    """
    if not dataclasses.is_dataclass(report) or isinstance(report, type):
        raise InputError(f"A {type(report).__name__} is no report. Pass what a study returned.")
    content = {KIND: type(report).__name__, **cast("dict[str, Any]", _plain(report))}
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)


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
