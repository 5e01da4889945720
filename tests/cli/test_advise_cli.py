"""`superbatch advise` for a user: flags, files, messages, exit codes, terminals, and Ctrl-C."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from superbatch.results.advice import Advice
from tests.cli import commands
from tests.cli.commands import PLANE, PNG, error_lines, on_a_terminal
from tests.report_json import from_json

NUMBERS = {
    "--microbatch-size": 4,
    "--accumulation-steps": 16,
    "--ranks": 8,
    "--noise": 1500,
    "--noise-low": 1000,
    "--noise-high": 2500,
    "--micro-seconds": 0.1,
    "--update-seconds": 0.05,
    "--all-reduce-seconds": 1,
}
CLUSTER = tuple(str(part) for pair in NUMBERS.items() for part in pair)

run = partial(commands.run, "advise")
process = partial(commands.process, "advise")
read = partial(commands.read, Advice)


@pytest.fixture(autouse=True, scope="module")
def few_rounds() -> Iterator[None]:
    """Time fewer rounds: these tests do not depend on the times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("superbatch.lab.studies.advise.ROUNDS", 3)
        yield


def test_advice_for_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "here"
    assert run(*CLUSTER, "--lr", "3e-4", "--parameters", "1.3e9", "--out", str(out)) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].startswith("Accumulating 16 micro-batches helps."), "the verdict is first"
    assert lines[1].startswith("Least time at K* = 22.2")
    assert lines[2] == (
        "In 9 of 12 end-to-end runs to the same loss, with accumulation and without, the measured "
        "time was within the range."
    )
    assert lines[4] == (
        "micro-batches of 4 on each of 8 ranks, 100 ms each; update 50.0 ms, all-reduce 1.00 s; "
        "noise scale 1500 (1000 to 2500)"
    )
    assert lines[5].split() == ["K", "batch", "time", "range", "samples"]
    assert any(line.startswith("16 <") for line in lines)
    assert "The alternative: no accumulation" in lines
    below = lines[lines.index("", lines.index("The alternative: no accumulation")) + 1 :]
    assert 1 <= len(below) <= 3, "caveats"
    assert "4.84 GiB (4 bytes a parameter)" not in shown.out
    assert "4.84 GiB (4 bytes a parameter)" in (out / "report.html").read_text(encoding="utf-8")
    assert "\x1b" not in shown.out + shown.err, "no colours without a terminal"
    assert shown.err.splitlines()[-1].endswith(f"wrote {out / 'report.html'}, plot.png and report.json")
    assert (out / "plot.png").read_bytes().startswith(PNG)
    report = read(out)
    assert (report.verdict, report.asked, report.command["noise"]) == ("helps", 16, "1500.0")


def test_an_undetermined_noise_scale_is_plotted_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = ("--microbatch-size", "4", "--accumulation-steps", "12", "--noise-low", "100")
    times = ("--micro-seconds", "1", "--update-seconds", "0.1")
    assert run(*numbers, *times, "--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "pays is undetermined" in shown
    assert "not determined, at least 100" in shown
    assert "replace beta2 by its K-th root" in shown
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)
    assert read(tmp_path).best is None


def test_a_recipe_is_measured_and_only_json_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(PLANE, "--microbatch-size", "5", "--updates", "30", "--threads", "1", "--json") == 0
    report = from_json(Advice, capsys.readouterr().out)
    assert (report.recipe, report.asked, report.microbatch_size) == ("plane", 4, 5)
    assert report.noise_from == "measured over 30 updates of 20 samples"
    assert not list(tmp_path.iterdir()), "no files without --out"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Without a recipe --noise"),
        (("--noise", "many"), "Invalid value for '--noise'"),
        ((*CLUSTER, "--batch-size", "9"), "two of them determine the third"),
        ((PLANE, "--microbatch-size", "20", "--batch-size", "20"), "there is no accumulation to judge"),
        ((PLANE, "--optimizer", "lion"), "does not offer it"),
        ((*CLUSTER, "--out", __file__), "is a file"),
        (("no-such-recipe",), "no-such-recipe"),
    ],
)
def test_wrong_input_gives_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1
    assert not shown.out


def test_no_text_is_cut_on_a_narrow_terminal(tmp_path: Path) -> None:
    code, shown = on_a_terminal(60, "advise", *CLUSTER, "--out", str(tmp_path))
    assert code == 0
    assert "…" not in shown
    for word in ("samples", "0.189", "K* = 22.2"):
        assert word in shown


def test_ctrl_c_leaves_a_partial_report(tmp_path: Path) -> None:
    arguments = ("--microbatch-size", "5", "--updates", "1000000", "--threads", "1", "--out", str(tmp_path))
    with process(PLANE, *arguments, talkative=True) as started:
        for line in error_lines(started, seconds=60):
            if "update" in line:
                break
            assert "%" in line
        os.kill(started.pid, signal.SIGINT)
        _, errors = started.finish(60)
        assert started.returncode == 130, errors
    assert "the report is partial" in errors
    assert read(tmp_path).partial


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = commands.without_colours(capsys.readouterr().out)
    for flag in ("--noise-low", "--micro-seconds", "--ranks", "--accumulation-steps"):
        assert flag in shown
