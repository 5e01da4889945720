"""`superbatch advise [RECIPE]`: does accumulation pay, and what else could be done?"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from rich.console import Console

from superbatch.results.advice import Advice

from ..report.advice_text import answer, caveats
from ..report.page import Page
from ..studies.options import AdviseOptions
from .options import AsJson, out_option, recipe_argument
from .printing import print_sentences, print_table
from .publish import folder_for, run

OUT = Path("superbatch-advise")


def advise(
    *,
    recipe: Annotated[str | None, recipe_argument(default="none: all numbers are given")] = None,
    options: AdviseOptions,
    out: Annotated[Path | None, out_option(OUT)] = None,
    as_json: AsJson = False,
) -> int:
    """Decide by the time to the same loss whether accumulation helps, is wasteful, or is undetermined.

    Measures times and the noise scale on a recipe, or takes them as options, for example for a cluster.
    Shows the best number of micro-batches and the settings without accumulation; writes a JSON report, a plot
    and a page. Exit code: 0 done, 2 wrong input, 130 interrupted (a partial report is written).
    """
    folder = folder_for(out, OUT, as_json=as_json)
    from ..studies.advise import advise as study

    if _further_rank(recipe, options):
        return 0
    title = "advise" if recipe is None else f"advise {Path(recipe).name}"
    return run(title, partial(study, recipe, options), folder, as_json=as_json, show=_show)


def _show(report: Advice, page: Page, console: Console) -> None:
    """Print the verdict, the tables, and the main caveats: the page has every finding."""
    print_sentences(answer(report), console)
    print(file=console.file)
    for table in filter(lambda table: table.rows, page.tables):
        print_table(table, console)
        print(file=console.file)
    print_sentences(caveats(report), console)


def _further_rank(recipe: str | None, options: AdviseOptions) -> bool:
    """Of several ranks the first one reports; do another one's part, and say whether this is one."""
    from ..studies.exchange import started_on, take_part

    rank, _ = started_on()
    if rank and recipe is not None:
        take_part(recipe, options)
    return rank > 0
