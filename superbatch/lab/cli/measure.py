"""Commands that measure a recipe: `superbatch fit`, `superbatch noise` and `superbatch survey`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ..report.survey_text import failures
from ..studies.options import FitOptions, NoiseOptions, SurveyOptions
from .options import AsJson, Recipe, option, out_option
from .publish import run


def fit(
    *,
    recipe: Recipe,
    options: FitOptions,
    out: Annotated[Path | None, out_option("superbatch-fit")] = None,
    as_json: AsJson = False,
) -> int:
    """Find the micro-batch size: predict and measure memory, and measure time, for several sizes.

    Shows the largest size that fits, the fastest size, memory and time of larger batches, and ways to lower
    peak memory; writes a JSON report, a plot and a page. Nothing is trained: the weights do not change.
    Exit code: 0 done, 2 wrong input, 130 interrupted (a partial report is written).
    """
    return run("fit", recipe, options, title=f"fit {Path(recipe).name}", out=out, as_json=as_json)


def noise(
    *,
    recipe: Recipe,
    options: NoiseOptions,
    out: Annotated[Path | None, out_option("superbatch-noise")] = None,
    as_json: AsJson = False,
) -> int:
    """Train a recipe and measure the noise scale of its gradient: is a larger batch worth it?

    Shows the noise scale during training with its interval (or why it is not determined), and the time to a
    target loss by number of micro-batches per update; writes a JSON report, a plot and a page.
    Exit code: 0 done, 2 wrong input, 130 interrupted (a partial report is written).
    """
    return run("noise", recipe, options, title=f"noise {Path(recipe).name}", out=out, as_json=as_json)


def survey(
    *,
    recipe: Recipe = "digits",
    options: SurveyOptions,
    out: Annotated[Path | None, out_option("superbatch-survey")] = None,
    as_json: AsJson = False,
    check: Annotated[
        bool, option("exit code 1 unless curves from the same seed agree to rounding", "--check")
    ] = False,
) -> int:
    """Survey learning rates (range test) with the real batch and each split of it, and compare the curves.

    Each point of a survey is one update; the learning rate grows from point to point. Shows the suggested
    values and the difference of each split from the real batch; writes a JSON report, a plot and a page.
    Exit code: 0 done, 1 --check failed, 2 wrong input, 130 interrupted (a partial report is written).
    """
    title = f"survey {Path(recipe).name}"
    criterion = failures if check else None
    return run("survey", recipe, options, title=title, out=out, as_json=as_json, failures=criterion)
