"""`superbatch compare` for a user: table, page, files, terminal, and Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from superbatch.lab.cli.printing import print_table
from superbatch.lab.report.comparison import Comparison
from superbatch.lab.report.table import Column, Table
from tests.cli import commands
from tests.cli.commands import PLANE, PNG, first_line, on_a_terminal, without_colours
from tests.report_json import from_json

QUICK = ("--runs", "2", "--updates", "4", "--workers", "1")

run = partial(commands.run, "compare")
process = partial(commands.process, "compare")
read = partial(commands.read, Comparison)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run one comparison and return its folder of results."""
    folder = tmp_path_factory.mktemp("compare")
    assert run(PLANE, *QUICK, "--include-wrong", "--out", str(folder)) == 0
    return folder


def test_table_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "here"
    assert run(PLANE, *QUICK, "--splits", "4x5,13/5/2", "--dtype", "float64", "--out", str(out)) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0] == "plane: 2 runs of 4 updates with 20 samples, sgd lr 0.05, float64"
    assert re.match(
        r"split +squared error +updates +time, s +peak memory +weights differ by +equivalent within ±0.2$",
        lines[1],
    )
    assert [line.split("  ")[0] for line in lines[3:6]] == ["1x20 (real batch)", "4x5", "13/5/2"]
    assert lines[6].startswith("Every split trains like the real batch: weights within")
    assert "\x1b" not in shown.out + shown.err, "no colours without a terminal"
    assert shown.err.splitlines()[-1].endswith(f"wrote {out / 'report.html'}, plot.png and report.json")
    assert sorted(file.name for file in out.iterdir()) == ["plot.png", "report.html", "report.json"]
    assert (out / "plot.png").read_bytes().startswith(PNG)
    report = read(out)
    assert not report.partial
    assert report.command["splits"] == "4x5,13/5/2"
    assert report.versions.keys() >= {"superbatch", "torch", "python"}


class Page(HTMLParser):
    """Collect the external links, the tags and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action") and not (value or "").startswith("data:"):
                self.asked.append(f"{tag} {name}={value}")

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_loads_nothing_from_elsewhere(written: Path) -> None:
    text = (written / "report.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.asked == []
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert page.tags.count("img") == 1
    assert page.tags.count("source") == 1, "a picture for a dark screen"
    assert "prefers-color-scheme: dark" in text
    words = " ".join(page.words)
    report = read(written)
    for expected in (
        *(arm.name for arm in report.arms),
        *(arm.how for arm in report.arms),
        *report.notes,
        report.statement,
        report.versions["torch"],
        "seeds",
        "0, 1",
        "|w - w_real| / |w_real|",
    ):
        assert expected in words


def test_names_of_a_recipe_cannot_break_the_page(written: Path) -> None:
    from superbatch.lab.report.page import render
    from superbatch.lab.report.pages import page_of

    text = (written / "report.json").read_text(encoding="utf-8")
    report = from_json(
        Comparison, text.replace("a plane through noisy points", "<script>alert(1)</script> & co")
    )
    page = render(page_of(report), light=PNG, dark=PNG)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co" in page


def test_only_json_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(PLANE, *QUICK, "--json") == 0
    report = from_json(Comparison, capsys.readouterr().out)
    assert report.recipe == "plane"
    assert list(tmp_path.iterdir()) == [], "no files unless requested"


def test_each_run_writes_to_its_own_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(PLANE, *QUICK) == 0
    assert sorted(os.listdir(tmp_path / "superbatch-compare")) == ["plot.png", "report.html", "report.json"]
    assert "superbatch-compare" in capsys.readouterr().err


def test_wrong_accumulation_is_shown_beside_the_exact_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(PLANE, *QUICK, "--include-wrong", "--json") == 0
    report = from_json(Comparison, capsys.readouterr().out)
    assert [(arm.name, arm.claim) for arm in report.arms] == [
        ("1x20", "real"),
        ("5x4", "exact"),
        ("10x2", "exact"),
        ("20x1", "exact"),
        ("16/3/1", "exact"),
        ("16/3/1 mean of means", "wrong"),
        ("5x4 fixed tail divisor", "wrong"),
    ]


@pytest.mark.parametrize(
    ("arguments", "recipe"),
    [
        (("--recipe", "digits", "--batchnorm"), "digits-bn"),
        (("digits-conv", "--batchnorm"), "digits-conv-bn"),
        (("--recipe", "pairs"), "pairs"),
    ],
)
def test_coupled_recipes_are_exact_beside_plain_accumulation(
    arguments: tuple[str, ...], recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ("--runs", "2", "--updates", "4", "--workers", "1", "--splits", "5x20,20x5", "--dtype", "float64")
    assert run(*arguments, *quick, "--check", "--out", str(tmp_path)) == 0, "every exact arm agrees"
    shown = capsys.readouterr().out
    report = read(tmp_path)
    assert report.recipe == recipe
    assert [(arm.name, arm.claim) for arm in report.arms] == [
        ("1x100", "real"),
        ("5x20", "exact"),
        ("20x5", "exact"),
        ("5x20 plain accumulation", "inexact"),
        ("20x5 plain accumulation", "inexact"),
    ]
    _, *exact, first, second = (arm.weight_difference for arm in report.arms)
    assert all(apart is not None and apart < 1e-12 for apart in exact)
    assert all(apart is not None and apart > 1e-4 for apart in (first, second))
    assert "5x20 plain accumulation (not exact)" in shown
    assert "Plain accumulation does not give the real batch's weights" in shown
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "5x20 plain accumulation" in page
    assert "superbatch.torch.WholeBatch" in page
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


def test_a_report_is_strict_json_without_nan(written: Path) -> None:
    text = (written / "report.json").read_text(encoding="utf-8")

    def refuse(word: str) -> object:
        raise AssertionError(word)

    assert json.loads(text, parse_constant=refuse)["report"] == "Comparison"


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are POSIX's")
def test_a_terminal_gets_a_bar_and_a_table(tmp_path: Path) -> None:
    long = ("--updates", "20", "--runs", "3", "--splits", "4x5", "--workers", "1", "--out", str(tmp_path))
    code, shown = on_a_terminal(160, "compare", PLANE, *long)
    assert code == 0, shown
    bar, table = shown.split("plane: 3 runs")
    assert re.search(r"compare own_recipe.py:plane .+ \d+ % elapsed \d.+ left \S", bar)
    assert "━" in bar
    assert "1x20 (real batch)" in table


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_table_is_wrapped_and_not_cut_on_a_narrow_terminal(columns: int) -> None:
    heads = ("split", "test accuracy, %", "updates", "weights differ by", "equivalent within ±0.5")
    row = ("80/15/5 mean of means", "95.22 ± 0.38", "1000", "2.0e-07 (max 9.5e-05)", "not shown, p = 0.808")
    table = Table("digits", tuple(Column(head, "") for head in heads), (row,))
    shown = io.StringIO()
    print_table(table, Console(file=shown, force_terminal=True, width=columns))
    text = without_colours(shown.getvalue())
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    assert {word for cell in (*heads, *row) for word in cell.split()} <= set(text.split())


def ended(group: int, *, seconds: float) -> bool:
    """Return True if every process of the session has ended in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(os.name != "posix", reason="signals of a terminal are POSIX's")
@pytest.mark.parametrize(("workers", "whole_group"), [("2", True), ("1", False)], ids=["terminal", "kill"])
def test_ctrl_c_leaves_a_partial_report(tmp_path: Path, workers: str, whole_group: bool) -> None:
    long = ("--updates", "40", "--runs", "5000", "--splits", "4x5", "--workers", workers)
    with process(PLANE, *long, "--out", str(tmp_path)) as started:
        assert first_line(started, seconds=60).startswith("compare own_recipe.py:plane: seed ")
        if whole_group:  # as a terminal does
            os.killpg(started.pid, signal.SIGINT)
        else:
            os.kill(started.pid, signal.SIGINT)
        out, err = started.finish(60)
        assert started.returncode == 130, err
        assert "Traceback" not in err
        assert "superbatch: interrupted, the report is partial" in err
        report = read(tmp_path)
        assert report.partial
        assert 1 <= len(report.arms[0].runs) < 5000
        assert re.match(r"plane: \d+ of 5000 runs", out)
        assert "Partial:" in (tmp_path / "report.html").read_text(encoding="utf-8")
        assert (tmp_path / "plot.png").read_bytes().startswith(PNG)
        assert ended(started.pid, seconds=10), "a worker process still runs"
