"""`superbatch advise [RECIPE]`: does accumulation pay, and what else could be done?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..studies.options import AdviseOptions
from .options import AsJson, out_option, recipe_argument
from .printing import print_sentences, print_table
from .progress import receiver
from .publish import exit_code, folder_for, measured, publish

if TYPE_CHECKING:
    from ..report.page import Page

OUT = Path("superbatch-advise")


def advise(
    *,
    recipe: Annotated[
        str | None, recipe_argument(default="none: all numbers are given", show_default=False)
    ] = None,
    options: AdviseOptions,
    out: Annotated[Path | None, out_option(OUT)] = None,
    as_json: AsJson = False,
) -> None:
    """Decide by the time to the same loss whether accumulation helps, is wasteful, or is undetermined.

    Measures times and the noise scale on a recipe, or takes them as options, for example for a cluster.
    Shows the best number of micro-batches and the settings without accumulation; writes a JSON report, a plot
    and a page. Exit code: 0 done, 2 wrong input, 130 interrupted (a partial report is written).
    """
    folder = folder_for(out, OUT, as_json=as_json)
    from ..report.advice_text import answer, caveats
    from ..studies.advise import advise as study

    if _further_rank(recipe, options):
        return
    title = "advise" if recipe is None else f"advise {Path(recipe).name}"
    report = measured(title, lambda show: study(recipe, options, progress=receiver(show)))

    def show(page: Page, console: Console) -> None:
        """The verdict, the tables, and the main caveats: the page has every finding."""
        print_sentences(answer(report), console)
        print(file=console.file)
        for table in filter(lambda table: table.rows, page.tables):
            print_table(table, console)
            print(file=console.file)
        print_sentences(caveats(report), console)

    publish(report, folder, as_json=as_json, show=show)
    raise typer.Exit(exit_code(report))


def _further_rank(recipe: str | None, options: AdviseOptions) -> bool:
    """Of several ranks the first one reports; do another one's part, and say whether this is one."""
    from ..studies.exchange import started_on, take_part

    rank, _ = started_on()
    if rank and recipe is not None:
        take_part(recipe, options)
    return rank > 0
