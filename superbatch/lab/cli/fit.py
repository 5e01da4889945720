"""`superbatch fit RECIPE`: which micro-batch fits, which is fastest, and what batches are within reach?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .options import AsJson, Data, OptimizerName, Threads, option, recipe_argument
from .printing import check_folder, print_sentences, print_table
from .progress import progress
from .publish import publish
from .quantities import parse_bytes, parse_sizes

if TYPE_CHECKING:  # torch takes seconds to import: not for --help
    from ..report.fitting import Fitting
    from ..studies.fit import Options

INTERRUPTED = 130
OUT = Path("superbatch-fit")


Recipe = Annotated[str, recipe_argument()]
BatchSize = Annotated[int | None, option("samples of one update (default: the recipe's)")]
LimitOption = Annotated[
    str | None,
    option("memory limit, beyond memory in use, such as 2GiB or 500MB (default: the machine's)"),
]
Dtype = Annotated[str, typer.Option(help="float32, float64 or bfloat16")]
Sizes = Annotated[
    str | None,
    option("micro-batches to measure, such as 8,16,32 (default: the largest that fits and its halves)"),
]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Seconds = Annotated[float, typer.Option(help="approximate time limit; sizes beyond it are predicted only")]
Out = Annotated[Path | None, option(f"folder for report.json, plot.png and report.html (default: {OUT})")]


def fit(
    recipe: Recipe,
    batch_size: BatchSize = None,
    limit: LimitOption = None,
    optimizer: OptimizerName = None,
    dtype: Dtype = "float32",
    sizes: Sizes = None,
    device: Device = "cpu",
    threads: Threads = None,
    seconds: Seconds = 30.0,
    data: Data = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Find the micro-batch size: predict and measure memory, and measure time, for several sizes.

    Shows the largest that fits, the fastest, the effective batches within reach and what would lower the
    peak; writes a JSON report, a plot and a page. Nothing is trained: the weights do not change. Exit
    code: 0 done, 2 wrong input, 130 interrupted (a partial report is written).
    """
    bytes_ = None if limit is None else parse_bytes(limit, flag="--limit")
    asked = None if sizes is None else parse_sizes(sizes, flag="--sizes")
    folder = out if out is not None or as_json else OUT
    if folder is not None:
        check_folder(folder)
    from ..studies.fit import Options

    options = Options(
        batch_size=batch_size,
        limit=bytes_,
        optimizer=optimizer,
        dtype=dtype,
        sizes=asked,
        device=device,
        threads=threads,
        seconds=seconds,
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


def measure(recipe: str, options: Options) -> Fitting:
    """Run the fit and show its progress."""
    from ..studies.fit import FitInterrupted, Progress
    from ..studies.fit import fit as study

    with progress(f"fit {Path(recipe).name}") as show:

        def receive(event: Progress) -> None:
            show(event.done, event.total, event.finished)

        try:
            return study(recipe, options, progress=receive)
        except FitInterrupted as stopped:
            return stopped.report


def show_report(report: Fitting, console: Console) -> None:
    """Print the tables of a fit, and below them what they show: there a terminal is read first."""
    from ..report.fitting_text import findings, reach_table, savings_table, sizes_table

    tables = [
        table for table in (sizes_table(report), reach_table(report), savings_table(report)) if table.rows
    ]
    for table in tables:
        print_table(table, console)
        print(file=console.file)
    print_sentences(findings(report), console)


def _draw(report: Fitting) -> dict[str, str | bytes]:
    from .. import plot
    from ..report.pages import fitting_page

    light, dark = (plot.png(plot.fitting(report, dark=dark)) for dark in (False, True))
    return {"report.html": fitting_page(report, light=light, dark=dark), "plot.png": light}
