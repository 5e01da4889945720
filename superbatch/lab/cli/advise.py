"""`superbatch advise [RECIPE]`: predict whether accumulation reaches a loss sooner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ..studies.options import AdviseOptions
from .options import AsJson, out_option, recipe_argument
from .publish import folder_for, run


def advise(
    *,
    recipe: Annotated[str | None, recipe_argument(default="none; the options give all numbers")] = None,
    options: AdviseOptions,
    out: Annotated[Path | None, out_option("superbatch-advise")] = None,
    as_json: AsJson = False,
) -> int:
    """Predict whether accumulation reaches the same loss sooner: "helps", "wasteful" or "undetermined".

    Measures times and the noise scale on a recipe, or takes them as options, such as the times of a cluster.
    Shows the best number of micro-batches, and the optimizer settings for training without accumulation;
    writes a JSON report, a plot and a page. Exit code: 0 done, 2 wrong input, 130 interrupted (a partial
    report is written).
    """
    folder_for("superbatch-advise", out, as_json=as_json)  # on every rank: none may wait for one that failed
    from ..studies.exchange import measure_as_other_rank, rank_and_count

    rank, _ = rank_and_count()
    if rank:  # the first rank makes the report
        if recipe is not None:
            measure_as_other_rank(recipe, options)
        return 0
    title = "advise" if recipe is None else f"advise {Path(recipe).name}"
    return run("advise", recipe, options, title=title, out=out, as_json=as_json)
