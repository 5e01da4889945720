"""`superbatch study` for a user: flags, files, messages, exit codes, and Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest

from superbatch.lab.report.study import Study
from superbatch.lab.studies.catalogue import STUDIES
from tests.cli import commands
from tests.cli.commands import PLANE, PNG, first_line
from tests.report_json import from_json

TINY = ("--runs", "2", "--samples", "96", "--workers", "1")

run = partial(commands.run, "study")
process = partial(commands.process, "study")
read = partial(commands.read, Study)


def test_output_is_a_table_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "here"
    assert run("grow-batch", PLANE, *TINY, "--lr", "0.05", "--out", str(out)) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0] == "grow-batch: plane, 2 seeds, first batch 3, lr 0.05"
    assert re.match(r"arm +squared error +training loss +updates +samples$", lines[1])
    assert [line.split("  ")[0] for line in lines[3:6]] == [
        "constant rate",
        "decay the rate",
        "grow the batch",
    ]
    report = read(out)
    assert lines[-1] == report.conclusion
    assert "equivalence (TOST)" in shown.out
    assert sorted(file.name for file in out.iterdir()) == ["plot.png", "report.html", "report.json"]
    assert (out / "plot.png").read_bytes().startswith(PNG)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Decay the learning rate, or grow the batch" in page
    assert "<script" not in page
    assert report.command["learning_rate"] == "0.05"
    assert not report.partial


def test_the_quickest_is_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("critical-batch", PLANE, "--quick", "--samples", "240", "--workers", "1", "--json") == 0
    report = from_json(Study, capsys.readouterr().out)
    assert len(report.seeds) == STUDIES["critical-batch"].quick_runs
    assert report.command["quick"] == "True"


def test_each_run_writes_to_its_own_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("splits", PLANE, *TINY) == 0
    names = sorted(os.listdir(tmp_path / "superbatch-study" / "splits"))
    assert names == ["plot.png", "report.html", "report.json"]


def test_a_recipe_of_coupled_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("coupled", "ring", "--runs", "2", "--samples", "512", "--workers", "1", "--out", str(tmp_path))
        == 0
    )
    shown = capsys.readouterr().out
    assert shown.startswith("coupled: ring, 2 seeds, batch 256, updates 2, optimizer adam\n")
    for way in ("superbatch", "plain, m = 32", "plain, m = 2"):
        assert f"\n{way} " in shown
    assert sorted(os.listdir(tmp_path)) == ["plot.png", "report.html", "report.json"]


@pytest.mark.slow
def test_study_coupled_without_a_recipe_reports_on_each_recipe(tmp_path: Path) -> None:
    assert run("coupled", "--runs", "1", "--samples", "256", "--workers", "1", "--out", str(tmp_path)) == 0
    assert sorted(os.listdir(tmp_path)) == sorted(STUDIES["coupled"].recipes)
    assert {read(tmp_path / each).recipe for each in os.listdir(tmp_path)} == {*STUDIES["coupled"].recipes}


def test_no_name_lists_the_studies(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    shown = capsys.readouterr().out
    for name, entry in STUDIES.items():
        assert re.search(rf"^{name} +{re.escape(entry.question)}$", shown, re.MULTILINE)


def test_help_lists_the_studies(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "momentum" in shown and "--quick" in shown


def test_help_does_not_import_torch() -> None:
    done = commands.python(
        "import sys; from superbatch.lab.cli import main; main(['study']); print('torch' in sys.modules)"
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("momentun",), r"There is no study 'momentun'; did you mean 'momentum'\? Use one of"),
        (("momentum", "digit"), "There is no recipe 'digit'"),
        (("precision", "--margin", "0.5"), "The study 'precision' does not use --margin=0.5. Leave it out"),
        (("momentum", "pairs", "--quick"), "its samples are coupled"),
        (
            ("coupled", "digits", "--quick"),
            "The recipe 'digits' is not for the study coupled. Use one of code-search",
        ),
        (
            ("coupled", "--json"),
            "--json prints one report, but the study coupled runs 5 recipes. Name one: superbatch study "
            "coupled code-search",
        ),
        (
            ("coupled", "--data", "."),
            "--data needs one of the recipes code-search, counting, token-means. Name it: superbatch study",
        ),
        (
            ("coupled", "ring", "--device", "gpu"),
            "--device='gpu' cannot be used here: .*Leave it out to train",
        ),
        (("momentum", "--runs", "0"), "runs=0 is not a positive integer. Give 1 or more"),
        (("momentum", "--out", f"{__file__}/report"), "test_study_cli.py' is a file"),
        (("momentum", "--colour", "red"), "No such option: --colour.* See superbatch study --help"),
    ],
)
def test_wrong_input_gives_one_line_and_exit_code_2(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert re.search(message, line), line
    assert list(tmp_path.iterdir()) == [], "files were left behind"


@pytest.mark.skipif(os.name != "posix", reason="signals of a terminal are POSIX's")
def test_ctrl_c_leaves_a_partial_report(tmp_path: Path) -> None:
    long = ("--samples", "400", "--runs", "5000", "--workers", "1")
    with process("grow-batch", PLANE, *long, "--out", str(tmp_path)) as started:
        assert first_line(started, seconds=60).startswith("study grow-batch: seed ")
        os.killpg(started.pid, signal.SIGINT)
        out, err = started.finish(60)
        assert started.returncode == 130, err
        assert "Traceback" not in err
        assert "the report is partial" in err
        report = read(tmp_path)
        assert report.partial
        assert 0 < len(report.arms[0].runs) < 5000
        assert out.splitlines()[0].startswith(f"grow-batch: plane, {len(report.arms[0].runs)} of 5000 seeds")
