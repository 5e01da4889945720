"""Options of a command come from the fields of a dataclass: names, types, defaults and help."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer

from superbatch.errors import InputError
from superbatch.lab.cli import app as application
from superbatch.lab.cli.options import command_of
from superbatch.lab.studies import options
from superbatch.lab.studies.options import option, parse_bytes

STUDIES = ("advise", "compare", "fit", "noise", "study", "survey", "train")


def flags_of(command: str) -> list[str]:
    found = typer.main.get_command(application.app).commands[command].params  # pyright: ignore[reportAttributeAccessIssue]
    return [parameter.name for parameter in found]


@pytest.mark.parametrize("command", STUDIES)
def test_a_command_has_a_flag_for_each_field_of_its_options(command: str) -> None:
    kind = import_module(f"superbatch.lab.studies.{command}").Options
    assert get_type_hints(getattr(application, command))["options"] is kind
    names = [each.name for each in fields(kind)]
    assert len(names) > 5, "the premise"
    flags = flags_of(command)
    first = flags.index(names[0])
    assert flags[first : first + len(names)] == names


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a command defined in this file."""

    batch_size: int | None = option("samples")
    learning_rate: float = option("rate", "--lr", default=0.5)
    limit: int | None = option("bytes", typed=str, read=parse_bytes)
    quick: bool = option("fewer seeds", default=False)
    workers: int = option("processes (default: 3)", default=1, default_typed=3)
    data: str | Path | None = option("folder", typed=Path)


def run(*arguments: str) -> tuple[str, Options]:
    """Return the options that a command receives with these arguments."""
    reached: list[Any] = []

    def command(*, recipe: str = "digits", options: Options) -> None:
        reached.extend((recipe, options))

    app = typer.Typer()
    app.command("command")(command_of(command))
    app(args=arguments, standalone_mode=False)
    recipe, found = reached
    return recipe, found


def test_defaults_of_fields_and_of_the_command_line() -> None:
    assert run() == ("digits", Options(workers=3))
    assert Options().workers == 1


def test_an_argument_is_parsed_as_the_type_of_the_field() -> None:
    flags = ("--batch-size", "8", "--lr", "2", "--limit", "2 KiB", "--quick", "--workers", "1", "--data", ".")
    expected = Options(batch_size=8, learning_rate=2.0, limit=2048, quick=True, data=Path())
    assert run("--recipe", "text", *flags) == ("text", expected)


@pytest.mark.parametrize("flags", [("--learning-rate", "2"), ("--no-quick",), ("--batch-size", "many")])
def test_an_unknown_flag_is_an_error(flags: tuple[str, ...]) -> None:
    with pytest.raises(typer.BadParameter.__mro__[1]):
        run(*flags)


def test_a_parse_error_names_the_flag() -> None:
    with pytest.raises(InputError, match=r"^--limit lots is not a number of bytes"):
        run("--limit", "lots")


def test_the_default_of_workers_is_two_in_the_command_line_and_one_in_python() -> None:
    (flag,) = [each.metadata for each in fields(options.CompareOptions) if each.name == "workers"]
    assert flag["default"] == min(2, os.cpu_count() or 1)
    assert options.CompareOptions().workers == options.StudyOptions().workers == 1
