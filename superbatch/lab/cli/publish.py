"""Output of a report: text or JSON on the standard output, and files in a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from .exits import INTERRUPTED
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
    """Print a report and write its files."""
    from ..report.json import to_json

    text = to_json(report)
    if folder is not None:
        # First of all the numbers: whatever happens to the drawing, they are kept.
        write_file(folder / "report.json", text + "\n")
    kept = "printed only" if folder is None else f"kept in {folder / 'report.json'}"
    if report.partial:
        print(f"superbatch: interrupted, the report is partial; what was measured is {kept}", file=sys.stderr)
    try:
        if as_json:
            print(text)
        else:
            show(Console())
        if folder is not None:
            names = _write(draw(), folder)
            print(f"{duration(report.seconds)}; wrote {names} and report.json", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"superbatch: interrupted after the last measurement; the report is {kept}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def _write(files: Mapping[str, str | bytes], folder: Path) -> str:
    """Write files and return their names."""
    for name, content in files.items():
        write_file(folder / name, content)
    first, *others = files
    return ", ".join([str(folder / first), *others])
