"""`superbatch noise RECIPE`: how noisy is the gradient, and is a larger batch worth it?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import (
    AsJson,
    BatchSize,
    Data,
    LearningRate,
    OptimizerName,
    Recipe,
    Seed,
    Threads,
    option,
    out_option,
)
from .publish import exit_code, folder_for, measured, options_from, publish

OUT = Path("superbatch-noise")


def noise(
    recipe: Recipe,
    batch_size: BatchSize = None,
    microbatch_size: Annotated[
        int | None, option("samples of a micro-batch (default: an eighth of the batch)")
    ] = None,
    updates: Annotated[int | None, option("length of the run (default: the recipe's)")] = None,
    optimizer: OptimizerName = None,
    learning_rate: LearningRate = None,
    seed: Seed = 0,
    threads: Threads = None,
    data: Data = None,
    out: Annotated[Path | None, out_option(OUT)] = None,
    as_json: AsJson = False,
) -> None:
    """Train a recipe and measure the noise scale of its gradient: is a larger batch worth it?

    Shows the noise scale during training with its interval, or the reason why it has none, and the time to a
    target loss by number of micro-batches per update; writes a JSON report, a plot and a page.
    Exit code: 0 done, 2 wrong input, 130 interrupted (a partial report is written).
    """
    folder = folder_for(out, OUT, as_json=as_json)
    from ..studies.noise import Options
    from ..studies.noise import noise as study

    options = options_from(Options, locals())
    report = measured(f"noise {Path(recipe).name}", lambda show: study(recipe, options, progress=show))
    publish(report, folder, as_json=as_json)
    raise typer.Exit(exit_code(report))
