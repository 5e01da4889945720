"""`superbatch caffe solver.prototxt`: what does a Caffe solver file mean today?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import AsJson, option, out_option
from .publish import folder_for, publish

OUT = Path("superbatch-caffe")


def caffe(
    solver: Annotated[Path, typer.Argument(help="the solver file, such as solver.prototxt")],
    batch_size: Annotated[
        int | None, option("samples of a micro-batch: batch_size of the data layer of the net")
    ] = None,
    ignore_unknown: Annotated[
        bool, option("read the file without fields that Caffe does not have, such as those of its forks")
    ] = False,
    out: Annotated[Path | None, out_option(OUT, "report.json, plot.png, report.html and train.py")] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a Caffe solver file: batch, updates, learning rate and pitfalls.

    Shows each field in PyTorch's terms, with warnings; writes the learning-rate curve as a plot, a
    JSON report, a page, and a program in plain PyTorch that trains as the file says. Exit code: 0 done, 2
    wrong input, with line and column.
    """
    folder = folder_for(out, OUT, as_json=as_json)
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
    publish(report, folder, as_json=as_json, files={"train.py": report.code})
