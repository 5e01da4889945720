"""`superbatch survey [RECIPE]`: which learning rate, and do virtual batches survey like real ones?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from superbatch.errors import InputError

from .options import AsJson, Data, OptimizerName, option, recipe_argument
from .printing import check_folder, print_sentences, print_table
from .progress import progress
from .publish import publish

if TYPE_CHECKING:  # torch takes seconds to import: not for --help
    from ..report.surveys import Surveys
    from ..studies.survey import Options

CHECK_FAILED, INTERRUPTED = 1, 130
OUT = Path("superbatch-survey")
WHAT = ("lr", "momentum", "weight_decay")


Recipe = Annotated[str, recipe_argument()]
Splits = Annotated[
    str | None,
    option("KxM or sizes such as 80/15/5, separated by commas (default: 10x10,20x5 for a batch of 100)"),
]
Repeats = Annotated[int, typer.Option(help="surveys of each arm, with different seeds")]
Updates = Annotated[int, typer.Option(help="points of the ramp, one update each")]
WhatOption = Annotated[str, typer.Option(help="quantity to survey: lr, momentum or weight_decay")]
Low = Annotated[float | None, option("first value (default: 1e-6 for SGD's rate, 1e-7 for others')")]
High = Annotated[float | None, option("last value (default: 10 for SGD's rate, 1 for others')")]
Dtype = Annotated[str, typer.Option(help="float32 or float64")]
LearningRate = Annotated[float | None, option("learning rate, if --what is momentum or weight_decay", "--lr")]
BatchSize = Annotated[int | None, option("samples of one update (default: the recipe's)")]
IncludeWrong = Annotated[
    bool,
    option("add wrong arms: a missing 1/K and other batch sizes", "--include-wrong"),
]
Threads = Annotated[int, typer.Option(help="torch threads")]
Out = Annotated[Path | None, option(f"folder for report.json, plot.png and report.html (default: {OUT})")]
Check = Annotated[bool, option("exit code 1 unless paired curves agree to rounding", "--check")]


def survey(
    recipe: Recipe = "digits",
    splits: Splits = None,
    repeats: Repeats = 20,
    updates: Updates = 100,
    what: WhatOption = "lr",
    low: Low = None,
    high: High = None,
    dtype: Dtype = "float32",
    optimizer: OptimizerName = None,
    lr: LearningRate = None,
    batch_size: BatchSize = None,
    include_wrong: IncludeWrong = False,
    threads: Threads = 1,
    data: Data = None,
    out: Out = None,
    as_json: AsJson = False,
    check: Check = False,
) -> None:
    """Survey learning rates with the real batch and with each split of it, and compare the curves.

    Every point of a survey is one update; the rate grows from point to point. Shows the suggested values and
    whether splits differ from the real batch; writes a JSON report, a plot and a page. Exit code: 0 done, 1
    --check failed, 2 wrong input, 130 interrupted (a partial report is written).
    """
    if what not in WHAT:
        raise InputError(f"--what {what}: that cannot be surveyed. Give one of {', '.join(WHAT)}.")
    folder = out if out is not None or as_json else OUT
    if folder is not None:
        check_folder(folder)
    from ..studies.survey import Options

    options = Options(
        splits=splits,
        repeats=repeats,
        updates=updates,
        what=what,  # pyright: ignore[reportArgumentType]  (one of WHAT)
        low=low,
        high=high,
        dtype=dtype,
        optimizer=optimizer,
        learning_rate=lr,
        batch_size=batch_size,
        include_wrong=include_wrong,
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
    raise typer.Exit(_exit_code(report, check=check))


def measure(recipe: str, options: Options) -> Surveys:
    """Run the surveys and show their progress."""
    from ..studies.survey import Progress, SurveyInterrupted
    from ..studies.survey import survey as study

    with progress(f"survey {Path(recipe).name}") as show:

        def receive(event: Progress) -> None:
            text = None
            if event.finished is not None:
                seed, arm, suggestion = event.finished
                found = "no suggestion" if suggestion is None else f"{suggestion:.3g}"
                text = f"seed {seed}, {arm}: {found}"
            show(event.done, event.total, text)

        try:
            return study(recipe, options, progress=receive)
        except SurveyInterrupted as stopped:
            return stopped.report


def show_report(report: Surveys, console: Console) -> None:
    """Print the table of a study, and below it what it shows."""
    from ..report.survey_text import conclusions, suggestion, surveys_table

    print_table(surveys_table(report), console)
    print_sentences([suggestion(report), *conclusions(report)], console)


def _draw(report: Surveys) -> dict[str, str | bytes]:
    from .. import plot
    from ..report.pages import surveys_page

    light, dark = (plot.png(plot.surveys(report, dark=dark)) for dark in (False, True))
    return {"report.html": surveys_page(report, light=light, dark=dark), "plot.png": light}


def _exit_code(report: Surveys, *, check: bool) -> int:
    from ..report.survey_text import failures

    if report.partial:
        return INTERRUPTED
    found = failures(report) if check else []
    for sentence in found:
        print(f"superbatch: check failed: {sentence}", file=sys.stderr)
    return CHECK_FAILED if found else 0
