"""`superbatch caffe` for a user: table, files, JSON, and mistakes with line and column."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

import pytest

from superbatch.results.caffe import CaffeExplained
from tests.cli import commands
from tests.cli.commands import ONE_LINE, PNG, on_a_terminal
from tests.report_json import from_json

run = partial(commands.run, "caffe")

TEXT = """net: "train_val.prototxt"
base_lr: 0.01
lr_policy: "multistep"
gamma: 0.1
stepvalue: [600, 800, 800]
max_iter: 1000
momentum: 0.9
clip_gradients: 35
iter_size: 8
"""


@pytest.fixture
def solver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a solver file in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("solver.prototxt").write_text(TEXT, encoding="utf-8")
    return "solver.prototxt"


def test_fields_of_forks(solver: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(solver).write_text(f'{TEXT}eval_type: "detection"\n', encoding="utf-8")
    assert run(solver) == 2
    assert "'eval_type': a solver has no such field." in capsys.readouterr().err
    assert run(solver, "--ignore-unknown") == 0
    assert "eval_type: Caffe has no such field, so it was ignored" in capsys.readouterr().out
    report = commands.read(CaffeExplained, Path("superbatch-caffe"))
    assert report.command == {"solver": solver, "ignore_unknown": "true"}


def test_output_is_a_table_sentences_and_files(solver: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(solver, "--batch-size", "32") == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0] == (
        "solver.prototxt: 1000 updates of 256 samples (8 micro-batches of 32), SGD, rate multistep"
    )
    assert re.match(r"Caffe +value +PyTorch$", lines[1])
    assert re.search(r"^iter_size +8 +accumulation_steps=8, an effective batch of 256$", shown.out, re.M)
    assert "clip_gradients: Caffe clips the sum over 8 micro-batches" in shown.out
    assert (
        "stepvalue: Caffe makes at most one drop per update, in the order of the file: 800 happens at 801."
        in shown.out
    )
    assert "Stock torch is not the same: torch.optim.SGD(parameters, lr=0.01, momentum=0.9)" in shown.out
    assert sorted(os.listdir("superbatch-caffe")) == ["plot.png", "report.html", "report.json", "train.py"]
    assert Path("superbatch-caffe/plot.png").read_bytes().startswith(PNG)
    report = commands.read(CaffeExplained, Path("superbatch-caffe"))
    assert (report.effective_batch, report.samples, report.partial) == (256, 256_000, False)
    assert report.command == {"solver": solver, "batch_size": "32"}
    assert Path("superbatch-caffe/train.py").read_text(encoding="utf-8") == report.code
    assert shown.err.splitlines()[-1].endswith("report.html, plot.png, train.py and report.json")


def test_only_json_is_printed(solver: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(solver, "--json") == 0
    report = from_json(CaffeExplained, capsys.readouterr().out)
    assert (report.updates, report.effective_batch) == (1000, None)
    assert os.listdir() == [solver], "no files unless requested"
    assert run(solver, "--json", "--out", "made/here") == 0
    assert commands.read(CaffeExplained, Path("made/here")).policy == "multistep"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gamma: 0.1", "gama: 0.1", "line 4, column 1: 'gama': a solver has no such field"),
        ("gamma: 0.1", "gamma 0.1", "line 4, column 7: '0.1': a colon is missing after gamma"),
        ("max_iter: 1000", "max_iter: 1e3", "line 6, column 11: max_iter: 1e3: max_iter must be"),
        ('prototxt"', "prototxt", "line 1, column 6: .*the string is not closed on its line"),
    ],
)
def test_a_mistake_in_the_file_gives_one_line(
    solver: str, old: str, new: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert TEXT.count(old) == 1
    Path(solver).write_text(TEXT.replace(old, new), encoding="utf-8")
    assert_refused(capsys, message, solver)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.prototxt",), "The solver file 'none.prototxt' cannot be read: No such file or directory"),
        ((), "Missing argument"),
        (("solver.prototxt", "--batch-size", "0"), "superbatch: --batch-size=0"),
        (
            ("solver.prototxt", "--batch", "8"),
            r"No such option: --batch. Did you mean --batch-size\? See superbatch caffe --help",
        ),
        (("solver.prototxt", "--out", "solver.prototxt/x"), "solver.prototxt' is a file"),
    ],
)
def test_wrong_input_gives_one_line_and_exit_code_2(
    solver: str, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(capsys, message, *arguments)


def assert_refused(capsys: pytest.CaptureFixture[str], message: str, *arguments: str) -> None:
    before = os.listdir()
    assert run(*arguments) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert shown.out == ""
    assert re.search(message, line), line
    assert re.fullmatch(ONE_LINE, line), line
    assert os.listdir() == before, "files were left behind"


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are POSIX's")
def test_a_narrow_terminal(solver: str) -> None:
    code, shown = on_a_terminal(80, "caffe", solver, "--batch-size", "32", "--out", "x")
    assert code == 0, shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "accumulation_steps=8" in shown


def test_it_needs_no_torch(solver: str) -> None:
    code = f"""
import sys
from superbatch.lab.cli import main
assert main(["caffe", {str(Path(solver).absolute())!r}, "--json"]) == 0
print("heavy:", *({{"torch", "matplotlib", "numpy", "scipy", "sklearn"}} & set(sys.modules)))
"""
    done = commands.python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == "heavy:"
