"""Options of a command and of its study: the same names, so that none is dropped on the way."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import import_module

import pytest
import typer

from superbatch.lab.cli.app import app
from superbatch.lab.cli.publish import options_from

# Beside the options of the study: what is trained, where the report goes, and other names of the same.
OWN = {
    "advise": set(),
    "compare": {"check", "average_gradients", "iterations", "recipe_name", "batchnorm"},
    "fit": set(),
    "noise": set(),
    "study": {"name"},
    "survey": {"check"},
    "train": {"data"},
}
EVERYWHERE = {"recipe", "out", "as_json"}


def parameters(command: str) -> set[str]:
    found = typer.main.get_command(app).commands[command].params  # pyright: ignore[reportAttributeAccessIssue]
    return {parameter.name for parameter in found} - {"help"}


def missing(command: str, options: type) -> set[str]:
    """Options that only one of the command and the study has."""
    return (parameters(command) - EVERYWHERE - OWN[command]) ^ {each.name for each in fields(options)}


@pytest.mark.parametrize("command", OWN)
def test_a_command_has_the_options_of_its_study(command: str) -> None:
    options = import_module(f"superbatch.lab.studies.{command}").Options
    assert len(fields(options)) > 5, "the premise"
    assert OWN[command] <= parameters(command)
    assert missing(command, options) == set()


def test_a_renamed_option_is_found() -> None:
    @dataclass
    class Renamed:
        batch_size: int | None = None
        rate: float | None = None

    assert {"rate", "learning_rate"} <= missing("noise", Renamed)


def test_options_are_filled_by_name_and_what_is_changed_wins() -> None:
    @dataclass
    class Options:
        batch_size: int | None = None
        limit: int | None = None
        seed: int = 7

    given = {"batch_size": 3, "limit": "2GiB", "out": "there"}
    assert options_from(Options, given, limit=2**31) == Options(batch_size=3, limit=2**31, seed=7)
