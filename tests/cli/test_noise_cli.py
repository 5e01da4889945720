"""`superbatch noise` for a user: tables, files, JSON, errors."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from superbatch.lab.report.noise_study import NoiseStudy
from tests.cli import commands
from tests.cli.commands import PLANE, PNG
from tests.report_json import from_json

QUICK = ("--threads", "1", "--updates", "40", "--batch-size", "40")

run = partial(commands.run, "noise")
read = partial(commands.read, NoiseStudy)


def test_output_is_tables_sentences_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "here"
    assert run(PLANE, *QUICK, "--optimizer", "adam", "--lr", "0.02", "--out", str(out)) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0] == "plane: 40 updates of 40 samples in micro-batches of 5, adam lr 0.02"
    assert " ".join(lines[1].split()) == "updates loss noise scale 95 % interval q = 1 q = 2 remark"
    (times,) = [k for k, line in enumerate(lines) if line.startswith("Time to the same loss: a micro-batch")]
    assert "noise scale" in lines[times + 11]
    assert sorted(file.name for file in out.iterdir()) == ["plot.png", "report.html", "report.json"]
    assert (out / "plot.png").read_bytes().startswith(PNG)
    report = read(out)
    assert (report.optimizer, report.learning_rate, report.partial) == ("adam", 0.02, False)
    assert report.command["updates"] == "40"


def test_only_json_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(PLANE, *QUICK, "--json") == 0
    assert from_json(NoiseStudy, capsys.readouterr().out).updates == 40
    assert not list(tmp_path.iterdir())


def test_wrong_input_gives_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(PLANE, "--batch-size", "1", "--json") == 2
    assert "superbatch: A batch of 1 samples cannot be drawn from" in capsys.readouterr().err.splitlines()[0]
