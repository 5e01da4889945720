"""`superbatch advise [RECIPE]`: does accumulation pay, and what else could be done?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .options import AsJson, Data, Device, OptimizerName, Threads, option, out_option, recipe_argument
from .printing import print_sentences, print_table
from .progress import receiver
from .publish import exit_code, folder_for, measured, options_from, publish

if TYPE_CHECKING:
    from ..report.page import Page
    from ..studies.advise import Options

OUT = Path("superbatch-advise")

Recipe = Annotated[str | None, recipe_argument(default="none: all numbers are given", show_default=False)]
MicrobatchSize = Annotated[
    int | None, option("samples of a micro-batch on one rank (default: the recipe's batch, if it fits)")
]
BatchSize = Annotated[
    int | None, option("samples of the update to judge, on all ranks (default: eight micro-batches)")
]
MicroSeconds = Annotated[float | None, option("time of a micro-batch (default: measured)", "--micro-seconds")]
UpdateSeconds = Annotated[float | None, option("time of the optimizer's update (default: measured)")]
AllReduceSeconds = Annotated[
    float | None, option("time of the all-reduce of gradients (default: measured under torchrun)")
]
Parameters = Annotated[float | None, option("parameters of the model, such as 1.3e9 (default: the recipe's)")]
LearningRate = Annotated[
    float | None,
    option(
        "learning rate for the batch to judge if given, else for the recipe's batch (default: the recipe's)",
        "--lr",
    ),
]
Updates = Annotated[int | None, option("updates over which the noise is measured (default: the recipe's)")]


def advise(
    recipe: Recipe = None,
    microbatch_size: MicrobatchSize = None,
    accumulation_steps: Annotated[int | None, option("micro-batches per update to judge")] = None,
    batch_size: BatchSize = None,
    ranks: Annotated[int, typer.Option(help="number of ranks")] = 1,
    noise: Annotated[float | None, option("noise scale in samples (default: measured on the recipe)")] = None,
    noise_low: Annotated[float | None, option("lower end of the interval of the noise scale")] = None,
    noise_high: Annotated[float | None, option("upper end of the interval of the noise scale")] = None,
    microbatch_seconds: MicroSeconds = None,
    update_seconds: UpdateSeconds = None,
    all_reduce_seconds: AllReduceSeconds = None,
    parameters: Parameters = None,
    optimizer: OptimizerName = None,
    learning_rate: LearningRate = None,
    beta2: Annotated[float | None, option("beta2 of Adam, for the same batch as --lr")] = None,
    weight_decay: Annotated[float | None, option("weight decay, for the same batch as --lr")] = None,
    device: Device = "cpu",
    threads: Threads = None,
    updates: Updates = None,
    seconds: Annotated[float, typer.Option(help="approximate time limit for measuring the noise")] = 60.0,
    data: Data = None,
    out: Annotated[Path | None, out_option(OUT)] = None,
    as_json: AsJson = False,
) -> None:
    """Decide by the time to the same loss whether accumulation helps, is wasteful, or is undetermined.

    Measures times and the noise scale on a recipe, or takes them as options, for example for a cluster.
    Shows the best number of micro-batches and the settings without accumulation; writes a JSON report, a plot
    and a page. Exit code: 0 done, 2 wrong input, 130 interrupted (a partial report is written).
    """
    folder = folder_for(out, OUT, as_json=as_json)
    from ..report.advice_text import answer, caveats
    from ..studies.advise import Options
    from ..studies.advise import advise as study

    options = options_from(Options, locals(), parameters=_count(parameters))
    if _further_rank(recipe, options):
        return
    title = "advise" if recipe is None else f"advise {Path(recipe).name}"
    report = measured(title, lambda show: study(recipe, options, progress=receiver(show)))

    def show(page: Page, console: Console) -> None:
        """The verdict, the tables, and the main caveats: the page has every finding."""
        print_sentences(answer(report), console)
        print(file=console.file)
        for table in filter(lambda table: table.rows, page.tables):
            print_table(table, console)
            print(file=console.file)
        print_sentences(caveats(report), console)

    publish(report, folder, as_json=as_json, show=show)
    raise typer.Exit(exit_code(report))


def _further_rank(recipe: str | None, options: Options) -> bool:
    """Of several ranks the first one reports; do another one's part, and say whether this is one."""
    from ..studies.exchange import started_on, take_part

    rank, _ = started_on()
    if rank and recipe is not None:
        take_part(recipe, options)
    return rank > 0


def _count(value: float | None) -> Any:
    """A count that may be written as 1.3e9; what is none is refused with the other options."""
    return round(value) if value is not None and math.isfinite(value) else value
