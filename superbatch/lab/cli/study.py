"""`superbatch study NAME [RECIPE]`: the open questions of the sources, answered on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from superbatch.errors import InputError

from ..recipes import COUPLED
from ..recipes.loading import TAKES_DATA
from ..report.table import Column, Table
from ..studies.catalogue import STUDIES, entry_of
from ..studies.options import StudyOptions
from .options import AsJson, out_option, recipe_argument
from .printing import print_table
from .progress import receiver
from .publish import exit_code, folder_for, measured, publish

OUT = Path("superbatch-study")

Name = Annotated[
    str | None,
    typer.Argument(
        help=f"{', '.join(STUDIES)} (default: list them)",
        show_default=False,
        autocompletion=lambda incomplete: [name for name in STUDIES if name.startswith(incomplete)],
    ),
]
Recipe = Annotated[
    str | None, recipe_argument(default=f"digits; coupled: {', '.join(COUPLED)}, one after the other")
]


def study(
    *,
    name: Name = None,
    recipe: Recipe = None,
    options: StudyOptions,
    out: Annotated[Path | None, out_option(OUT / "NAME")] = None,
    as_json: AsJson = False,
) -> None:
    """Answer an open question about batch sizes with an experiment on a recipe.

    Shows a table, tests and a conclusion in one sentence; writes a JSON report, a plot and a page. Exit code:
    0 done, 2 wrong input, 130 interrupted (a partial report is written).
    """
    if name is None:
        show_studies(Console())
        return
    recipes = entry_of(name).recipes if recipe is None else (recipe,)
    if as_json and len(recipes) > 1:
        raise InputError(
            f"--json prints one report. Name a recipe: superbatch study {name} {recipes[0]} --json."
        )
    if options.data is not None and len(recipes) > 1:
        readers = [each for each in recipes if each in TAKES_DATA]
        raise InputError(
            f"--data is for one recipe: {', '.join(readers)}. Name it: superbatch study {name} {readers[0]} "
            f"--data {options.data}."
        )
    folder = folder_for(out, OUT / name, as_json=as_json)
    from ..studies.study import study as run

    for each in recipes:
        report = measured(
            f"study {name}", lambda show, each=each: run(name, each, options, progress=receiver(show))
        )
        own = folder / each if folder is not None and len(recipes) > 1 else folder
        publish(report, own, as_json=as_json)
        if report.partial:  # Ctrl-C ends the command, not one of its studies
            raise typer.Exit(exit_code(report))


def show_studies(console: Console) -> None:
    """Print which studies there are."""
    columns = (Column("study", "its name"), Column("question", "that it answers"))
    rows = tuple((name, entry.question) for name, entry in STUDIES.items())
    print_table(Table("superbatch study NAME [RECIPE]", columns, rows), console)
