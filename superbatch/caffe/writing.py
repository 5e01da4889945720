"""Write a `SolverConfig` as a solver file: one line per value that differs from Caffe's default."""

from __future__ import annotations

# pyright: strict
import dataclasses
from collections.abc import Iterator
from typing import Any, cast

from .config import FLOATS, NetState, SolverConfig, float32
from .text_format import Message

# Enums: protobuf refuses quotes around their names.
_WORDS = ("phase", "snapshot_format", "solver_mode")


def solver_text(config: SolverConfig) -> str:
    """Write a solver in protobuf's text format.

    Args:
        config: the solver.

    Returns:
        Text that `parse_solver` reads as an equal solver, without the ignored fields. Floats have as few
        digits as possible.

    Examples:
        >>> print(solver_text(SolverConfig(base_lr=0.1, lr_policy="fixed", iter_size=4)), end="")
        base_lr: 0.1
        iter_size: 4
        lr_policy: "fixed"
    """
    lines: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default and field.name != "ignored":
            several = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,)
            lines += [f"{field.name}{_written(field.name, each)}" for each in several]
    return "".join(f"{line}\n" for line in lines)


def shortest(value: float) -> str:
    """Write a float32 with the fewest digits that read back as the same value.

    Examples:
        >>> shortest(float32(0.1)), shortest(float32(1e-8)), shortest(5.0)
        ('0.1', '1e-08', '5')
    """
    # Nine digits identify every float32.
    texts = (f"{value:.{digits}g}" for digits in range(1, 10))
    return next((text for text in texts if float32(float(text)) == value), repr(value))


def _written(name: str, value: Any) -> str:
    if isinstance(value, Message):
        return f" {{ {' '.join(_raw(value))} }}"
    if isinstance(value, NetState):
        fields = [f"phase: {value.phase}", f"level: {value.level}"]
        fields += [f"stage: {_quoted(stage)}" for stage in value.stage]
        return f" {{ {' '.join(fields)} }}"
    if isinstance(value, bool):  # before the numbers: a bool is an int in Python
        return f": {'true' if value else 'false'}"
    if isinstance(value, str):
        return f": {value if name in _WORDS else _quoted(value)}"
    return f": {shortest(value) if name in FLOATS else value}"


def _raw(message: Message) -> Iterator[str]:
    for field in message.fields:
        name, value = field.name.text, field.value
        if isinstance(value, Message):
            yield f"{name} {{ {' '.join(_raw(value))} }}"
        else:
            yield f"{name}: {value.shown if value.string is None else _quoted(value.string)}"


def _quoted(text: str) -> str:
    # The backslash first, so that the others are not escaped twice.
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
