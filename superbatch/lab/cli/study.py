"""`superbatch study NAME [RECIPE]`: the open questions of the sources, answered on this machine."""

from __future__ import annotations

from functools import partial
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
from .publish import folder_for, run

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
) -> int:
    """Answer an open question about batch sizes with an experiment on a recipe.

    Shows a table, tests and a conclusion in one sentence; writes a JSON report, a plot and a page. Exit code:
    0 done, 2 wrong input, 130 interrupted (a partial report is written).
    """
    if name is None:
        show_studies(Console())
        return 0
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
    from ..studies.study import study as answer

    code = 0
    for each in recipes:
        own = folder / each if folder is not None and len(recipes) > 1 else folder
        code = run(f"study {name}", partial(answer, name, each, options), own, as_json=as_json)
        if code:  # Ctrl-C ends the command, not one of its studies
            break
    return code


def show_studies(console: Console) -> None:
    """Print which studies there are."""
    columns = (Column("study", "its name"), Column("question", "that it answers"))
    rows = tuple((name, entry.question) for name, entry in STUDIES.items())
    print_table(Table("superbatch study NAME [RECIPE]", columns, rows), console)
