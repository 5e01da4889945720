"""`superbatch survey` for a user: flags, files, messages, exit codes, and Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest

from superbatch.lab.report.surveys import Surveys
from superbatch.lab.studies import survey
from tests.cli import commands
from tests.cli.commands import ONE_LINE, PLANE, PNG, first_line
from tests.report_json import from_json

QUICK = ("--repeats", "2", "--updates", "20", "--splits", "4x5,13/5/2")

run = partial(commands.run, "survey")
process = partial(commands.process, "survey")
read = partial(commands.read, Surveys)


def test_output_is_a_table_sentences_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "here"
    assert run(PLANE, *QUICK, "--dtype", "float64", "--include-wrong", "--out", str(out)) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0] == (
        "plane: 2 surveys per arm, learning rate 1e-06 to 10 in 20 updates of 20 samples, sgd, float64"
    )
    assert re.match(
        r"split +suggested learning rate +stopped at +pairs differ by +curve within 10 % +"
        r"rate within 0.15 decades$",
        lines[1],
    )
    names = [re.split(r"  +", line)[0] for line in lines[3:10]]
    assert names == [
        "1x20 (real batch)",
        "1x20 again",
        "4x5",
        "13/5/2",
        "4x5 missing 1/K",
        "1x2",
        "1x10",
    ]
    assert re.match(
        r"(Begin with a|No) learning rate (of about [\d.e-]+ for batches of 20|is sugg)", lines[10]
    )
    assert lines[11].startswith(
        "4x5 and 13/5/2 survey like the real batch: from the same weights and samples"
    )
    assert lines[-1].startswith("Coinciding curves are weak evidence.")
    assert "\x1b" not in shown.out + shown.err, "no colours without a terminal"
    assert shown.err.splitlines()[-1].endswith(f"wrote {out / 'report.html'}, plot.png and report.json")
    assert sorted(file.name for file in out.iterdir()) == ["plot.png", "report.html", "report.json"]
    assert (out / "plot.png").read_bytes().startswith(PNG)
    report = read(out)
    assert not report.partial
    assert report.command["splits"] == "4x5,13/5/2"
    assert report.versions.keys() >= {"superbatch", "torch", "python"}


def test_a_survey_of_the_real_batch_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ("--repeats", "2", "--updates", "40", "--splits", "1x20", "--low", "1e-4", "--high", "3")
    assert run(PLANE, *arguments, "--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^Begin with a learning rate of about 0\.\d+ for batches of 20 samples", shown, re.M)
    assert "No split that claims to be exact was surveyed beside the real batch." in shown


def test_only_json_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(PLANE, *QUICK, "--json") == 0
    assert from_json(Surveys, capsys.readouterr().out).recipe == "plane"
    assert list(tmp_path.iterdir()) == [], "no files unless requested"


def test_each_run_writes_to_its_own_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(PLANE, *QUICK, "--repeats", "1", "--what", "momentum", "--high", "0.9") == 0
    assert sorted(os.listdir(tmp_path / "superbatch-survey")) == ["plot.png", "report.html", "report.json"]
    assert "momentum 0 to 0.9" in capsys.readouterr().out


def test_check_passes_and_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (PLANE, *QUICK, "--dtype", "float64", "--json", "--check")
    assert run(*arguments) == 0
    capsys.readouterr()
    right = survey.accumulator_of

    def halved(split, recipe, model, optimizer):
        optimizer.param_groups[0]["weight_decay"] = 0.1
        return right(split, recipe, model, optimizer)

    monkeypatch.setattr(survey, "accumulator_of", halved)
    assert run(*arguments) == 1
    assert "check failed: 4x5: paired curves differ by" in capsys.readouterr().err
    assert run(*arguments[:-1]) == 0, "only on request"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such-recipe",), "no-such-recipe"),
        ((PLANE, "--what", "rate"), "what='rate'.*Use one of lr, momentum, weight_decay"),
        ((PLANE, "--updates", "3"), "updates=3"),
        ((PLANE, "--splits", "3x30,5x20"), "batches of 90 and 100"),
        ((PLANE, "--repeats", "0"), "repeats=0"),
        ((PLANE, "--repeats", "many"), "repeats"),
        ((PLANE, "--low", "1", "--high", "0.1"), "not increasing positive numbers"),
        ((PLANE, "--out", "/dev/null/here"), "--out"),
    ],
)
def test_wrong_input_gives_one_line(
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
    assert re.fullmatch(ONE_LINE, line), line
    assert list(tmp_path.iterdir()) == [], "files were left behind"


@pytest.mark.skipif(os.name != "posix", reason="signals of a terminal are POSIX's")
def test_ctrl_c_leaves_a_partial_report(tmp_path: Path) -> None:
    with process(PLANE, *QUICK, "--repeats", "5000", "--out", str(tmp_path)) as started:
        assert first_line(started, seconds=60).startswith("survey own_recipe.py:plane: seed ")
        os.kill(started.pid, signal.SIGINT)
        out, err = started.finish(60)
        assert started.returncode == 130, err
        assert "Traceback" not in err
        assert "superbatch: interrupted, the report is partial" in err
        report = read(tmp_path)
        assert report.partial
        assert 1 <= len(report.arms[0].runs) < 5000
        assert re.match(r"plane: \d+ of 5000 surveys", out)
        assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


def test_help_imports_no_framework() -> None:
    code = """
import sys
from superbatch.lab.cli import main
assert main(["survey", "--help"]) == 0
print("heavy:", *({"torch", "matplotlib", "numpy", "scipy", "sklearn"} & set(sys.modules)))
"""
    done = commands.python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == "heavy:"
    assert "--include-wrong" in done.stdout
