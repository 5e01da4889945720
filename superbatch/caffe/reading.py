"""Read a solver file as a `SolverConfig`; raise, with line and column, for a value that Caffe refuses."""

from __future__ import annotations

# pyright: strict
import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError
from .config import FLOATS, INTS, TYPES, NetState, SolverConfig, float32, violation
from .text_format import Field, Message, Scalar, parse
from .tokens import Token, shortened, tokens, wrong_at, wrong_token

_Read = Callable[[Field, Scalar], Any]

_TYPO = 0.75  # least similarity of a typo; below it, names of other programs match a field by chance
_STATES = ("train_state", "test_state")


def read_solver(path: str | os.PathLike[str], *, ignore_unknown: bool = False) -> SolverConfig:
    """Read a solver file.

    Args:
        path: path of a ``solver.prototxt``. A file that is not valid UTF-8 is read as Latin-1.
        ignore_unknown: skip the fields that Caffe does not have, such as those of its forks;
            `SolverConfig.ignored` names them.

    Returns:
        The solver.

    Raises:
        PrototxtError: the file is not in the text format; a field is unknown, has the wrong type or is given
            twice; Caffe refuses a value. The error has line and column.
        InputError: the file cannot be read, or is binary.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "solver.prototxt")
        ...     _ = file.write_text('base_lr: 0.5 lr_policy: "fixed" iter_size: 4')
        ...     read_solver(file).iter_size
        4
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    if b"\0" in content:  # such as a .caffemodel passed by mistake
        raise _unreadable(path, "it is a binary file")
    try:
        text = content.decode("utf-8-sig")  # Windows editors begin files with a byte-order mark
    except UnicodeDecodeError:  # old files are in Latin-1, in which every byte is valid
        text = content.decode("latin-1")
    return parse_solver(text, ignore_unknown=ignore_unknown)


def _unreadable(path: str | os.PathLike[str], reason: str) -> InputError:
    return InputError(
        f"The solver file {os.fspath(path)!r} cannot be read: {reason}. Pass the path of a solver.prototxt."
    )


def parse_solver(text: str, *, ignore_unknown: bool = False) -> SolverConfig:
    r"""Read a solver from the text of its file.

    Args:
        text: in protobuf's text format.
        ignore_unknown: as for `read_solver`.

    Returns:
        The solver.

    Raises:
        PrototxtError: as for `read_solver`.

    Examples:
        >>> parse_solver('base_lr: 0.01 lr_policy: "multistep" gamma: .5 stepvalue: [10, 20]').stepvalue
        (10, 20)
        >>> parse_solver('lr_policy: "fixed" eval_type: "detection"', ignore_unknown=True).ignored
        ('eval_type',)
        >>> parse_solver('base_lr: 0.01\nlr_polcy: "fixed"')
        Traceback (most recent call last):
        superbatch.errors.PrototxtError: line 2, column 1: 'lr_polcy': ...
    """
    message = parse(text)
    ignored: tuple[str, ...] = ()
    if ignore_unknown:  # before any check, so that fields of forks may hold anything
        message, ignored = _known(message)
    values, positions = _message(message, _SOLVER, "a solver")
    if "solver_type" in values:
        if "type" in values:
            raise wrong_token(
                positions["solver_type"],
                "solver_type and type are both given",
                "Remove solver_type, the old name",
            )
        # As Caffe upgrades old files.
        values["type"], positions["type"] = values.pop("solver_type"), positions["solver_type"]
    # lr_policy has no default, and Caffe refuses an empty one.
    defaults = {field.name: field.default for field in dataclasses.fields(SolverConfig)}
    refused = violation({**defaults, "lr_policy": "", **values})
    if refused is not None:
        position = positions.get(refused.field) or positions.get(refused.because or "")
        given = refused.field if refused.field in values else f"no {refused.field}"
        if refused.field in values:
            given = f"{refused.field}: {_shown(values[refused.field])}"
        if position is None:
            *_, position = tokens(text)  # a missing field is reported at the end of the file
        raise wrong_at(position.line, position.column, given, refused.wrong, refused.do)
    return SolverConfig(**values, ignored=ignored)


def _known(message: Message) -> tuple[Message, tuple[str, ...]]:
    """Drop fields that Caffe does not have, also in a NetState, and return their names."""
    kept: list[Field] = []
    ignored: dict[str, None] = {}  # a set in the order of the file
    for field in message.fields:
        name, value = field.name.text, field.value
        if name not in _SOLVER:
            ignored[name] = None
        elif name in _STATES and isinstance(value, Message):
            inner = [each for each in value.fields if each.name.text in _NET_STATE]
            names = [each.name.text for each in value.fields]
            ignored |= {f"{name}.{each}": None for each in names if each not in _NET_STATE}
            kept.append(dataclasses.replace(field, value=Message(tuple(inner))))
        else:
            kept.append(field)
    return Message(tuple(kept)), tuple(ignored)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f'"{shortened(value)}"'
    return f"{value:g}" if isinstance(value, float) else str(value)


def _message(
    message: Message, schema: Mapping[str, tuple[_Read | None, bool]], what: str
) -> tuple[dict[str, Any], dict[str, Token]]:
    """Return the values of a message and the position of each, by name."""
    values: dict[str, Any] = {}
    several: dict[str, list[Any]] = {}
    positions: dict[str, Token] = {}
    for field in message.fields:
        name = field.name.text
        if name not in schema:
            # Shortened: the comparison is quadratic in the length of a name.
            close = difflib.get_close_matches(shortened(name), schema, n=1, cutoff=_TYPO)
            do = f"Write {close[0]} or remove it" if close else "Remove it"
            do += "; ignore_unknown=True (--ignore-unknown) skips unknown fields"
            raise wrong_token(field.name, f"{what} has no such field", do)
        read, repeated = schema[name]
        # Caffe's parser refuses a second value; the last one would win otherwise.
        if not repeated and name in values:
            first = positions[name]
            raise wrong_token(
                field.name,
                f"this field was already given in line {first.line}, column {first.column}",
                "Remove one of them",
            )
        if not repeated and field.in_list:
            raise wrong_token(
                field.name, "this field takes one value, not a list", f"Write {name}: and one value"
            )
        value = _value(field, read)
        if repeated:
            several.setdefault(name, []).append(value)
        else:
            values[name] = value
        positions.setdefault(name, field.name)  # an error points at the first of several
    return values | {name: tuple(items) for name, items in several.items()}, positions


def _value(field: Field, read: _Read | None) -> Any:
    name = field.name.text
    if read is None:
        if isinstance(field.value, Message):
            return _net_state(field.value) if name in _STATES else field.value
        raise wrong_token(field.value.token, f"{name} must be a message", f"Write {name} {{ ... }}")
    if isinstance(field.value, Message):
        raise wrong_token(field.name, f"{name} takes a value, not fields", f"Write {name}: and the value")
    return read(field, field.value)


def _net_state(message: Message) -> NetState:
    values, _ = _message(message, _NET_STATE, "a NetState")
    return NetState(**values)


def _mistyped(field: Field, value: Scalar, wanted: str, do: str) -> Exception:
    given = f"{field.name.text}: {shortened(value.shown)}"
    return wrong_at(value.token.line, value.token.column, given, f"{field.name.text} must be {wanted}", do)


def _string(field: Field, value: Scalar) -> str:
    if value.string is None:
        raise _mistyped(field, value, "a string", f'Write {field.name.text}: "..."')
    return value.string


def _bool(field: Field, value: Scalar) -> bool:
    # Every spelling that protobuf accepts.
    words = {"true": True, "True": True, "t": True, "1": True}
    words |= {"false": False, "False": False, "f": False, "0": False}
    if value.string is None and not value.negative and value.token.text in words:
        return words[value.token.text]
    raise _mistyped(field, value, "a bool", "Write true or false")


def _integer(value: Scalar) -> int | None:
    """Parse a decimal, octal or hexadecimal integer; None for anything else."""
    if value.token.kind != "number" or value.string is not None:
        return None
    text = value.token.text
    octal = text[0] == "0" and text[1:2].isdigit()  # as in C; Python's int(text, 0) refuses 010
    try:
        number = int(text, 8) if octal else int(text, 0)
    except ValueError:
        return None
    return -number if value.negative else number


def _int(bits: int) -> _Read:
    def read(field: Field, value: Scalar) -> int:
        number = _integer(value)
        if number is None:
            raise _mistyped(
                field, value, "an integer", "Write digits, without a point, an exponent or quotes"
            )
        largest = 2 ** (bits - 1) - 1
        if not -largest - 1 <= number <= largest:
            do = f"Write a number from {-largest - 1} to {largest}"
            raise _mistyped(field, value, f"an integer of {bits} bits", do)
        return number

    return read


def _float(field: Field, value: Scalar) -> float:
    text = value.token.text  # never empty: a string has its quotes
    sign = -1.0 if value.negative else 1.0
    if value.string is None and value.token.kind == "name":
        words = {"inf": math.inf, "infinity": math.inf, "nan": math.nan}
        if text.lower() in words:
            return sign * words[text.lower()]
    octal = text[0] == "0" and text[1:2].isdigit()  # protobuf refuses 06.9
    if value.string is not None or value.token.kind != "number" or text[1:2] in ("x", "X") or octal:
        raise _mistyped(field, value, "a number", "Write a decimal number, without quotes")
    # float() has no suffix: 0.5f is C++.
    return float32(sign * float(text.rstrip("fF")))


def _enum(names: tuple[str, ...], values: tuple[str, ...] | None = None) -> _Read:
    """Return a reader of a word in `names` or its index; it returns the entry of `values`, if given."""

    def read(field: Field, value: Scalar) -> str:
        number = _integer(value)
        if number is None and value.string is None and not value.negative and value.token.text in names:
            number = names.index(value.token.text)
        if number is None or not 0 <= number < len(names):
            raise _mistyped(field, value, f"one of {', '.join(names)}", f"Write {names[0]}, without quotes")
        return (values or names)[number]

    return read


_ONE: dict[str, _Read | None] = {
    **dict.fromkeys(FLOATS, _float),
    **dict.fromkeys(INTS, _int(32)),
    "random_seed": _int(64),
    **dict.fromkeys(
        ("net", "train_net", "lr_policy", "regularization_type", "snapshot_prefix", "type"), _string
    ),
    **dict.fromkeys(
        (
            "test_compute_loss",
            "test_initialization",
            "snapshot_diff",
            "debug_info",
            "snapshot_after_train",
            "layer_wise_reduce",
        ),
        _bool,
    ),
    "snapshot_format": _enum(("HDF5", "BINARYPROTO")),
    "solver_mode": _enum(("CPU", "GPU")),
    "solver_type": _enum(("SGD", "NESTEROV", "ADAGRAD", "RMSPROP", "ADADELTA", "ADAM"), TYPES),
    # Fields inside are not checked: that would need Caffe's schema of every layer.
    **dict.fromkeys(("net_param", "train_net_param", "train_state")),
}
_REPEATED: dict[str, _Read | None] = {
    "test_net": _string,
    "weights": _string,
    "test_iter": _int(32),
    "stepvalue": _int(32),
    **dict.fromkeys(("test_net_param", "test_state")),
}
_SOLVER = {name: (read, False) for name, read in _ONE.items()} | {
    name: (read, True) for name, read in _REPEATED.items()
}
_NET_STATE: dict[str, tuple[_Read | None, bool]] = {
    "phase": (_enum(("TRAIN", "TEST")), False),
    "level": (_int(32), False),
    "stage": (_string, True),
}
