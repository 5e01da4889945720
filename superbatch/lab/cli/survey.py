"""`superbatch survey [RECIPE]`: which learning rate, and do virtual batches survey like real ones?"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from ..studies.options import SurveyOptions
from .options import AsJson, Recipe, option, out_option
from .publish import folder_for, run

OUT = Path("superbatch-survey")


def survey(
    *,
    recipe: Recipe = "digits",
    options: SurveyOptions,
    out: Annotated[Path | None, out_option(OUT)] = None,
    as_json: AsJson = False,
    check: Annotated[bool, option("exit code 1 unless paired curves agree to rounding", "--check")] = False,
) -> int:
    """Survey learning rates with the real batch and with each split of it, and compare the curves.

    Every point of a survey is one update; the rate grows from point to point. Shows the suggested values and
    whether splits differ from the real batch; writes a JSON report, a plot and a page. Exit code: 0 done, 1
    --check failed, 2 wrong input, 130 interrupted (a partial report is written).
    """
    folder = folder_for(out, OUT, as_json=as_json)
    from ..report.survey_text import failures
    from ..studies.survey import survey as study

    return run(
        f"survey {Path(recipe).name}",
        partial(study, recipe, options),
        folder,
        as_json=as_json,
        failures=failures if check else None,
    )
