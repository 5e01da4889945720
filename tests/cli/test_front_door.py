"""Texts of the command line before any work: overview, help, suggestions, completion."""

from __future__ import annotations

import re
from itertools import pairwise
from textwrap import fill

import pytest

from superbatch.lab.cli import app as application
from superbatch.lab.cli.advise import advise
from tests.cli.commands import python, run, without_colours

COMMANDS = [str(command.name) for command in application.app.registered_commands]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(*arguments) == 0
    return without_colours(capsys.readouterr().out)


def ragged(text: str, width: int) -> list[str]:
    """Return the lines that end early: the first word of the next line would have fitted."""
    lines = [line.strip() for line in text.splitlines()]
    return [
        line
        for line, below in pairwise(lines)
        if line and below and len(line) + 1 + len(below.split()[0]) <= width
    ]


def test_no_command_prints_a_short_overview(capsys: pytest.CaptureFixture[str]) -> None:
    overview = shown(capsys)
    assert len(overview.splitlines()) <= 22
    assert max(map(len, overview.splitlines())) <= 100
    assert sorted(set(re.findall(r"^  superbatch (\w+)", overview, re.MULTILINE))) == sorted(COMMANDS)


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_shows_flags_without_a_type_and_unbroken_paragraphs(
    command: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    text = shown(capsys, *([] if command is None else [command]), "--help")
    assert re.search(r"--help +Show this message", text), text
    assert "<bool>" not in text
    prose = text.split("╭")[0].split("\n", 3)[3]
    assert len(prose) > 50, "the premise: there is a description"
    assert not ragged(prose, 86)


def test_raggedness_is_found() -> None:
    """A docstring shown with its own line breaks is wrapped twice: in the source and by the terminal."""
    lines = (advise.__doc__ or "").splitlines()
    assert ragged("\n".join(fill(line.strip(), 86) for line in lines), 86)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("caffe", "init")])
def test_help_warns_that_a_recipe_is_executed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "whose code is run" in " ".join(shown(capsys, command, "--help").replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("comprae",), "No such command 'comprae'. Did you mean 'compare'? See superbatch --help."),
        (("xyz",), "No such command 'xyz'. See superbatch --help."),
        (
            ("compare", "--splts", "5x20"),
            "No such option: --splts. Did you mean --splits or --updates? See superbatch compare --help.",
        ),
        (("fit", "--xyz"), "No such option: --xyz. See superbatch fit --help."),
        (("fit",), "Missing argument 'recipe'. See superbatch fit --help."),
    ],
)
def test_a_typo_gets_a_suggestion(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert capsys.readouterr().err == f"superbatch: {message}\n"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("superbatch com", {"compare"}),
        ("superbatch compare digits-c", {"digits-conv", "digits-conv-bn"}),
        ("superbatch compare --spl", {"--splits"}),
        ("superbatch study mom", {"momentum"}),
    ],
)
def test_a_shell_completes(
    typed: str,
    expected: set[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("_SUPERBATCH_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    with pytest.raises(SystemExit):
        run()
    assert set(capsys.readouterr().out.split()) == expected


def test_overview_and_completion_import_no_framework() -> None:
    code = """
import os, sys
from superbatch.lab.cli import main
assert main([]) == 0
os.environ |= {"_SUPERBATCH_COMPLETE": "complete_bash", "COMP_WORDS": "superbatch fit te", "COMP_CWORD": "2"}
try:
    main([])
except SystemExit:
    print("heavy:", *({"torch", "matplotlib", "numpy", "scipy", "sklearn"} & set(sys.modules)))
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert [line.strip() for line in done.stdout.splitlines()[-2:]] == ["text", "heavy:"]
