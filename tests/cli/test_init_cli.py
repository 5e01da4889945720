"""`superbatch init`: the written recipe runs unchanged, and verify and fit need few of its fields."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from superbatch.errors import InputError
from superbatch.lab.recipes import load_recipe
from superbatch.lab.studies.compare import Options, compare
from tests.cli.commands import ONE_LINE, run
from tests.studies.own_recipe import plane

SHORT = """
import torch
from superbatch.lab.recipes import Recipe

x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))

def recipe():
    return Recipe(
        name="short", description="model, data and loss", model=lambda seed: torch.nn.Linear(3, 1),
        samples=40, batch=lambda indices: x[indices], batch_size=12,
        loss_fn=lambda model: lambda batch: model(batch).square().mean(),
    )
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_written_recipe_runs_unchanged(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("init", "mine.py") == 0
    command = capsys.readouterr().out.splitlines()[-1].split()
    assert command == ["superbatch", "verify", "mine.py:recipe"]
    assert run(*command[1:]) == 0
    assert capsys.readouterr().out.startswith("exact: ")
    text = (here / "mine.py").read_text(encoding="utf-8")
    assert "superbatch fit mine.py:recipe" in text
    assert "recipe.py" not in text
    assert text.count("REPLACE") >= 5


def test_the_recipe_learns_and_every_split_trains_like_the_batch() -> None:
    assert run("init") == 0
    report = compare(load_recipe("recipe.py:recipe"), Options(splits="2x64", updates=200, runs=1))
    real, split = report.arms
    assert real.mean is not None
    assert real.mean > 60, "four classes: 25 % is chance"
    assert split.weight_difference is not None
    assert split.weight_difference < 1e-3


def test_a_file_is_never_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "recipe.py").write_text("mine", encoding="utf-8")
    for name, message in (
        ("recipe.py", "already exists"),
        ("recipe.txt", "is not the name of a Python file"),
        ("recipe.py/x.py", "cannot be written"),
    ):
        assert run("init", name) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.fullmatch(ONE_LINE, line), line
        assert message in line
    assert (here / "recipe.py").read_text(encoding="utf-8") == "mine"
    assert [path.name for path in here.iterdir()] == ["recipe.py"]


def test_verify_and_fit_need_only_model_data_and_loss(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "short.py").write_text(SHORT, encoding="utf-8")
    assert run("verify", "short.py:recipe") == 0
    assert run("fit", "short.py:recipe", "--seconds", "0.1", "--threads", "1", "--sizes", "4", "--json") == 0
    assert run("fit", "short.py:recipe", "--optimizer", "lion") == 2
    assert "Use one of sgd, momentum, adam, adamw" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (("compare",), "evaluate, metric, which superbatch compare needs"),
        (("survey",), "learning_rates, which superbatch survey without --lr needs"),
        (("noise",), "learning_rates, which superbatch noise without --lr needs"),
        (("advise",), "learning_rates, which superbatch advise needs"),
        (("study", "momentum"), "evaluate, metric, margin, learning_rates, which superbatch study needs"),
    ],
)
def test_a_missing_field_is_named(
    command: tuple[str, ...], missing: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "short.py").write_text(SHORT, encoding="utf-8")
    assert run(*command, "short.py:recipe") == 2
    assert capsys.readouterr().err == (
        f"superbatch: The recipe 'short' has no {missing}. Pass it to Recipe(...).\n"
    )


def test_an_option_replaces_a_field_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    bare = plane(margin=float("nan"), learning_rates={})
    asked = Options(splits="2x10", updates=2, runs=2, margin=0.2, learning_rate=0.05)
    for lacking in (replace(asked, margin=None), replace(asked, learning_rate=None)):
        with pytest.raises(InputError, match="which superbatch compare without --"):
            compare(bare, lacking)
    report = compare(bare, asked)
    assert (report.optimizer, report.margin, len(report.arms)) == ("sgd", 0.2, 2)
