"""`superbatch study NAME [RECIPE]`: the open questions of the sources, answered on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from superbatch.errors import InputError

from ..recipes import COUPLED
from ..recipes.loading import TAKES_DATA
from ..report.table import Column, Table
from ..studies.catalogue import STUDIES, entry_of
from .options import (
    AsJson,
    Data,
    Margin,
    OptimizerName,
    ThreadsEach,
    Workers,
    option,
    out_option,
    recipe_argument,
)
from .printing import print_table
from .progress import receiver
from .publish import exit_code, folder_for, measured, options_from, publish, workers_of

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
Tolerance = Annotated[
    float | None, option("a relative difference of the loss that does not matter, such as 0.02")
]


def study(
    name: Name = None,
    recipe: Recipe = None,
    quick: Annotated[bool, option("shorter runs and fewer seeds: under a minute", "--quick")] = False,
    runs: Annotated[int | None, option("seeds (default: the study's own number)")] = None,
    samples: Samples = None,
    batch_size: BatchSize = None,
    learning_rate: LearningRate = None,
    optimizer: OptimizerName = None,
    margin: Margin = None,
    tolerance: Tolerance = None,
    device: Annotated[str | None, option("coupled: to train on, such as cuda (default: cpu)")] = None,
    threads: ThreadsEach = 1,
    workers: Workers = None,
    data: Data = None,
    out: Annotated[Path | None, out_option(OUT / "NAME")] = None,
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
    folder = folder_for(out, OUT / name, as_json=as_json)
    from ..studies.study import Options
    from ..studies.study import study as run

    options = options_from(Options, locals(), workers=workers_of(workers))
    for each in recipes:
        report = measured(
            f"study {name}", lambda show, each=each: run(name, each, options, progress=receiver(show))
        )
        own = folder / each if folder is not None and len(recipes) > 1 else folder
        publish(report, own, as_json=as_json)
        if report.partial:  # Ctrl-C ends the command, not one of its studies
            raise typer.Exit(exit_code(report))


def show_studies(console: Console) -> None:
    """Print which studies there are."""
    columns = (Column("study", "its name"), Column("question", "that it answers"))
    rows = tuple((name, entry.question) for name, entry in STUDIES.items())
    print_table(Table("superbatch study NAME [RECIPE]", columns, rows), console)
