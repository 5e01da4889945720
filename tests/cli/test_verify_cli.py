"""`superbatch verify`: its output and the exit code for a CI job."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console

from superbatch.lab.cli.app import main
from superbatch.lab.cli.verify import show, verify_recipe
from superbatch.lab.studies.options import VerifyOptions
from superbatch.results.verification import Finding, GradientComparison, ParameterDifference, Verification
from tests.cli.commands import ONE_LINE

OWN = """
import torch
from superbatch.lab.recipes import Recipe

x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))

def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 1)

def recipe():
    return Recipe(
        name="own", description="a sum that is taken for a mean", model=model, samples=40,
        batch=lambda indices: x[indices], loss_fn=lambda model: lambda batch: model(batch).square().sum(),
        evaluate=lambda model: 0.0, metric="loss", unit="", margin=0.1, learning_rates={"sgd": 0.1},
        batch_size=12, updates=20,
    )
"""


class Result(NamedTuple):
    exit_code: int
    output: str
    errors: str


def run(*arguments: str) -> Result:
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main(["verify", *arguments])
    return Result(code, out.getvalue(), errors.getvalue())


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own_recipe.py"
    path.write_text(OWN)
    return f"{path}:recipe"


@pytest.mark.parametrize("recipe", ["digits", "text"])
def test_exact_recipes(recipe: str) -> None:
    result = run(recipe, "--batch-size", "12", "--microbatch-size", "5")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("exact: accumulated gradients equal the batch's (12 samples)\n")
    assert "float32 vs batch" in result.output
    assert "float64 vs batch" in result.output


def test_a_coupled_recipe_names_the_module() -> None:
    result = run("digits-bn", "--batch-size", "24")
    assert result.exit_code == 1
    assert result.output.startswith("NOT exact")
    assert "cause: batchnorm in " in result.output
    assert "BatchNorm1d in training mode" in result.output


def test_a_recipe_whose_loss_is_a_sum(own: str) -> None:
    result = run(own)
    assert result.exit_code == 1
    assert "cause: sum in loss_fn" in result.output
    assert 'For a plain sum pass reduction="sum"' in result.output


def test_json(own: str) -> None:
    result = run(own, "--json", "--microbatch-size", "5")
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert report["exact"] is False
    assert report["samples"] == 12
    assert report["causes"][0]["kind"] == "sum"
    float64 = report["comparisons"][1]
    assert float64["dtype"] == "float64"
    assert float64["split"] == [4, 4, 4]
    assert float64["largest"] == pytest.approx(2 / 3)
    assert [parameter["name"] for parameter in float64["parameters"]] == ["weight", "bias"]


def test_options_are_passed_to_the_verification() -> None:
    result = run("digits", "--batch-size", "12", "--dtype", "own", "--against", "splits", "--json")
    (comparison,) = json.loads(result.output)["comparisons"]
    assert (comparison["dtype"], comparison["against"]) == ("float32", "splits")
    assert comparison["split"] == [4, 4, 4]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing"], "There is no recipe 'nothing'"),
        (["digits", "--batch-size", "1"], "--batch-size 1"),
        (["digits", "--batch-size", "1000000"], "that can be split has 2 to"),
        (["digits", "--batch-size", "12", "--microbatch-size", "12"], "there is nothing to compare"),
        (["digits", "--batch-size", "12", "--microbatch-size", "0"], "--microbatch-size=0 is below 1"),
        (["digits", "--dtype", "half"], "dtype='half'"),
        (["digits", "--against", "nothing"], "against='nothing'"),
        (["digits", "--data", "."], "does not read --data="),
    ],
)
def test_wrong_input(arguments: list[str], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.output == ""
    assert text in result.errors
    assert re.fullmatch(ONE_LINE, result.errors.rstrip()), result.errors


def test_unknown_options_are_an_error() -> None:
    assert run("digits", "--microbatches", "3").exit_code == 2


def test_a_terminal_shows_a_table() -> None:
    parameter = ParameterDifference("head[0].weight", 1.0, 0.5, 0.5)
    comparison = GradientComparison("float64", "batch", (2, 2), (4,), 1.0, 1.0, (parameter,), 1e-12)
    finding = Finding("coupled", "body", math.nan, "type", "a [red]detail[/red]", "mend it")
    report = Verification(
        exact=False, samples=4, comparisons=(comparison,), causes=(finding,), findings=(), notes=("a note",)
    )
    out = io.StringIO()
    show(report, Console(file=out, force_terminal=True, width=100, color_system=None))
    text = out.getvalue()
    assert "NOT exact" in text
    assert "a [red]detail[/red]" in text  # shown literally, not as markup
    assert "head[0].weight" in text
    assert "5.0e-01" in text
    assert "─" in text


def test_a_recipe_verified_from_python() -> None:
    assert verify_recipe("digits", VerifyOptions(batch_size=9)).comparisons[0].split == (3, 3, 3)
