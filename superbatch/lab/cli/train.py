"""`superbatch train RECIPE`: train a recipe, resume it, stop it; on one device or under torchrun."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING

from ..studies.options import TrainOptions
from .options import Recipe
from .progress import progress

if TYPE_CHECKING:  # torch takes seconds to import: not for --help
    from ..studies.train import Trained


def train(*, recipe: Recipe, options: TrainOptions) -> int:
    """Train a recipe: the update of the real large batch, in micro-batches that fit.

    Under torchrun the same command trains on all ranks; with --checkpoints a restart resumes, on any number
    of them. Ctrl-C and SIGTERM end the update at hand and save. Exit code: 0 done, 2 wrong input, 130 stopped
    by Ctrl-C, 143 by SIGTERM.
    """
    from ..recipes import load_recipe
    from ..studies.train import train as study

    loaded = load_recipe(recipe, data=options.data)
    first = environ.get("RANK", "0") == "0"  # one bar for all ranks
    with progress(f"train {Path(recipe).name}") if first else nullcontext(lambda *_: None) as show:
        report = study(loaded, options, progress=show)
    if report.rank == 0:
        _show(report, f"{loaded.metric} {{:.4g}} {loaded.unit}".rstrip())
    if report.exit_code and report.rank == 0:
        _show_stop(report, saved=options.checkpoints is not None)
    return report.exit_code


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
