"""`superbatch advise [RECIPE]`: does accumulation pay, and what else could be done?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .options import AsJson, Data, Threads, option, recipe_argument
from .printing import check_folder, print_sentences, print_table
from .progress import progress
from .publish import publish

if TYPE_CHECKING:  # torch takes seconds to import: not for --help
    from superbatch.results.advice import Advice

    from ..studies.advise import Options

INTERRUPTED = 130
OUT = Path("superbatch-advise")


Recipe = Annotated[str | None, recipe_argument(default="none: all numbers are given", show_default=False)]
MicrobatchSize = Annotated[
    int | None, option("samples of a micro-batch on one rank (default: the recipe's batch, if it fits)")
]
AccumulationSteps = Annotated[int | None, option("micro-batches per update to judge")]
BatchSize = Annotated[
    int | None, option("samples of the update to judge, on all ranks (default: eight micro-batches)")
]
Ranks = Annotated[int, typer.Option(help="number of ranks")]
Noise = Annotated[float | None, option("noise scale in samples (default: measured on the recipe)")]
NoiseLow = Annotated[float | None, option("lower end of the interval of the noise scale")]
NoiseHigh = Annotated[float | None, option("upper end of the interval of the noise scale")]
MicroSeconds = Annotated[float | None, option("time of a micro-batch (default: measured)")]
UpdateSeconds = Annotated[float | None, option("time of the optimizer's update (default: measured)")]
AllReduceSeconds = Annotated[
    float | None, option("time of the all-reduce of gradients (default: measured under torchrun)")
]
Parameters = Annotated[float | None, option("parameters of the model, such as 1.3e9 (default: the recipe's)")]
Optimizer = Annotated[str | None, option("sgd, momentum, adam or adamw, as the recipe offers")]
LearningRate = Annotated[
    float | None,
    option(
        "learning rate for the batch to judge if given, else for the recipe's batch (default: the recipe's)",
        "--lr",
    ),
]
Beta2 = Annotated[float | None, option("beta2 of Adam, for the same batch as --lr")]
WeightDecay = Annotated[float | None, option("weight decay, for the same batch as --lr")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Updates = Annotated[int | None, option("updates over which the noise is measured (default: the recipe's)")]
Seconds = Annotated[float, typer.Option(help="approximate time limit for measuring the noise")]
Out = Annotated[Path | None, option(f"folder for report.json, plot.png and report.html (default: {OUT})")]


def advise(
    recipe: Recipe = None,
    microbatch_size: MicrobatchSize = None,
    accumulation_steps: AccumulationSteps = None,
    batch_size: BatchSize = None,
    ranks: Ranks = 1,
    noise: Noise = None,
    noise_low: NoiseLow = None,
    noise_high: NoiseHigh = None,
    micro_seconds: MicroSeconds = None,
    update_seconds: UpdateSeconds = None,
    all_reduce_seconds: AllReduceSeconds = None,
    parameters: Parameters = None,
    optimizer: Optimizer = None,
    lr: LearningRate = None,
    beta2: Beta2 = None,
    weight_decay: WeightDecay = None,
    device: Device = "cpu",
    threads: Threads = None,
    updates: Updates = None,
    seconds: Seconds = 60.0,
    data: Data = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Decide by the time to the same loss whether accumulation helps, is wasteful, or is undetermined.

    Measures times and the noise scale on a recipe, or takes them as options, for example for a cluster.
    Shows the best number of micro-batches and the settings without accumulation; writes a JSON report, a plot
    and a page. Exit code: 0 done, 2 wrong input, 130 interrupted (a partial report is written).
    """
    folder = out if out is not None or as_json else OUT
    if folder is not None:
        check_folder(folder)
    from ..studies.advise import Options

    options = Options(
        microbatch_size=microbatch_size,
        accumulation_steps=accumulation_steps,
        batch_size=batch_size,
        ranks=ranks,
        noise=noise,
        noise_low=noise_low,
        noise_high=noise_high,
        microbatch_seconds=micro_seconds,
        update_seconds=update_seconds,
        all_reduce_seconds=all_reduce_seconds,
        parameters=_count(parameters),
        optimizer=optimizer,
        learning_rate=lr,
        beta2=beta2,
        weight_decay=weight_decay,
        device=device,
        threads=threads,
        updates=updates,
        seconds=seconds,
        data=data,
    )
    if _further_rank(recipe, options):
        return
    report = measure(recipe, options)
    _publish(report, folder, as_json=as_json)
    raise typer.Exit(INTERRUPTED if report.partial else 0)


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


def measure(recipe: str | None, options: Options) -> Advice:
    """Run the study and show its progress."""
    from ..studies.advise import AdviceInterrupted, Progress
    from ..studies.advise import advise as study

    with progress(f"advise {'' if recipe is None else Path(recipe).name}".strip()) as show:

        def receive(event: Progress) -> None:
            show(event.done, event.total, event.finished)

        try:
            return study(recipe, options, progress=receive)
        except AdviceInterrupted as stopped:
            return stopped.report


def show_report(report: Advice, console: Console) -> None:
    """Print the verdict of an advice, its tables and its main caveats; the page has every finding."""
    from ..report.advice_text import alternative_table, answer, caveats, models_table, steps_table

    print_sentences(answer(report), console)
    print(file=console.file)
    for table in (steps_table(report), models_table(report), alternative_table(report)):
        if table.rows:
            print_table(table, console)
            print(file=console.file)
    print_sentences(caveats(report), console)


def _publish(report: Advice, folder: Path | None, *, as_json: bool) -> None:
    publish(
        report,
        folder,
        as_json=as_json,
        show=lambda console: show_report(report, console),
        draw=lambda: _draw(report),
    )


def _draw(report: Advice) -> dict[str, str | bytes]:
    from .. import plot
    from ..report.pages import advice_page

    light, dark = (plot.png(plot.advice(report, dark=dark)) for dark in (False, True))
    return {"report.html": advice_page(report, light=light, dark=dark), "plot.png": light}
