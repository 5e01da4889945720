"""`superbatch compare [RECIPE]`: does accumulation train like the real batch?"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .aliases import in_our_words, recipe_of
from .options import AsJson, Data, OptimizerName, option, recipe_argument
from .printing import check_folder, print_sentences, print_table
from .progress import progress
from .publish import publish

if TYPE_CHECKING:  # torch takes seconds to import: not for --help
    from ..report.comparison import Comparison
    from ..studies.compare import Options

CHECK_FAILED, INTERRUPTED = 1, 130
OUT = Path("superbatch-compare")


Recipe = Annotated[str | None, recipe_argument(default="digits", show_default=False)]
RecipeName = Annotated[str | None, option("alias of the argument RECIPE", "--recipe")]
BatchNorm = Annotated[bool, option("add BatchNorm to the recipe digits or digits-conv", "--batchnorm")]
Splits = Annotated[
    str | None,
    option(
        "KxM (K micro-batches of M samples) or sizes such as 80/15/5, separated by commas "
        "(default: 1x100,5x20,10x10,20x5 for a batch of 100)",
    ),
]
Updates = Annotated[int | None, option("updates of each run (default: the recipe's)")]
Runs = Annotated[int, typer.Option(help="seeds: each gives one run of every arm")]
Dtype = Annotated[str, typer.Option(help="float32 or float64")]
LearningRate = Annotated[float | None, option("learning rate (default: the recipe's)", "--lr")]
BatchSize = Annotated[int | None, option("samples of one update; with --average-gradients: of a micro-batch")]
IncludeWrong = Annotated[
    bool, option("add two wrong ways: mean of means, fixed tail divisor", "--include-wrong")
]
Margin = Annotated[float | None, option("a difference of the metric that does not matter, in its unit")]
Backend = Annotated[str, typer.Option(help="torch; for the recipe digits also jax, tensorflow or keras")]
Threads = Annotated[int, typer.Option(help="torch threads of each process")]
Workers = Annotated[int | None, option("processes (default: 2, where the machine has two cores)")]
Out = Annotated[Path | None, option(f"folder for report.json, plot.png and report.html (default: {OUT})")]
Check = Annotated[bool, option("exit code 1 unless every exact arm agrees with the real batch", "--check")]
AverageGradients = Annotated[
    int | None, option("micro-batches per update; --batch-size is then the micro-batch size")
]
Iterations = Annotated[int | None, option("micro-batches of a run, instead of --updates")]


def compare(
    recipe: Recipe = None,
    splits: Splits = None,
    updates: Updates = None,
    runs: Runs = 10,
    dtype: Dtype = "float32",
    optimizer: OptimizerName = None,
    lr: LearningRate = None,
    batch_size: BatchSize = None,
    include_wrong: IncludeWrong = False,
    margin: Margin = None,
    backend: Backend = "torch",
    threads: Threads = 1,
    workers: Workers = None,
    data: Data = None,
    out: Out = None,
    as_json: AsJson = False,
    check: Check = False,
    average_gradients: AverageGradients = None,
    iterations: Iterations = None,
    recipe_name: RecipeName = None,
    batchnorm: BatchNorm = False,
) -> None:
    """Train a recipe with the real batch and with each split of it, from the same weights and samples.

    Shows accuracy, time, memory, the difference of the weights and a test of equivalence; writes a JSON
    report, a plot and a page. Exit code: 0 done, 1 --check failed, 2 wrong input, 130 interrupted (a partial
    report is written).
    """
    name = recipe_of(recipe, recipe_name, batchnorm=batchnorm)
    asked = in_our_words(
        splits=splits,
        updates=updates,
        batch_size=batch_size,
        average_gradients=average_gradients,
        iterations=iterations,
    )
    folder = out if out is not None or as_json else OUT
    if folder is not None:
        check_folder(folder)
    options = _options_with(
        backend,
        splits=asked.splits,
        updates=asked.updates,
        runs=runs,
        dtype=dtype,
        optimizer=optimizer,
        learning_rate=lr,
        batch_size=asked.batch_size,
        include_wrong=include_wrong,
        margin=margin,
        threads=threads,
        workers=min(2, os.cpu_count() or 1) if workers is None else workers,
        data=data,
    )
    report = measure(name, options)
    publish(
        report,
        folder,
        as_json=as_json,
        show=lambda console: show_report(report, console),
        draw=lambda: _draw(report),
    )
    raise typer.Exit(_exit_code(report, check=check))


def _options_with(backend: str, **others: Any) -> Options:
    """Options, once it is known that the backend is installed: to be told so takes no long imports."""
    from ..studies.backends import check_installed

    check_installed(backend)
    from ..studies.compare import Options

    return Options(backend=backend, **others)


def measure(recipe: str, options: Options) -> Comparison:
    """Run the comparison and show its progress."""
    from ..studies.compare import ComparisonInterrupted, Progress
    from ..studies.compare import compare as study

    where = "" if options.backend == "torch" else f" on {options.backend}"
    with progress(f"compare {Path(recipe).name}{where}") as show:

        def receive(event: Progress) -> None:
            text = None
            if event.finished is not None:
                seed, arm, metric = event.finished
                text = f"seed {seed}, {arm}: {metric:.4g}"
            show(event.done, event.total, text)

        try:
            return study(recipe, options, progress=receive)
        except ComparisonInterrupted as stopped:
            return stopped.report


def show_report(report: Comparison, console: Console) -> None:
    """Print the table of a comparison, and below it what it shows."""
    from ..report.table import comparison_table
    from ..report.verdict import verdict

    print_table(comparison_table(report), console)
    print_sentences(verdict(report), console)


def _draw(report: Comparison) -> dict[str, str | bytes]:
    from .. import plot
    from ..report.html import comparison_page

    light, dark = (plot.png(plot.comparison(report, dark=dark)) for dark in (False, True))
    return {"report.html": comparison_page(report, light=light, dark=dark), "plot.png": light}


def _exit_code(report: Comparison, *, check: bool) -> int:
    from ..report.verdict import failures

    if report.partial:
        return INTERRUPTED
    found = failures(report) if check else []
    for sentence in found:
        print(f"superbatch: check failed: {sentence}", file=sys.stderr)
    return CHECK_FAILED if found else 0
