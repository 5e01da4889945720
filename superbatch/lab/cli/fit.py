"""`superbatch fit RECIPE`: which micro-batch fits, which is fastest, and what batches are within reach?"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from ..studies.options import FitOptions
from .options import AsJson, Recipe, out_option
from .publish import folder_for, run

OUT = Path("superbatch-fit")


def fit(
    *,
    recipe: Recipe,
    options: FitOptions,
    out: Annotated[Path | None, out_option(OUT)] = None,
    as_json: AsJson = False,
) -> int:
    """Find the micro-batch size: predict and measure memory, and measure time, for several sizes.

    Shows the largest that fits, the fastest, the effective batches within reach and what would lower the
    peak; writes a JSON report, a plot and a page. Nothing is trained: the weights do not change. Exit
    code: 0 done, 2 wrong input, 130 interrupted (a partial report is written).
    """
    folder = folder_for(out, OUT, as_json=as_json)
    from ..studies.fit import fit as study

    title = f"fit {Path(recipe).name}"
    return run(title, partial(study, recipe, options), folder, as_json=as_json)
