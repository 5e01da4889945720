"""`superbatch train RECIPE`: train a recipe, resume it, stop it; on one device or under torchrun."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superbatch.errors import InputError

from .options import Data, Device, OptimizerName, Recipe, SampleRng, Seed, option
from .progress import progress
from .publish import options_from

if TYPE_CHECKING:  # torch takes seconds to import: not for --help
    from ..studies.train import Trained

BatchSize = Annotated[int | None, option("samples of one update, on all ranks (default: the recipe's)")]
Rate = Annotated[float | None, option("learning rate (default: the recipe's for the optimizer)")]
Schedule = Annotated[str, typer.Option(help="constant; linear or cosine: down to 0 at --updates")]
Checkpoints = Annotated[
    Path | None, option("folder; the same command resumes from its newest checkpoint (default: none)")
]
EvaluateEvery = Annotated[int | None, option("updates between evaluations (default: at the end alone)")]
# Not --log, which torchrun takes for one of its own options, cut short.
Log = Annotated[Path | None, option("file with a row of JSON for each update (default: none)", "--log-file")]


def train(
    recipe: Recipe,
    batch_size: BatchSize = None,
    microbatch_size: Annotated[str, typer.Option(help="samples of a micro-batch, auto or largest")] = "auto",
    updates: Annotated[int | None, option("length of the training (default: the recipe's)")] = None,
    optimizer: OptimizerName = None,
    learning_rate: Rate = None,
    precision: Annotated[str, typer.Option(help="float32, float64 or bf16 (autocast)")] = "float32",
    clip: Annotated[float | None, option("largest norm of the gradient (default: none)")] = None,
    schedule: Schedule = "constant",
    noise: Annotated[bool, typer.Option("--noise", help="measure the noise scale of the gradient")] = False,
    sample_rng: SampleRng = False,
    checkpoints: Checkpoints = None,
    every: Annotated[int, typer.Option(help="updates between checkpoints")] = 100,
    keep: Annotated[int, typer.Option(help="checkpoints that stay")] = 3,
    evaluate_every: EvaluateEvery = None,
    log: Log = None,
    tensorboard: Annotated[Path | None, option("folder for TensorBoard (default: none)")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    data: Data = None,
) -> None:
    """Train a recipe: the update of the real large batch, in micro-batches that fit.

    Under torchrun the same command trains on all ranks; with --checkpoints a restart resumes, on any number
    of them. Ctrl-C and SIGTERM end the update at hand and save. Exit code: 0 done, 2 wrong input, 130 stopped
    by Ctrl-C, 143 by SIGTERM.
    """
    if microbatch_size not in ("auto", "largest") and not microbatch_size.isdecimal():
        raise InputError(f"--microbatch-size {microbatch_size} is no size. Pass a number, auto or largest.")
    if device not in ("cpu", "cuda"):
        raise InputError(f"--device {device} is unknown. Use cpu or cuda.")
    from ..recipes import load_recipe
    from ..studies.train import Options
    from ..studies.train import train as study

    loaded = load_recipe(recipe, data=data)
    size = int(microbatch_size) if microbatch_size.isdecimal() else microbatch_size
    options = options_from(Options, locals(), microbatch_size=size)
    first = environ.get("RANK", "0") == "0"  # one bar for all ranks
    with progress(f"train {Path(recipe).name}") if first else nullcontext(lambda *_: None) as show:
        report = study(loaded, options, progress=show)
    if report.rank == 0:
        _show(report, f"{loaded.metric} {{:.4g}} {loaded.unit}".rstrip())
    if report.exit_code and report.rank == 0:
        _show_stop(report, saved=checkpoints is not None)
    raise typer.Exit(report.exit_code)


def _show(report: Trained, metric: str) -> None:
    if report.resumed:
        print(f"resumed from {report.resumed}", file=sys.stderr)
    if report.metric is not None:
        loss = "" if report.loss is None else f"last loss {report.loss:.4g}, "
        print(f"{report.updates} updates, {loss}{metric.format(report.metric)}")
    if report.noise is not None:
        print(report.noise.summary())


def _show_stop(report: Trained, *, saved: bool) -> None:
    then = "the same command resumes" if saved else "nothing was saved: pass --checkpoints"
    print(f"superbatch: stopped after update {report.updates}; {then}", file=sys.stderr)
