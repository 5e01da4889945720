"""`superbatch fit RECIPE`: which micro-batch fits, which is fastest, and what batches are within reach?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import AsJson, BatchSize, Data, Device, OptimizerName, Recipe, Threads, option, out_option
from .progress import receiver
from .publish import exit_code, folder_for, measured, options_from, publish
from .quantities import parse_bytes, parse_sizes

OUT = Path("superbatch-fit")

LimitOption = Annotated[
    str | None,
    option("memory limit, beyond memory in use, such as 2GiB or 500MB (default: the machine's)"),
]
Sizes = Annotated[
    str | None,
    option("micro-batches to measure, such as 8,16,32 (default: the largest that fits and its halves)"),
]
Seconds = Annotated[float, typer.Option(help="approximate time limit; sizes beyond it are predicted only")]


def fit(
    recipe: Recipe,
    batch_size: BatchSize = None,
    limit: LimitOption = None,
    optimizer: OptimizerName = None,
    dtype: Annotated[str, typer.Option(help="float32, float64 or bfloat16")] = "float32",
    sizes: Sizes = None,
    device: Device = "cpu",
    threads: Threads = None,
    seconds: Seconds = 30.0,
    data: Data = None,
    out: Annotated[Path | None, out_option(OUT)] = None,
    as_json: AsJson = False,
) -> None:
    """Find the micro-batch size: predict and measure memory, and measure time, for several sizes.

    Shows the largest that fits, the fastest, the effective batches within reach and what would lower the
    peak; writes a JSON report, a plot and a page. Nothing is trained: the weights do not change. Exit
    code: 0 done, 2 wrong input, 130 interrupted (a partial report is written).
    """
    read = {
        "limit": None if limit is None else parse_bytes(limit, flag="--limit"),
        "sizes": None if sizes is None else parse_sizes(sizes, flag="--sizes"),
    }
    folder = folder_for(out, OUT, as_json=as_json)
    from ..studies.fit import Options
    from ..studies.fit import fit as study

    options = options_from(Options, locals(), **read)
    report = measured(
        f"fit {Path(recipe).name}", lambda show: study(recipe, options, progress=receiver(show))
    )
    publish(report, folder, as_json=as_json)
    raise typer.Exit(exit_code(report))
