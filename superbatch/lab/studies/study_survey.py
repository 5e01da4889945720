"""Study of learning-rate surveys with virtual batches: the report of `superbatch survey` as a study."""

from __future__ import annotations

import math
from dataclasses import replace

from ..recipes import Recipe
from ..report.study import Quantity, Study, StudyArm, StudyRun, StudyTest
from ..report.survey_text import conclusions
from ..report.surveys import SeededSurvey, SurveyArm, Surveys
from . import survey as surveying
from .shared_options import Interrupted, Show
from .study import Options, as_study, options_for, seeds_of

RATE, PAIRS, CURVES = "suggested lr", "pairs differ by", "curves alike, p"


def run(recipe: str | Recipe, options: Options, progress: Show) -> Study:
    """Survey the learning rate with the real batch and with its splits."""
    wanted = options_for(surveying.Options, options, repeats=len(seeds_of("survey", options)))
    try:
        return _study(surveying.survey(recipe, wanted, progress=progress), options)
    except Interrupted as stopped:
        raise Interrupted(_study(stopped.report, options)) from None


def _study(report: Surveys, options: Options) -> Study:
    share = report.factor - 1
    return as_study(
        "survey",
        report,
        options,
        setting={
            "lr": f"{report.low:g} to {report.high:g} in {report.updates} updates",
            "batch": str(report.batch_size),
            "optimizer": report.optimizer,
            "dtype": report.dtype,
        },
        quantities=(
            Quantity(name=RATE, meaning="where the loss has fallen by a fifth of its total fall", form=".3g"),
            Quantity(
                name=PAIRS,
                meaning="largest relative difference of the curve from the real batch's with the same "
                "weights and samples, up to its lowest point",
                form=".1e",
            ),
            Quantity(
                name=CURVES,
                meaning=f"test of equivalence within {share:.0%}: the largest p-value over all points up to "
                "2/3 of where the first arm's curve is lowest; below 0.05 shows equivalence",
                form=".2g",
            ),
        ),
        arms=tuple(map(_arm, report.arms)),
        tests=tuple(test for arm in report.arms if (test := _test(arm, report.arms[0])) is not None),
        conclusion=conclusions(report)[0],
        curve_at=max((run.survey.values for arm in report.arms for run in arm.runs), key=len, default=()),
        seeds=tuple(range(report.repeats)),
        notes=(
            "Each arm has its own seeds, so its tests are not paired. superbatch survey also takes other "
            "ranges, momentum and weight decay, and adds wrong methods.",
        ),
    )


def _arm(arm: SurveyArm) -> StudyArm:
    facts = {PAIRS: max(arm.pairs)} if arm.pairs else dict[str, float]()
    if arm.curve is not None:
        facts[CURVES] = arm.curve.p_value
    return StudyArm(name=arm.name, how=arm.how, facts=facts, runs=tuple(map(_run, arm.runs)))


def _run(run: SeededSurvey) -> StudyRun:
    survey = run.survey
    # All curves of a study have the same length, and a survey that stopped early has fewer values.
    rest = (math.nan,) * (survey.updates - len(survey.smooth))
    values = {} if survey.suggestion is None else {RATE: survey.suggestion}
    return StudyRun(seed=run.seed, values=values, curve=(*survey.smooth, *rest))


def _test(arm: SurveyArm, first: SurveyArm) -> StudyTest | None:
    """Return the test of the suggested rates, converted from decades to natural logarithms."""
    if arm.suggested is None:
        return None
    test, e = arm.suggested, math.log(10)
    result = replace(
        test, difference=e * test.difference, low=e * test.low, high=e * test.high, margin=e * test.margin
    )
    return StudyTest(first=arm.name, second=first.name, quantity=RATE, ratio=True, result=result)
