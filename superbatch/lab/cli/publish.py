"""From a study to its output: progress, then text or JSON on the standard output, and files in a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer
from rich.console import Console

from ..studies.shared_options import Interrupted
from .exits import CHECK_FAILED, INTERRUPTED
from .printing import check_folder, print_sentences, print_table, write_file
from .progress import duration, progress

if TYPE_CHECKING:
    from ..report.pages import Page, Report

Result = TypeVar("Result", bound="Report")

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


def folder_for(out: Path | None, default: Path, *, as_json: bool) -> Path | None:
    """The folder for the files, None for none; refuse one that cannot be written before any work is done."""
    folder = out if out is not None or as_json else default
    if folder is not None:
        check_folder(folder)
    return folder


def run(
    title: str,
    study: Callable[..., Result],
    folder: Path | None,
    *,
    as_json: bool,
    show: Callable[[Result, Page, Console], None] | None = None,
    failures: Callable[[Result], Sequence[str]] | None = None,
) -> int:
    """Run a study with its progress on show, publish its report, whole or partial, and return the exit code.

    `show` prints it otherwise than `print_page`. `failures` is a check that was asked for.
    """
    with progress(title) as receive:
        try:
            report = study(progress=receive)
        except Interrupted as stopped:  # any other interrupt: nothing had been measured
            report = stopped.report
    publish(report, folder, as_json=as_json, show=partial(show, report) if show else print_page)
    if report.partial:
        return INTERRUPTED
    wrong = failures(report) if failures else ()
    for sentence in wrong:  # on the standard error: the output may be JSON
        print(f"superbatch: check failed: {sentence}", file=sys.stderr)
    return CHECK_FAILED if wrong else 0


def print_page(page: Page, console: Console) -> None:
    """Print the tables of a page, and below them its sentences: there a terminal is read first."""
    tables = [table for table in page.tables if table.rows]
    for table in tables:
        print_table(table, console)
        if len(page.tables) > 1 or page.code:
            print(file=console.file)
    print_sentences([*page.verdict, *page.findings], console)


def publish(
    report: Report,
    folder: Path | None,
    *,
    as_json: bool,
    show: Callable[[Page, Console], None] = print_page,
    files: Mapping[str, str] | None = None,
) -> None:
    """Print a report, as JSON alone or by `show`, and write its files and `files`.

    Raises typer.Exit where Ctrl-C interrupts printing or drawing: report.json is complete by then.
    """
    from ..report.json import to_json
    from ..report.pages import page_of

    text = to_json(report)
    if folder is not None:
        # First of all the numbers: whatever happens to the drawing, they are kept.
        write_file(folder / "report.json", text + "\n")
    kept = "printed only" if folder is None else f"kept in {folder / 'report.json'}"
    if report.partial:
        print(f"superbatch: interrupted, the report is partial; what was measured is {kept}", file=sys.stderr)
    try:
        page = page_of(report)  # within the try: an interrupt may come here too
        if as_json:
            print(text)
        else:
            show(page, Console())
        if folder is not None:
            _write(report, page, folder, files or {})
    except KeyboardInterrupt:
        print(f"superbatch: interrupted after the last measurement; the report is {kept}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def _write(report: Report, page: Page, folder: Path, files: Mapping[str, str]) -> None:
    """Draw, and write the page and what else there is."""
    from .. import plot  # matplotlib takes a second to import
    from ..report.page import render

    draw = getattr(plot, PLOTS[type(report).__name__])  # all is drawn before the first file is written
    light, dark = (plot.png(draw(report, dark=dark)) for dark in (False, True))
    contents = {"report.html": render(page, light=light, dark=dark), "plot.png": light, **files}
    for name, content in contents.items():
        write_file(folder / name, content)
    first, *others = contents
    names = ", ".join([str(folder / first), *others])
    print(f"{duration(report.seconds)}; wrote {names} and report.json", file=sys.stderr)
