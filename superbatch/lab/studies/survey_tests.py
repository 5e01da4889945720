"""Equivalence of two sets of survey curves.

*Paired*: two surveys from the same weights and samples must agree to rounding. This is the real test.

*Unpaired*: independent surveys differ by chance. Two one-sided tests (TOST) compare the log loss at each
point up to 2/3 of the value where the baseline is lowest. All of them must pass, so no correction for
multiple tests is needed (intersection-union test). Another TOST compares the suggested values in decades. An
ordinary test that finds no *difference* does not show equality.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from superbatch.results.survey import Survey
from superbatch.tuning.survey_ramp import to_axis
from superbatch.tuning.survey_suggestions import FIRST, LAST

from ..report.comparison import FEWEST_RUNS, Equivalence
from ..report.surveys import CurveTest
from .statistics import ALPHA, smallest_gap, summarise, tost_welch

FACTOR = 1.10  # equivalence margin of the losses, a factor
DECADES = 0.15  # equivalence margin of the suggested values: a factor of 1.41
SUGGESTING = 0.75  # share of the surveys that must suggest a value for a test of the suggestions
SHARE = 2 / 3  # curves are compared up to this share of the value where the baseline is lowest


def paired_difference(survey: Survey, real: Survey) -> float:
    """Return ``max |l - r| / |r|`` up to the lowest point of `real`; infinite if a curve ends before it."""
    end = 1 + real.smooth.index(min(real.smooth)) if real.smooth else 0
    if not end or len(survey.losses) < end:
        return math.inf
    pairs = zip(survey.losses[:end], real.losses[:end], strict=True)
    return max(0.0 if a == b else abs(a - b) / abs(b) if b else math.inf for a, b in pairs)


def curve_test(
    surveys: Sequence[Survey], baseline: Sequence[Survey], *, factor: float = FACTOR
) -> CurveTest | None:
    """Test that losses are the baseline's within a factor, at each point up to `SHARE` of the lowest one.

    Returns None with fewer than `FEWEST_RUNS` surveys on either side, if a loss is not positive and has no
    logarithm, or if a baseline survey ended too early to have a point that is tested.
    """
    if min(len(surveys), len(baseline)) < FEWEST_RUNS:
        return None
    logs, reference = _logs(surveys), _logs(baseline)
    if logs is None or reference is None or min(map(len, reference)) <= FIRST:
        return None
    longest = max(baseline, key=lambda survey: len(survey.values))
    values = longest.values
    last = _last_point(baseline, [to_axis(longest.what, value) for value in values])
    # A survey that ended before such a point has exploded, so it differs from the baseline there.
    found = [
        _point(
            [log[i] for log in logs if i < len(log)],
            [log[i] for log in reference if i < len(log)],
            factor,
            complete=all(i < len(log) for log in logs),
        )
        for i in range(last + 1)
    ]
    worst = max(range(last + 1), key=lambda i: found[i][0])
    return CurveTest(
        points=last + 1,
        upto=values[last],
        factor=factor,
        p_value=found[worst][0],
        at=values[worst],
        ratio=found[worst][1],
        equivalent=found[worst][0] < ALPHA,
    )


def suggestion_test(
    surveys: Sequence[Survey], baseline: Sequence[Survey], *, margin: float = DECADES
) -> Equivalence | None:
    """Test that the suggested values equal the baseline's within a margin in decades.

    Returns None if fewer than `FEWEST_RUNS` surveys on either side suggest a value, or a share below
    `SUGGESTING`.
    """
    found = [[value for value in decades_of(part) if value is not None] for part in (surveys, baseline)]
    for suggested, part in zip(found, (surveys, baseline), strict=True):
        # Noise keeps some surveys from suggesting a value. The few others would be a biased sample.
        if len(suggested) < max(FEWEST_RUNS, SUGGESTING * len(part)):
            return None
    sample, other = found
    # Suggestions are points of the ramp, so some are equal by chance: the step keeps the spread above 0.
    return tost_welch(
        summarise(sample), summarise(other), margin=margin, step=smallest_gap([*sample, *other])
    )


def decades_of(surveys: Sequence[Survey]) -> list[float | None]:
    """Return log10 of each suggestion, or None; of a momentum m, log10 of 1 / (1 - m)."""
    return [None if s.suggestion is None else math.log10(to_axis(s.what, s.suggestion)) for s in surveys]


def _logs(surveys: Sequence[Survey]) -> list[list[float]] | None:
    """Return the logarithms of the losses; None if a loss has none."""
    if any(loss <= 0 for survey in surveys for loss in survey.losses):
        return None
    return [[math.log(loss) for loss in survey.losses] for survey in surveys]


def _last_point(baseline: Sequence[Survey], axis: Sequence[float]) -> int:
    """Return the index of the last point below `SHARE` of where the mean smoothed baseline is lowest."""
    shared = min(len(survey.smooth) for survey in baseline)
    means = [statistics.fmean(survey.smooth[i] for survey in baseline) for i in range(shared)]
    kept = range(min(FIRST, shared - 1), max(shared - LAST, FIRST + 1, 1))
    lowest = min((i for i in kept if i < shared), key=lambda i: means[i])
    return max(i for i in range(lowest + 1) if i == 0 or axis[i] <= SHARE * axis[lowest])


def _point(
    logs: Sequence[float], reference: Sequence[float], factor: float, *, complete: bool
) -> tuple[float, float]:
    """Return the p-value at one point, and the ratio of the geometric means of the losses."""
    if not complete or len(logs) < 2 or len(reference) < 2:
        return 1.0, math.nan
    test = tost_welch(summarise(logs), summarise(reference), margin=math.log(factor))
    return test.p_value, math.exp(test.difference)
