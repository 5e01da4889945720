"""`superbatch noise RECIPE`: how noisy is the gradient, and is a larger batch worth it?"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from ..studies.options import NoiseOptions
from .options import AsJson, Recipe, out_option
from .publish import folder_for, run

OUT = Path("superbatch-noise")


def noise(
    *,
    recipe: Recipe,
    options: NoiseOptions,
    out: Annotated[Path | None, out_option(OUT)] = None,
    as_json: AsJson = False,
) -> int:
    """Train a recipe and measure the noise scale of its gradient: is a larger batch worth it?

    Shows the noise scale during training with its interval, or the reason why it has none, and the time to a
    target loss by number of micro-batches per update; writes a JSON report, a plot and a page.
    Exit code: 0 done, 2 wrong input, 130 interrupted (a partial report is written).
    """
    folder = folder_for(out, OUT, as_json=as_json)
    from ..studies.noise import noise as study

    title = f"noise {Path(recipe).name}"
    return run(title, partial(study, recipe, options), folder, as_json=as_json)
