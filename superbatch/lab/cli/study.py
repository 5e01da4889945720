"""`superbatch study NAME [RECIPE]`: the open questions of the sources, answered on this machine."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from superbatch.errors import InputError

from ..recipes import COUPLED
from ..recipes.loading import TAKES_DATA
from ..report.table import Column, Table
from ..studies.catalogue import STUDIES, entry_of
from .options import AsJson, Data, OptimizerName, option, recipe_argument
from .printing import check_folder, print_sentences, print_table
from .progress import progress
from .publish import publish

if TYPE_CHECKING:  # torch takes seconds to import: not for --help
    from ..report.study import Study
    from ..studies.study import Options

INTERRUPTED = 130
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
Quick = Annotated[bool, option("shorter runs and fewer seeds: under a minute", "--quick")]
Runs = Annotated[int | None, option("seeds (default: the study's own number)")]
Samples = Annotated[int | None, option("samples that each run sees (default: the study's own number)")]
BatchSize = Annotated[
    int | None,
    option(
        "momentum: the large batch; grow-batch, critical-batch: the first batch; splits, survey: the batch"
    ),
]
LearningRate = Annotated[
    float | None, option("learning rate at --batch-size; momentum: at batch 1 (default: the study's)", "--lr")
]
Margin = Annotated[float | None, option("a difference of the metric that does not matter, in its unit")]
Tolerance = Annotated[
    float | None, option("a relative difference of the loss that does not matter, such as 0.02")
]
Device = Annotated[str | None, option("coupled: to train on, such as cuda (default: cpu)")]
Threads = Annotated[int, typer.Option(help="torch threads of each process")]
Workers = Annotated[int | None, option("processes (default: 2, where the machine has two cores)")]
Out = Annotated[
    Path | None, option(f"folder for report.json, plot.png and report.html (default: {OUT}/NAME)")
]


def study(
    name: Name = None,
    recipe: Recipe = None,
    quick: Quick = False,
    runs: Runs = None,
    samples: Samples = None,
    batch_size: BatchSize = None,
    lr: LearningRate = None,
    optimizer: OptimizerName = None,
    margin: Margin = None,
    tolerance: Tolerance = None,
    device: Device = None,
    threads: Threads = 1,
    workers: Workers = None,
    data: Data = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Answer an open question about batch sizes with an experiment on a recipe.

    Shows a table, tests and a conclusion in one sentence; writes a JSON report, a plot and a page. Exit code:
    0 done, 2 wrong input, 130 interrupted (a partial report is written).
    """
    if name is None:
        show_studies(Console())
        return
    recipes = entry_of(name).recipes if recipe is None else (recipe,)
    if as_json and len(recipes) > 1:
        raise InputError(
            f"--json prints one report. Name a recipe: superbatch study {name} {recipes[0]} --json."
        )
    if data is not None and len(recipes) > 1:
        readers = [each for each in recipes if each in TAKES_DATA]
        raise InputError(
            f"--data is for one recipe: {', '.join(readers)}. Name it: superbatch study {name} {readers[0]} "
            f"--data {data}."
        )
    folder = out if out is not None else None if as_json else OUT / name
    if folder is not None:
        check_folder(folder)
    from ..studies.study import Options

    options = Options(
        runs=runs,
        samples=samples,
        batch_size=batch_size,
        learning_rate=lr,
        optimizer=optimizer,
        margin=margin,
        tolerance=tolerance,
        quick=quick,
        device=device,
        threads=threads,
        workers=min(2, os.cpu_count() or 1) if workers is None else workers,
        data=data,
    )
    for each in recipes:
        report = measure(name, each, options)
        own = folder / each if folder is not None and len(recipes) > 1 else folder
        publish(report, own, as_json=as_json, show=partial(show_report, report), draw=partial(_draw, report))
        if report.partial:
            raise typer.Exit(INTERRUPTED)


def measure(name: str, recipe: str, options: Options) -> Study:
    """Run a study and show its progress."""
    from ..studies.study import Progress, StudyInterrupted
    from ..studies.study import study as run

    with progress(f"study {name}") as show:

        def receive(event: Progress) -> None:
            show(event.done, event.total, event.finished)

        try:
            return run(name, recipe, options, progress=receive)
        except StudyInterrupted as stopped:
            return stopped.report


def show_studies(console: Console) -> None:
    """Print which studies there are."""
    columns = (Column("study", "its name"), Column("question", "that it answers"))
    rows = tuple((name, entry.question) for name, entry in STUDIES.items())
    print_table(Table("superbatch study NAME [RECIPE]", columns, rows), console)


def show_report(report: Study, console: Console) -> None:
    """Print the tables of a study, and below them what it shows."""
    from ..report.study_text import equivalence_table, study_table

    for table in (study_table(report), equivalence_table(report)):
        if table.rows:
            print_table(table, console)
            print(file=console.file)
    print_sentences([report.conclusion], console)


def _draw(report: Study) -> dict[str, str | bytes]:
    from .. import plot
    from ..report.html import study_page

    light, dark = (plot.png(plot.study(report, dark=dark)) for dark in (False, True))
    return {"report.html": study_page(report, light=light, dark=dark), "plot.png": light}
