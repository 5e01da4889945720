"""Flags of `superbatch compare`: aliases, contradictions, wrong input, and --check."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from superbatch.errors import InputError
from superbatch.lab.cli.aliases import translated
from superbatch.lab.report.comparison import Comparison
from superbatch.lab.studies import arms as arms_module
from superbatch.lab.studies.options import CompareOptions
from tests.cli import commands
from tests.cli.commands import ONE_LINE, PLANE
from tests.report_json import from_json

CROWD = PLANE.replace(":plane", ":crowd")
QUICK = ("--runs", "2", "--updates", "4", "--workers", "1")

run = partial(commands.run, "compare")
process = partial(commands.process, "compare")


def test_flags_of_the_sources_give_one_arm(capsys: pytest.CaptureFixture[str]) -> None:
    sources = ("--average-gradients", "4", "--batch-size", "5", "--iterations", "16", "--runs", "1")
    assert run(PLANE, *sources, "--json") == 0
    report = from_json(Comparison, capsys.readouterr().out)
    assert [arm.name for arm in report.arms] == ["1x20", "4x5"]
    assert report.updates == 4
    assert report.batch_size == 20


def test_iterations_without_averaging_are_updates() -> None:
    asked = translated(CompareOptions(batch_size=50), average_gradients=None, iterations=7)
    assert (asked.updates, asked.batch_size, asked.splits) == (7, 50, None)


def test_batch_size_and_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(PLANE, *QUICK, "--batch-size", "12", "--optimizer", "adam", "--lr", "0.5", "--json") == 0
    report = from_json(Comparison, capsys.readouterr().out)
    assert [arm.name for arm in report.arms] == ["1x12", "4x3", "12x1"]
    assert (report.optimizer, report.learning_rate) == ("adam", 0.5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"average_gradients": 20, "iterations": 20001, "batch_size": 5},
            "the last update would be incomplete. Give a multiple of 20",
        ),
        ({"average_gradients": 20}, "the size of its micro-batches is missing. Add --batch-size M"),
        ({"average_gradients": 20, "splits": "5x20", "batch_size": 5}, "both set the split of the batch"),
        ({"iterations": 10, "updates": 10}, "both set the length of a run"),
        ({"average_gradients": 0, "batch_size": 5}, "--average-gradients 0 is not a number of micro-batches"),
        ({"iterations": -5}, "--iterations -5"),
    ],
)
def test_contradictions_of_flags(flags: dict[str, Any], message: str) -> None:
    lengths = {name: flags.get(name) for name in ("average_gradients", "iterations")}
    with pytest.raises(InputError, match=message):
        translated(CompareOptions(**{name: flags[name] for name in flags.keys() - lengths}), **lengths)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("digit",), r"There is no recipe 'digit'; did you mean 'digits'\? Use one of digits"),
        (("--splits", "5*20"), r"The split '5\*20' cannot be read. Write KxM"),
        (
            ("--updates", "many"),
            r"Invalid value for '--updates': .*integer.* See superbatch compare --help",
        ),
        (("--colour", "red"), "No such option: --colour.* See superbatch compare --help"),
        (("--runs", "0"), "runs=0 is not a positive integer"),
        (("--dtype", "float16"), "dtype='float16'"),
        (("--data", "nowhere"), "does not read --data="),
        (("mnist",), "The recipe mnist needs a folder with the four files of MNIST"),
        (("--out", f"{__file__}/report"), r"test_compare_flags.py' is a file. Give a folder"),
        (("nowhere.py:make",), "The recipe file 'nowhere.py' does not exist"),
        ((CROWD, "--runs", "1"), "samples influence each other|BatchNorm in training mode"),
        (
            ("text", "--batchnorm"),
            "--batchnorm: the recipe text has no variant with BatchNorm. Use it with digits or digits-conv",
        ),
        (("text", "--recipe", "digits"), "The argument text and --recipe digits both set the recipe"),
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


def test_a_child_process_prints_no_traceback(tmp_path: Path) -> None:
    with process("--splits", "3x30,5x20", "--out", str(tmp_path / "out")) as started:
        out, err = started.finish(60)
    assert (started.returncode, out) == (2, "")
    assert err == (
        "superbatch: The splits 3x30 and 5x20 are of batches of 90 and 100 samples. "
        "Give splits of one batch size: all arms make the same update.\n"
    )


def test_check_passes_and_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (PLANE, *QUICK, "--splits", "13/5/2", "--dtype", "float64", "--json", "--check")
    assert run(*arguments) == 0
    capsys.readouterr()

    right = arms_module.accumulator_of

    def wrong(split, recipe, *rest, check):
        return right(split, replace(recipe, weight=lambda batch: 1.0), *rest, check=False)

    monkeypatch.setattr(arms_module, "accumulator_of", wrong)
    assert run(*arguments) == 1
    assert "check failed: 13/5/2: weights differ by" in capsys.readouterr().err
    assert run(*arguments[:-1]) == 0, "only on request"
