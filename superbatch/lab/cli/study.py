"""`superbatch study NAME [RECIPE]`: experiments on the open questions of the cited articles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from superbatch.errors import InputError

from ..recipes import COUPLED
from ..recipes.loading import TAKES_DATA
from ..report.table import table_of
from ..studies.catalogue import STUDIES, entry_of
from ..studies.options import StudyOptions
from .options import AsJson, out_option, recipe_argument
from .printing import print_table
from .publish import run

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
    out: Annotated[Path | None, out_option("superbatch-study/NAME")] = None,
    as_json: AsJson = False,
) -> int:
    """Answer an open question about batch sizes with an experiment on a recipe.

    Shows a table, tests and a conclusion in one sentence; writes a JSON report, a plot and a page. Exit code:
    0 done, 2 wrong input, 130 interrupted (a partial report is written).
    """
    if name is None:
        columns = ("study", "", lambda item: item[0]), ("question", "", lambda item: item[1].question)
        print_table(table_of("superbatch study NAME [RECIPE]", STUDIES.items(), *columns), Console())
        return 0
    recipes = entry_of(name).recipes if recipe is None else (recipe,)
    if as_json and len(recipes) > 1:
        raise InputError(
            f"--json prints one report, but the study {name} runs {len(recipes)} recipes. Name one: "
            f"superbatch study {name} {recipes[0]} --json."
        )
    if options.data is not None and len(recipes) > 1:
        readers = [each for each in recipes if each in TAKES_DATA]
        raise InputError(
            f"--data needs one of the recipes {', '.join(readers)}. Name it: superbatch study {name} "
            f"{readers[0]} --data {options.data}."
        )
    folder = out if out is not None or as_json else Path("superbatch-study", name)
    for each in recipes:
        own = folder / each if folder is not None and len(recipes) > 1 else folder
        code = run("study", name, each, options, title=f"study {name}", out=own, as_json=as_json)
        if code:  # Ctrl-C ends the command, not only the study of this recipe
            return code
    return 0
