"""Options that several commands share: help texts and shell completion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..recipes import COUPLED, RECIPES

OWN = "or your own file.py:function or package.module:function, whose code is run"
RECIPE_HELP = f"{', '.join(RECIPES)}; {OWN}"


def option(text: str, *flags: str) -> Any:
    """Make an option whose help text states its default."""
    return typer.Option(*flags, help=text, show_default=False)


def complete_recipe(incomplete: str) -> list[str]:
    """Complete a recipe: built-in names, and Python files of the working directory.

    Examples:
        >>> complete_recipe("digits-c")
        ['digits-conv', 'digits-conv-bn']
    """
    files = [f"{path.name}:" for path in sorted(Path().glob("*.py"))]
    return [name for name in (*RECIPES, *COUPLED, *files) if name.startswith(incomplete)]


def recipe_argument(*, default: str | None = None, show_default: bool = True) -> Any:
    """Make the argument that names a recipe."""
    text = RECIPE_HELP if default is None else f"{RECIPE_HELP} (default: {default})"
    return typer.Argument(help=text, show_default=show_default, autocompletion=complete_recipe)


def out_option(default: Path, files: str = "report.json, plot.png and report.html") -> Any:
    """Make the option that names the folder for the files of a report."""
    return option(f"folder for {files} (default: {default})")


Recipe = Annotated[str, recipe_argument()]
OptimizerName = Annotated[str | None, option("sgd, momentum, adam or adamw, as the recipe offers")]
BatchSize = Annotated[int | None, option("samples of one update (default: the recipe's)")]
LearningRate = Annotated[
    float | None, option("learning rate (default: the recipe's for the optimizer)", "--lr")
]
Dtype = Annotated[str, typer.Option(help="float32 or float64")]
Margin = Annotated[float | None, option("a difference of the metric that does not matter, in its unit")]
Seed = Annotated[int, typer.Option(help="seed of the initial weights and the order of samples")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
SampleRng = Annotated[bool, typer.Option("--sample-rng", help="give every sample its own random numbers")]
Data = Annotated[
    Path | None,
    option(
        "data folder: IDX files for mnist; FOLDER/CLASS/*.png for counting; pairs (.tsv, .jsonl) or Python "
        "sources for code-search; Python sources or .txt files for token-means"
    ),
]
Threads = Annotated[int | None, option("torch threads (default: torch's own default)")]
ThreadsEach = Annotated[int, typer.Option(help="torch threads of each process")]
Workers = Annotated[int | None, option("processes (default: 2, where the machine has two cores)")]
AsJson = Annotated[bool, option("print the report as JSON, and write files only if --out is given", "--json")]
