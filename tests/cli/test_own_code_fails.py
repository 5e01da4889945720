"""Errors in the code of a recipe: one line with file and line number; the traceback on request."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import commands

RECIPE = """
import torch
from torch import nn

from superbatch.lab.recipes import Recipe


class OwnError(Exception):
    pass


def evaluate(model):
    {evaluate}


def loss_fn(model):
    def loss(batch):
        {loss}
        return model(batch[0]).square().mean()
    return loss


def recipe():
    rows = torch.randn(24, 3)
    return Recipe(
        name="own", description="own", model=lambda seed: nn.Linear(3, 1), samples=24, batch_size=12,
        batch=lambda indices: (rows[indices],), loss_fn=loss_fn, evaluate=evaluate, metric="points",
        margin=1.0, learning_rates={{"sgd": 0.01}},
    )
"""
FAILS = "raise OwnError('no labels\\nhere')"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of the recipe."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "own.py"


def write(own: Path, where: str) -> None:
    parts = {"evaluate": "return 0.0", "loss": ""} | {where: FAILS.replace("\n", "\\n")}
    own.write_text(RECIPE.format(**parts), encoding="utf-8")


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("where", ["evaluate", "loss"])
def test_the_error_names_file_and_line(
    own: Path, capsys: pytest.CaptureFixture[str], where: str, workers: str
) -> None:
    write(own, where)
    lines = own.read_text(encoding="utf-8").splitlines()
    number = next(number for number, line in enumerate(lines, 1) if "raise OwnError" in line)
    arguments = ("--splits", "2x6", "--runs", "2", "--workers", workers, "--updates", "2", "--out", "kept")
    assert commands.run("compare", f"{own}:recipe", *arguments) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"superbatch: OwnError: no labels here (line {number} of {own}, in {where}). Correct it there; "
        "--traceback shows the whole traceback."
    )


def test_the_traceback_on_request(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(own, "loss")
    for arguments in (
        ("--traceback", "verify", f"{own}:recipe"),
        ("verify", f"{own}:recipe", "--traceback"),
    ):
        assert commands.run(*arguments) == 2
        shown = capsys.readouterr().err
        assert "Traceback (most recent call last)" in shown and "in loss\n" in shown
    assert commands.run("verify", f"{own}:recipe") == 2
    assert "Traceback" not in capsys.readouterr().err
    assert commands.run("verify", "nothing:recipe", "--traceback") == 2
    assert "ModuleNotFoundError" in capsys.readouterr().err
