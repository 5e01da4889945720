"""`superbatch compare [RECIPE]`: does accumulation train like the real batch?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .aliases import in_our_words, recipe_of
from .options import (
    AsJson,
    Data,
    Dtype,
    LearningRate,
    Margin,
    OptimizerName,
    ThreadsEach,
    Workers,
    option,
    out_option,
    recipe_argument,
)
from .progress import receiver
from .publish import exit_code, folder_for, measured, options_from, publish, workers_of

OUT = Path("superbatch-compare")

BatchNorm = Annotated[bool, option("add BatchNorm to the recipe digits or digits-conv", "--batchnorm")]
Splits = Annotated[
    str | None,
    option(
        "KxM (K micro-batches of M samples) or sizes such as 80/15/5, separated by commas "
        "(default: 1x100,5x20,10x10,20x5 for a batch of 100)",
    ),
]
BatchSize = Annotated[int | None, option("samples of one update; with --average-gradients: of a micro-batch")]
IncludeWrong = Annotated[
    bool, option("add two wrong ways: mean of means, fixed tail divisor", "--include-wrong")
]
Backend = Annotated[str, typer.Option(help="torch; for the recipe digits also jax, tensorflow or keras")]
Check = Annotated[bool, option("exit code 1 unless every exact arm agrees with the real batch", "--check")]
AverageGradients = Annotated[
    int | None, option("micro-batches per update; --batch-size is then the micro-batch size")
]


def compare(
    recipe: Annotated[str | None, recipe_argument(default="digits", show_default=False)] = None,
    splits: Splits = None,
    updates: Annotated[int | None, option("updates of each run (default: the recipe's)")] = None,
    runs: Annotated[int, typer.Option(help="seeds: each gives one run of every arm")] = 10,
    dtype: Dtype = "float32",
    optimizer: OptimizerName = None,
    learning_rate: LearningRate = None,
    batch_size: BatchSize = None,
    include_wrong: IncludeWrong = False,
    margin: Margin = None,
    backend: Backend = "torch",
    threads: ThreadsEach = 1,
    workers: Workers = None,
    data: Data = None,
    out: Annotated[Path | None, out_option(OUT)] = None,
    as_json: AsJson = False,
    check: Check = False,
    average_gradients: AverageGradients = None,
    iterations: Annotated[int | None, option("micro-batches of a run, instead of --updates")] = None,
    recipe_name: Annotated[str | None, option("alias of the argument RECIPE", "--recipe")] = None,
    batchnorm: BatchNorm = False,
) -> None:
    """Train a recipe with the real batch and with each split of it, from the same weights and samples.

    Shows accuracy, time, memory, the difference of the weights and a test of equivalence; writes a JSON
    report, a plot and a page. Exit code: 0 done, 1 --check failed, 2 wrong input, 130 interrupted (a partial
    report is written).
    """
    name = recipe_of(recipe, recipe_name, batchnorm=batchnorm)
    lengths = {"average_gradients": average_gradients, "iterations": iterations}
    asked = in_our_words(splits=splits, updates=updates, batch_size=batch_size, **lengths)
    folder = folder_for(out, OUT, as_json=as_json)
    from ..studies.backends import check_installed

    check_installed(backend)  # before imports that take seconds
    from ..report.verdict import failures
    from ..studies.compare import Options
    from ..studies.compare import compare as study

    options = options_from(Options, locals(), **vars(asked), workers=workers_of(workers))
    where = "" if backend == "torch" else f" on {backend}"
    report = measured(
        f"compare {Path(name).name}{where}", lambda show: study(name, options, progress=receiver(show))
    )
    publish(report, folder, as_json=as_json)
    raise typer.Exit(exit_code(report, failures(report) if check else ()))  # a CI fails only on request
