"""From a study to its output: progress, then text or JSON on the standard output, and files in a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from ..studies.shared_options import Interrupted
from .exits import CHECK_FAILED, INTERRUPTED
from .printing import check_folder, print_sentences, print_table, write_file
from .progress import progress

if TYPE_CHECKING:
    from ..report.pages import Page, Report

# Report -> the function of `superbatch.lab.plot` that draws it.
PLOTS = {
    "Comparison": "comparison",
    "Study": "study",
    "Fitting": "fitting",
    "NoiseStudy": "noise",
    "Surveys": "surveys",
    "Advice": "advice",
    "CaffeExplained": "caffe_rate",
}
CAVEATS = 3  # sentences on the limits of a result that a terminal shows; the page has all


def folder_for(default: str, out: Path | None, *, as_json: bool) -> Path | None:
    """Return the folder for the files, or None if no file is asked for.

    Raises InputError if the folder cannot be written to.
    """
    folder = out if out is not None or as_json else Path(default)
    if folder is not None:
        check_folder(folder)
    return folder


def run(
    name: str,
    *inputs: Any,
    title: str,
    out: Path | None,
    as_json: bool,
    failures: Callable[[Any], Sequence[str]] | None = None,
) -> int:
    """Run a study, publish its complete or partial report, and return the exit code.

    Args:
        name: of the command, and of the module and the function of the study.
        inputs: positional arguments of the study.
        title: shown beside the progress.
        out: folder for the files; None for `superbatch-NAME`, or for no files with `as_json`.
        as_json: print the report as JSON.
        failures: returns the reasons why the report fails the check that the user asked for.
    """
    folder = folder_for(f"superbatch-{name}", out, as_json=as_json)  # before imports that take seconds
    study = getattr(import_module(f"superbatch.lab.studies.{name}"), name)
    with progress(title) as receive:
        try:
            report = study(*inputs, progress=receive)
        except Interrupted as stopped:  # any other interruption came before the first measurement
            report = stopped.report
    publish(report, folder, as_json=as_json)
    if report.partial:
        return INTERRUPTED
    reasons = failures(report) if failures else ()
    for reason in reasons:  # on the standard error: the standard output may be JSON
        print(f"superbatch: check failed: {reason}", file=sys.stderr)
    return CHECK_FAILED if reasons else 0


def print_page(page: Page, console: Console) -> None:
    """Print a page: caveats below the tables and the answer above; without caveats, the answer below."""
    tables = [table for table in page.tables if table.rows]
    answer = [*page.verdict, *page.findings]
    if page.caveats:
        print_sentences(answer, console)
        print(file=console.file)
    for table in tables:
        print_table(table, console)
        if len(page.tables) > 1 or page.code:
            print(file=console.file)
    # A terminal scrolls: the last lines are read first.
    print_sentences(page.caveats[:CAVEATS] or answer, console)


def publish(report: Report, folder: Path | None, *, as_json: bool) -> None:
    """Print a report as text or as JSON, and write its files.

    Raises typer.Exit if Ctrl-C interrupts printing or drawing; report.json is complete by then.
    """
    from ..report.json import to_json
    from ..report.pages import page_of

    text = to_json(report)
    if folder is not None:
        # The numbers first: no failure of the drawing can lose them.
        write_file(folder / "report.json", text + "\n")
    kept = "printed only" if folder is None else f"kept in {folder / 'report.json'}"
    if report.partial:
        print(f"superbatch: interrupted, the report is partial and {kept}", file=sys.stderr)
    try:
        page = page_of(report)  # within the try: an interrupt may come here too
        if as_json:
            print(text)
        else:
            print_page(page, Console())
        if folder is not None:
            _write(report, page, folder)
    except KeyboardInterrupt:
        print(f"superbatch: interrupted after the last measurement; the report is {kept}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def _write(report: Report, page: Page, folder: Path) -> None:
    """Draw the report, and write the page, the plot and the code of the page."""
    from .. import plot  # matplotlib takes a second to import
    from ..report.page import render

    draw = getattr(plot, PLOTS[type(report).__name__])
    # Both plots are drawn before the first file is written: a failure leaves no mixture of old and new files.
    light, dark = (plot.png(draw(report, dark=dark)) for dark in (False, True))
    contents = {"report.html": render(page, light=light, dark=dark), "plot.png": light}
    if page.code:
        contents["train.py"] = page.code
    for name, content in contents.items():
        write_file(folder / name, content)
    first, *others = contents
    names = ", ".join([str(folder / first), *others])
    took = timedelta(seconds=round(report.seconds))
    print(f"took {took}; wrote {names} and report.json", file=sys.stderr)
