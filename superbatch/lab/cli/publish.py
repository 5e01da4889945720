"""Output of a report: text or JSON on the standard output, and files in a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from .printing import write_file
from .progress import duration

if TYPE_CHECKING:
    from superbatch.results.advice import Advice
    from superbatch.results.caffe import CaffeExplained

    from ..report.comparison import Comparison
    from ..report.fitting import Fitting
    from ..report.noise_study import NoiseStudy
    from ..report.study import Study
    from ..report.surveys import Surveys


def publish(
    report: Comparison | Fitting | Advice | NoiseStudy | Study | Surveys | CaffeExplained,
    folder: Path | None,
    *,
    as_json: bool,
    show: Callable[[Console], None],
    draw: Callable[[], Mapping[str, str | bytes]],
) -> None:
    """Print a report and write its files.

    Args:
        report: whole or partial.
        folder: for the files; None writes none.
        as_json: print JSON and nothing else on the standard output.
        show: prints the report for people.
        draw: makes the files beside report.json, content by name; the most important first.
    """
    from ..report.json import to_json

    text = to_json(report)
    if folder is not None:
        # First of all the numbers: whatever happens to the drawing, they are kept.
        write_file(folder / "report.json", text + "\n")
    if as_json:
        print(text)
    else:
        show(Console())
    if report.partial:
        print("superbatch: interrupted, the report is partial", file=sys.stderr)
    if folder is not None:
        files = draw()
        for name, content in files.items():
            write_file(folder / name, content)
        first, *others = files
        names = ", ".join([str(folder / first), *others])
        print(f"{duration(report.seconds)}; wrote {names} and report.json", file=sys.stderr)
