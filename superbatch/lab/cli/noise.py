"""`superbatch noise RECIPE`: how noisy is the gradient, and is a larger batch worth it?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .options import AsJson, Data, OptimizerName, Threads, option, recipe_argument
from .printing import check_folder, print_sentences, print_table
from .progress import progress
from .publish import publish

if TYPE_CHECKING:  # torch takes seconds to import: not for --help
    from ..report.noise_study import NoiseStudy
    from ..studies.noise import Options

INTERRUPTED = 130
OUT = Path("superbatch-noise")


Recipe = Annotated[str, recipe_argument()]
BatchSize = Annotated[int | None, option("samples of one update (default: the recipe's)")]
MicrobatchSize = Annotated[int | None, option("samples of a micro-batch (default: an eighth of the batch)")]
Updates = Annotated[int | None, option("length of the run (default: the recipe's)")]
Rate = Annotated[float | None, option("learning rate (default: the recipe's for the optimizer)", "--lr")]
Seed = Annotated[int, typer.Option(help="seed of the initial weights and the order of samples")]
Out = Annotated[Path | None, option(f"folder for report.json, plot.png and report.html (default: {OUT})")]


def noise(
    recipe: Recipe,
    batch_size: BatchSize = None,
    microbatch_size: MicrobatchSize = None,
    updates: Updates = None,
    optimizer: OptimizerName = None,
    learning_rate: Rate = None,
    seed: Seed = 0,
    threads: Threads = None,
    data: Data = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Train a recipe and measure the noise scale of its gradient: is a larger batch worth it?

    Shows the noise scale during training with its interval, or the reason why it has none, and the time to a
    target loss by number of micro-batches per update; writes a JSON report, a plot and a page.
    Exit code: 0 done, 2 wrong input, 130 interrupted (a partial report is written).
    """
    folder = out if out is not None or as_json else OUT
    if folder is not None:
        check_folder(folder)
    from ..studies.noise import Options

    options = Options(
        batch_size=batch_size,
        microbatch_size=microbatch_size,
        updates=updates,
        optimizer=optimizer,
        learning_rate=learning_rate,
        seed=seed,
        threads=threads,
        data=data,
    )
    report = measure(recipe, options)
    publish(
        report,
        folder,
        as_json=as_json,
        show=lambda console: show_report(report, console),
        draw=lambda: _draw(report),
    )
    raise typer.Exit(INTERRUPTED if report.partial else 0)


def measure(recipe: str, options: Options) -> NoiseStudy:
    """Run the study and show its progress."""
    from ..studies.noise import NoiseInterrupted
    from ..studies.noise import noise as study

    with progress(f"noise {Path(recipe).name}") as show:
        try:
            return study(recipe, options, progress=show)
        except NoiseInterrupted as stopped:
            return stopped.report


def show_report(report: NoiseStudy, console: Console) -> None:
    """Print the tables of a study, and below them what they show: there a terminal is read first."""
    from ..report.noise_study import findings, points_table, steps_table

    for table in (points_table(report), steps_table(report)):
        if table.rows:
            print_table(table, console)
            print(file=console.file)
    print_sentences(findings(report), console)


def _draw(report: NoiseStudy) -> dict[str, str | bytes]:
    from .. import plot
    from ..report.pages import noise_page

    light, dark = (plot.png(plot.noise(report, dark=dark)) for dark in (False, True))
    return {"report.html": noise_page(report, light=light, dark=dark), "plot.png": light}
