"""`superbatch survey [RECIPE]`: which learning rate, and do virtual batches survey like real ones?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from superbatch.errors import InputError

from .options import AsJson, BatchSize, Data, Dtype, OptimizerName, Recipe, option, out_option
from .progress import receiver
from .publish import exit_code, folder_for, measured, options_from, publish

OUT = Path("superbatch-survey")
WHAT = ("lr", "momentum", "weight_decay")

Splits = Annotated[
    str | None,
    option("KxM or sizes such as 80/15/5, separated by commas (default: 10x10,20x5 for a batch of 100)"),
]
Low = Annotated[float | None, option("first value (default: 1e-6 for SGD's rate, 1e-7 for others')")]
LearningRate = Annotated[float | None, option("learning rate, if --what is momentum or weight_decay", "--lr")]
IncludeWrong = Annotated[
    bool,
    option("add wrong arms: a missing 1/K and other batch sizes", "--include-wrong"),
]


def survey(
    recipe: Recipe = "digits",
    splits: Splits = None,
    repeats: Annotated[int, typer.Option(help="surveys of each arm, with different seeds")] = 20,
    updates: Annotated[int, typer.Option(help="points of the ramp, one update each")] = 100,
    what: Annotated[str, typer.Option(help="quantity to survey: lr, momentum or weight_decay")] = "lr",
    low: Low = None,
    high: Annotated[float | None, option("last value (default: 10 for SGD's rate, 1 for others')")] = None,
    dtype: Dtype = "float32",
    optimizer: OptimizerName = None,
    learning_rate: LearningRate = None,
    batch_size: BatchSize = None,
    include_wrong: IncludeWrong = False,
    threads: Annotated[int, typer.Option(help="torch threads")] = 1,
    data: Data = None,
    out: Annotated[Path | None, out_option(OUT)] = None,
    as_json: AsJson = False,
    check: Annotated[bool, option("exit code 1 unless paired curves agree to rounding", "--check")] = False,
) -> None:
    """Survey learning rates with the real batch and with each split of it, and compare the curves.

    Every point of a survey is one update; the rate grows from point to point. Shows the suggested values and
    whether splits differ from the real batch; writes a JSON report, a plot and a page. Exit code: 0 done, 1
    --check failed, 2 wrong input, 130 interrupted (a partial report is written).
    """
    if what not in WHAT:
        raise InputError(f"--what {what}: that cannot be surveyed. Give one of {', '.join(WHAT)}.")
    folder = folder_for(out, OUT, as_json=as_json)
    from ..report.survey_text import failures
    from ..studies.survey import Options
    from ..studies.survey import survey as study

    options = options_from(Options, locals())
    report = measured(
        f"survey {Path(recipe).name}", lambda show: study(recipe, options, progress=receiver(show))
    )
    publish(report, folder, as_json=as_json)
    raise typer.Exit(exit_code(report, failures(report) if check else ()))
