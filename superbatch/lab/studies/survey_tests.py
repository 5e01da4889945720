"""Equivalence of two bundles of survey curves: paired where they can be, else point by point.

*Paired*: two surveys from the same weights and samples must agree to rounding. This is the real test.

*Unpaired*: independent surveys differ by chance. Two one-sided tests (TOST) of the log loss at every point up
to 2/3 of where the baseline is lowest, all of which must pass (an intersection-union test needs no
correction), and one of the suggested values in decades. That a test for a *difference* finds none would say
nothing.
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

FACTOR = 1.10  # losses within 10 % of each other are alike

DECADES = 0.15  # suggested rates within a factor of 1.41 of each other are alike

SUGGESTING = 0.75  # share of the surveys that must suggest a value, for the others may have lain elsewhere

SHARE = 2 / 3  # curves are compared up to this share of the value where the baseline is lowest


def paired_difference(survey: Survey, real: Survey) -> float:
    """Return ``max |l - r| / |r|`` up to the lowest point of `real`; infinite if one curve ends before."""
    end = 1 + real.smooth.index(min(real.smooth)) if real.smooth else 0
    if not end or len(survey.losses) < end:
        return math.inf
    pairs = zip(survey.losses[:end], real.losses[:end], strict=True)
    return max(0.0 if a == b else abs(a - b) / abs(b) if b else math.inf for a, b in pairs)


def curve_test(
    surveys: Sequence[Survey], baseline: Sequence[Survey], *, factor: float = FACTOR
) -> CurveTest | None:
    """Test that the loss is the baseline's within a factor, at every point before the lowest.

    None with fewer than `FEWEST_RUNS` of either, where a loss is not positive, so that it has no
    logarithm, and where a baseline ended so early that no point counts.
    """
    if min(len(surveys), len(baseline)) < FEWEST_RUNS:
        return None
    logs, reference = _logs(surveys), _logs(baseline)
    if logs is None or reference is None or min(map(len, reference)) <= FIRST:
        return None
    longest = max(baseline, key=lambda survey: len(survey.values))
    values = longest.values
    last = _last_point(baseline, [to_axis(longest.what, value) for value in values])
    # Where a survey in question ended before that, its loss had exploded there: it is not the baseline's.
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
    """Test that the suggested values are the baseline's within some decades.

    None with fewer than `FEWEST_RUNS` of either, and where less than `SUGGESTING` of either suggest a value.
    """
    found = [[value for value in decades_of(part) if value is not None] for part in (surveys, baseline)]
    for suggested, part in zip(found, (surveys, baseline), strict=True):
        # Noise leaves some surveys open; of the few that noise left alone the rest would say nothing.
        if len(suggested) < max(FEWEST_RUNS, SUGGESTING * len(part)):
            return None
    sample, other = found
    # Suggestions are points of the ramp: they come out the same by chance.
    return tost_welch(
        summarise(sample), summarise(other), margin=margin, step=smallest_gap([*sample, *other])
    )


def decades_of(surveys: Sequence[Survey]) -> list[float | None]:
    """Decimal logarithms of the suggestions; of a momentum, those of the updates it averages over."""
    return [None if s.suggestion is None else math.log10(to_axis(s.what, s.suggestion)) for s in surveys]


def _logs(surveys: Sequence[Survey]) -> list[list[float]] | None:
    if any(loss <= 0 for survey in surveys for loss in survey.losses):
        return None
    return [[math.log(loss) for loss in survey.losses] for survey in surveys]


def _last_point(baseline: Sequence[Survey], axis: Sequence[float]) -> int:
    """The last point at most at 2/3 of where the mean of the smoothed curves is lowest."""
    shared = min(len(survey.smooth) for survey in baseline)
    means = [statistics.fmean(survey.smooth[i] for survey in baseline) for i in range(shared)]
    kept = range(min(FIRST, shared - 1), max(shared - LAST, FIRST + 1, 1))
    lowest = min((i for i in kept if i < shared), key=lambda i: means[i])
    return max(i for i in range(lowest + 1) if i == 0 or axis[i] <= SHARE * axis[lowest])


def _point(
    logs: Sequence[float], reference: Sequence[float], factor: float, *, complete: bool
) -> tuple[float, float]:
    """The p-value at one point, and the ratio of the geometric means."""
    if not complete or len(logs) < 2 or len(reference) < 2:
        return 1.0, math.nan
    test = tost_welch(summarise(logs), summarise(reference), margin=math.log(factor))
    return test.p_value, math.exp(test.difference)
