"""`superbatch caffe solver.prototxt`: what does a Caffe solver file mean today?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .options import AsJson, option
from .printing import check_folder, print_sentences, print_table
from .publish import publish

if TYPE_CHECKING:
    from superbatch.results.caffe import CaffeExplained

OUT = Path("superbatch-caffe")


Solver = Annotated[Path, typer.Argument(help="the solver file, such as solver.prototxt")]
BatchSize = Annotated[int | None, option("samples of a micro-batch: batch_size of the data layer of the net")]
IgnoreUnknown = Annotated[
    bool, option("read the file without fields that Caffe does not have, such as those of its forks")
]
Out = Annotated[
    Path | None, option(f"folder for report.json, plot.png, report.html and train.py (default: {OUT})")
]


def caffe(
    solver: Solver,
    batch_size: BatchSize = None,
    ignore_unknown: IgnoreUnknown = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Explain a Caffe solver file: batch, updates, learning rate and pitfalls.

    Shows each field in PyTorch's terms, with warnings; writes the learning-rate curve as a plot, a
    JSON report, a page, and a program in plain PyTorch that trains as the file says. Exit code: 0 done, 2
    wrong input, with line and column.
    """
    folder = out if out is not None or as_json else OUT
    if folder is not None:
        check_folder(folder)
    from superbatch.caffe import explain_solver, read_solver

    asked = {"solver": str(solver)}
    if batch_size is not None:
        asked["batch_size"] = str(batch_size)
    if ignore_unknown:
        asked["ignore_unknown"] = "true"
    report = explain_solver(
        read_solver(solver, ignore_unknown=ignore_unknown),
        source=solver.name,
        microbatch_size=batch_size,
        command=asked,
    )
    publish(
        report,
        folder,
        as_json=as_json,
        show=lambda console: show_report(report, console),
        draw=lambda: _draw(report),
    )


def show_report(report: CaffeExplained, console: Console) -> None:
    """Print the table of a solver, and below it what may surprise."""
    from ..report.caffe_text import findings, settings_table

    print_table(settings_table(report), console)
    print(file=console.file)
    print_sentences(findings(report), console)


def _draw(report: CaffeExplained) -> dict[str, str | bytes]:
    from .. import plot
    from ..report.pages import caffe_page

    light, dark = (plot.png(plot.caffe_rate(report, dark=dark)) for dark in (False, True))
    return {
        "report.html": caffe_page(report, light=light, dark=dark),
        "plot.png": light,
        "train.py": report.code,
    }
