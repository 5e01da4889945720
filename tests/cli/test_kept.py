"""Message after Ctrl-C at any moment, and the HTML page that every command writes.

The pages of `compare` and `study` are checked in their own tests.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from superbatch.lab import plot
from superbatch.lab.cli import entry
from superbatch.lab.cli.exits import NOTHING_KEPT
from superbatch.lab.recipes import load_recipe
from superbatch.lab.report.page import DOCUMENTATION
from tests.cli.commands import PLANE, ROOT, run

SHORT = ("--threads", "1")
NUMBERS = ("--microbatch-size", "4", "--accumulation-steps", "12", "--noise", "100")
TIMES = ("--micro-seconds", "1", "--update-seconds", "0.1")
SOLVER = 'base_lr: 0.01\nlr_policy: "fixed"\nmax_iter: 10\niter_size: 2\ntype: "SGD"\n'
COMMANDS: dict[str, tuple[str, ...]] = {
    "verify": ("verify", PLANE, "--dtype", "own"),
    "fit": ("fit", PLANE, *SHORT, "--seconds", "0.1", "--sizes", "10"),
    "noise": ("noise", PLANE, *SHORT, "--updates", "30"),
    "survey": ("survey", PLANE, *SHORT, "--repeats", "1", "--updates", "20", "--splits", "4x5"),
    "advise": ("advise", *NUMBERS, *TIMES),
    "caffe": ("caffe", "solver.prototxt"),
}


class Elements(HTMLParser):
    """Check that a page closes its tags in order, and collect all tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "img", "source", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, "tags are closed in the wrong order"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_writes_a_page(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("superbatch.lab.studies.fit.ROUNDS", 2)
    Path("solver.prototxt").write_text(SOLVER, encoding="utf-8")
    assert run(*COMMANDS[command], "--out", "here") == 0
    assert "report.html" in capsys.readouterr().err
    text = Path("here/report.html").read_text(encoding="utf-8")
    page = Elements(text)
    assert not page.open
    assert page.seen.count("h1") == 1
    assert "table" in page.seen
    assert page.seen.count("img") == (command != "verify")
    assert not re.search(r"(src|href)=\"(?!data:)", text), "nothing is loaded from elsewhere"
    assert Path("here/report.json").is_file()
    (guide,) = re.findall(rf"Documentation: {DOCUMENTATION}(\w+)/", text)
    assert (ROOT / "docs" / f"{guide}.md").is_file()


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def kept(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the last line printed after an interruption."""
    assert run(*arguments) == 130
    return capsys.readouterr().err.splitlines()[-1]


def test_ctrl_c_before_the_first_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("superbatch.lab.recipes.load_recipe", interrupt)
    assert kept(("verify", PLANE, "--out", "here"), capsys) == (
        "superbatch: interrupted before the first measurement; no file was written"
    )
    assert list(tmp_path.iterdir()) == []
    assert load_recipe is not interrupt, "the premise: the commands look up the function when they run"


def test_ctrl_c_during_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plot, "png", interrupt)
    assert kept(COMMANDS["advise"], capsys) == (
        "superbatch: interrupted after the last measurement; "
        "the report is kept in superbatch-advise/report.json"
    )
    assert [path.name for path in tmp_path.rglob("*.*")] == ["report.json"]


def test_ctrl_c_during_the_imports_of_the_entry_point(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("superbatch.lab.cli.app.main", interrupt)
    assert entry.main(["compare"]) == 130
    assert capsys.readouterr().err == f"{NOTHING_KEPT}\n"
