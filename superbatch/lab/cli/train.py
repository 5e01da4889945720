"""`superbatch train RECIPE`: train a recipe on one device or under torchrun, with checkpoints."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from os import environ
from pathlib import Path

from ..studies.options import TrainOptions
from .options import Recipe
from .progress import progress


def train(*, recipe: Recipe, options: TrainOptions) -> int:
    """Train a recipe: the update of the real large batch, in micro-batches that fit.

    Under torchrun the same command trains on all ranks. With --checkpoints the same command resumes a
    training, on any number of ranks. Ctrl-C and SIGTERM stop it after the current update; with --checkpoints
    it is saved first. Exit code: 0 done, 2 wrong input, 130 stopped by Ctrl-C, 143 by SIGTERM.
    """
    from ..recipes import load_recipe
    from ..studies.train import train as study

    loaded = load_recipe(recipe, data=options.data)
    first = environ.get("RANK", "0") == "0"  # one bar for all ranks
    with progress(f"train {Path(recipe).name}") if first else nullcontext(lambda *_: None) as show:
        report = study(loaded, options, progress=show)
    if report.rank:
        return report.exit_code
    if report.resumed:
        print(f"resumed from {report.resumed}", file=sys.stderr)
    if report.metric is not None:
        loss = "" if report.loss is None else f"last loss {report.loss:.4g}, "
        metric = f"{loaded.metric} {report.metric:.4g} {loaded.unit}".rstrip()
        print(f"{report.updates} updates, {loss}{metric}")
    if report.noise is not None:
        print(report.noise.summary())
    if report.exit_code:
        saved = options.checkpoints is not None
        then = "the same command resumes" if saved else "nothing was saved: pass --checkpoints"
        print(f"superbatch: stopped after update {report.updates}; {then}", file=sys.stderr)
    return report.exit_code
