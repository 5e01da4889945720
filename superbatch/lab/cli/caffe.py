"""`superbatch caffe solver.prototxt`: explain a Caffe solver file in PyTorch's terms."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from superbatch.integers import positive_int

from .options import AsJson, option, out_option
from .publish import folder_for, publish


def caffe(
    solver: Annotated[Path, typer.Argument(help="the solver file, such as solver.prototxt")],
    batch_size: Annotated[
        int | None, option("samples of a micro-batch: batch_size in the data layer of the net")
    ] = None,
    ignore_unknown: Annotated[
        bool, option("ignore fields that Caffe does not have, such as those of its forks", "--ignore-unknown")
    ] = False,
    out: Annotated[
        Path | None, out_option("superbatch-caffe", "report.json, plot.png, report.html and train.py")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a Caffe solver file: batch, updates, learning rate and pitfalls.

    Shows each field in PyTorch's terms, with warnings; writes a JSON report, a plot of the learning rate, a
    page, and a program in plain PyTorch that trains as the file says. Exit code: 0 done, 2 wrong input; an
    error names the line and the column of the file.
    """
    folder = folder_for("superbatch-caffe", out, as_json=as_json)
    from superbatch.caffe import explain_solver, read_solver

    given = {"solver": solver, "batch_size": batch_size, "ignore_unknown": "true" if ignore_unknown else None}
    report = explain_solver(
        read_solver(solver, ignore_unknown=ignore_unknown),
        source=solver.name,
        microbatch_size=None if batch_size is None else positive_int("--batch-size", batch_size),
        command={name: str(value) for name, value in given.items() if value is not None},
    )
    publish(report, folder, as_json=as_json)
