"""`superbatch fit` for a user: flags, files, messages, exit codes, terminals, and Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from superbatch.errors import InputError
from superbatch.lab.report.fitting import Fitting
from superbatch.lab.studies.options import parse_bytes
from tests.cli import commands
from tests.cli.commands import ONE_LINE, PLANE, PNG, first_line, on_a_terminal
from tests.report_json import from_json

QUICK = ("--threads", "1")

run = partial(commands.run, "fit")
process = partial(commands.process, "fit")
read = partial(commands.read, Fitting)


@pytest.fixture(autouse=True, scope="module")
def few_rounds() -> Iterator[None]:
    """Time fewer rounds: these tests do not depend on the times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("superbatch.lab.studies.fit.ROUNDS", 2)
        yield


def test_output_is_tables_sentences_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "here"
    assert run(PLANE, *QUICK, "--limit", "2MiB", "--optimizer", "adam", "--out", str(out)) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0] == "plane: a batch of 20 samples, adam, float32, cpu, 1 thread"
    assert re.match(r"micro-batch +batch of 20 +predicted +measured +per sample +per update$", lines[1])
    sizes = [line.split()[0] for line in lines[3 : lines.index("")]]
    assert sizes == ["1", "2", "3", "5", "10", "20"]
    assert "Effective batches within reach" in lines
    assert re.search(r"^Use micro-batches of \d+: the fastest of those timed", shown.out, re.MULTILINE)
    said = "The whole batch fits in 2.00 MiB (--limit); so would about 2000 samples or more."
    assert said in shown.out
    assert "\x1b" not in shown.out + shown.err, "no colours without a terminal"
    assert shown.err.splitlines()[-1].endswith(f"wrote {out / 'report.html'}, plot.png and report.json")
    assert sorted(file.name for file in out.iterdir()) == ["plot.png", "report.html", "report.json"]
    assert (out / "plot.png").read_bytes().startswith(PNG)
    report = read(out)
    assert (report.optimizer, report.limit.bytes, report.partial) == ("adam", 2 * 2**20, False)
    assert report.command["limit"] == "2097152"
    assert report.versions.keys() >= {"superbatch", "torch", "python"}


def test_only_json_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(PLANE, *QUICK, "--sizes", "4, 20", "--json") == 0
    report = from_json(Fitting, capsys.readouterr().out)
    assert [size.samples for size in report.sizes] == [4, 20]
    assert list(tmp_path.iterdir()) == [], "no files unless requested"


def test_each_run_writes_to_its_own_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(PLANE, *QUICK, "--batch-size", "12") == 0
    assert sorted(os.listdir(tmp_path / "superbatch-fit")) == ["plot.png", "report.html", "report.json"]
    assert read(tmp_path / "superbatch-fit").batch_size == 12


def test_the_report_names_the_memory_limit_of_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(PLANE, *QUICK, "--json") == 0
    report = from_json(Fitting, capsys.readouterr().out)
    assert report.limit.bytes > 2**20
    assert report.limit.by not in ("", "--limit")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2 * 2**30),
        ("2 gib", 2 * 2**30),
        ("2G", 2 * 2**30),
        ("1.5GB", 1_500_000_000),
        (".5MiB", 2**19),
        ("512k", 512 * 1024),
        ("100B", 100),
        ("100", 100),
    ],
)
def test_sizes_of_memory_are_parsed(text: str, expected: int) -> None:
    assert parse_bytes(text, "--limit") == expected


@pytest.mark.parametrize("text", ["", "GiB", "2PiB", "-1MB", "2 GiB free", "0", "0.1B", "1e9", "nan"])
def test_an_invalid_size_of_memory_is_an_error(text: str) -> None:
    with pytest.raises(InputError, match="is not a number of bytes"):
        parse_bytes(text, "--limit")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("digit",), "There is no recipe 'digit'; did you mean 'digits'"),
        ((), "Missing argument"),
        ((PLANE, "--limit", "lots"), "--limit lots is not a number of bytes. Write it as"),
        ((PLANE, "--sizes", "8;16"), "--sizes 8;16: sizes are integers of at least 1"),
        ((PLANE, "--sizes", "8,0"), "--sizes 8,0"),
        ((PLANE, "--sizes", "50"), "A micro-batch of 50 samples is not a part of a batch of 20"),
        ((PLANE, "--batch-size", "0"), "--batch-size=0"),
        ((PLANE, "--optimizer", "lion"), "Use one of sgd, adam"),
        ((PLANE, "--dtype", "int8"), "dtype='int8'"),
        ((PLANE, "--device", "tpu"), "memory is measured on CPU and CUDA only"),
        ((PLANE, "--colour", "red"), "No such option: --colour.* See superbatch fit --help"),
        ((PLANE, "--out", f"{__file__}/report"), r"test_fit_cli.py' is a file"),
        (("mnist",), "needs a folder with the four files of MNIST"),
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
    assert re.fullmatch(ONE_LINE, line), line
    assert list(tmp_path.iterdir()) == [], "files were left behind"


@pytest.mark.skipif(os.name != "posix", reason="signals of a terminal are POSIX's")
def test_ctrl_c_leaves_a_partial_report(tmp_path: Path) -> None:
    # Without a terminal, progress is printed at the start and then every five seconds.
    slow = ("--batch-size", "4000", "--seconds", "300", "--sizes", "1,2,3,4,5,6,7,8,9,10,11,12,4000")
    with process(PLANE, *slow, "--out", str(tmp_path)) as started:
        said = first_line(started, seconds=60)
        assert said.startswith("fit own_recipe.py:plane: predicted ")
        os.killpg(started.pid, signal.SIGINT)
        out, err = started.finish(60)
        assert started.returncode == 130, err
        assert "Traceback" not in err
        assert "superbatch: interrupted, the report is partial" in err
        report = read(tmp_path)
        assert report.partial
        assert any(size.predicted for size in report.sizes)
        assert out.startswith("plane: a batch of 4000 samples")
        assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are POSIX's")
def test_a_terminal_shows_a_progress_bar_and_unwrapped_tables(tmp_path: Path) -> None:
    columns = 80  # the usual least width
    limit = ("--limit", "25KB", "--batch-size", "1000", "--sizes", "8,64,1000", "--seconds", "1")
    code, shown = on_a_terminal(columns, "fit", PLANE, *limit, "--out", str(tmp_path))
    assert code == 0, shown
    bar, tables = shown.split("plane: a batch of", 1)
    assert re.search(r"fit own_recipe.py:plane .+ \d+ %", bar)
    lines = [line for line in tables.splitlines() if "wrote" not in line]  # a path may be wider
    assert max(map(len, lines)) <= columns
    assert "1000 too large" in tables, "the premise: the widest row name is present"
    assert " > limit" in tables
    rows = [line.split("  ") for line in lines if re.match(r" *\d+ ( |too|fastest|largest)", line)]
    report = read(tmp_path)
    assert len(rows) == len(report.sizes) + len(report.reach), "a row is wrapped"


def test_help_imports_no_framework() -> None:
    code = """
import sys
from superbatch.lab.cli import main
assert main(["fit", "--help"]) == 0
print("heavy:", *({"torch", "matplotlib", "numpy", "scipy", "sklearn"} & set(sys.modules)))
"""
    done = commands.python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == "heavy:"
    assert "--limit" in done.stdout
