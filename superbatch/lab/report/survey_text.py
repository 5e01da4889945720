"""Table and sentences of a study of surveys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_high

from superbatch.results.survey import Range, What
from superbatch.tuning.survey import averaged
from superbatch.tuning.survey_suggestions import still_falling

from .comparison import Equivalence
from .surveys import CurveTest, SurveyArm, Surveys
from .table import DASH, Table, difference_text, marked_name, or_dash, p_text, table_of

NAMES: dict[What, str] = {"lr": "learning rate", "momentum": "momentum", "weight_decay": "weight decay"}


def surveys_table(report: Surveys) -> Table:
    """Return the table of the surveys: one row per arm."""
    curve, share = "the largest p-value up to 2/3 of the lowest point", 100 * (report.factor - 1)
    alike = f"rate within {report.margin:g} decades" if report.what == "lr" else "value alike"
    pairs = "largest relative difference up to the lowest point, same weights and samples"
    seeds = "between arms with different seeds"
    suggested = f"suggested {NAMES[report.what]}"
    return table_of(
        title_of(report),
        report.arms,
        (
            "split",
            "micro-batches x samples; first the baseline",
            lambda arm: marked_name(arm.name, arm.claim),
        ),
        (suggested, "geometric mean over the surveys that suggest one, and spread", _suggested),
        ("stopped at", "median of the last values of the surveys that stopped early", _stopped),
        ("pairs differ by", pairs, lambda arm: _pairs_text(arm.pairs) if arm.pairs else DASH),
        (f"curve within {share:.0f} %", f"{curve}, {seeds}", lambda arm: or_dash(arm.curve, _yes)),
        (alike, f"equivalence of the suggestions, {seeds}", lambda arm: or_dash(arm.suggested, _yes)),
    )


def title_of(report: Surveys) -> str:
    """Return the recipe, the surveyed range and the setting in one line."""
    runs = max((len(arm.runs) for arm in report.arms), default=0)
    count = f"{runs} of {report.repeats} surveys" if report.partial else f"{runs} surveys"
    rate = "" if report.learning_rate is None else f", lr {report.learning_rate:g}"
    return (
        f"{report.recipe}: {count} per arm, {NAMES[report.what]} {report.low:g} to {report.high:g} in "
        f"{report.updates} updates of {report.batch_size} samples, {report.optimizer}{rate}, {report.dtype}"
    )


def conclusions(report: Surveys) -> list[str]:
    """Return the verdict on the splits, its contradictions, and the notes."""
    exact, again = _claim(report, "exact"), _claim(report, "again")
    sentences = [_of_splits(report, exact)]
    sentences += [
        f"{arm.name}: FOUND ALIKE, though it is wrong." for arm in _claim(report, "wrong") if arm.alike
    ]
    # The splits fail the tests for the same reason, and a reader would blame them.
    if exact and again and again[0].alike is False and all(arm.alike is not True for arm in exact):
        sentences.append(
            "Even a second set of surveys of the real batch is not shown to be like the first: there are too "
            "few surveys for the tests. Give more --repeats."
        )
    return [*sentences, *report.notes]


def suggestion(report: Surveys) -> str:
    """Return a sentence with the value to begin with, by the surveys of the real batch."""
    surveys = [run.survey for run in report.arms[0].runs]
    name, batches = NAMES[report.what], f"for batches of {report.batch_size} samples"
    if not surveys:
        return f"No {name} is suggested: nothing has been surveyed."
    mean = averaged(surveys)
    # The mean curve has the least noise; single surveys are used only if it shows no onset.
    value = mean.onset or report.arms[0].rate or mean.minimum
    lowest = [min(zip(each.smooth, each.values, strict=False))[1] for each in surveys if each.smooth]
    if report.what != "lr" and lowest:
        # At a fixed rate the loss falls with any value of the setting: none is recommended.
        text = (
            f"The loss is lowest at a {name} of about {median_high(lowest):.2g} {batches}: a larger one is "
            "too large, and a smaller one may be as good."
        )
    elif value is None:
        text = f"No {name} is suggested: {mean.reason or 'noise hides where the loss begins to fall'}."
    else:
        text = (
            f"Begin with a {name} of about {value:.2g} {batches}: the loss has begun to fall at "
            f"{_with_range(mean.onset, mean.onset_range)}; a tenth of the value with the lowest loss is "
            f"{_with_range(mean.minimum, mean.minimum_range)}."
        )
    if 2 * sum(each.stopped is None and still_falling(each.smooth) for each in surveys) > len(surveys):
        text += " The loss still fell at the end of the ramp: survey up to a higher value."
    return text


def _with_range(value: float | None, ends: Range | None) -> str:
    if ends is None:
        return "not known"
    return f"{or_dash(value, '{:.2g}'.format)} ({ends[0]:.2g} to {ends[1]:.2g})"


def failures(report: Surveys) -> list[str]:
    """Return a sentence for each exact arm that differs beyond rounding; empty if ``--check`` passes."""
    found = [
        f"{arm.name}: paired curves differ by {max(arm.pairs):.2g}, rounding explains {report.tolerance:g}"
        for arm in _claim(report, "exact")
        if not all(pair <= report.tolerance for pair in arm.pairs)
    ]
    if not any(arm.pairs for arm in _claim(report, "exact")):
        found.append(f"no exact split of {report.recipe} was paired with the real batch: nothing to check")
    return [*found, "the study was interrupted"] if report.partial else found


def _suggested(arm: SurveyArm) -> str:
    spread = "" if arm.decades is None else f" (± {arm.decades:.2f} decades)"
    return or_dash(arm.rate, "{:.3g}".format) + spread


def _stopped(arm: SurveyArm) -> str:
    early = [run.survey for run in arm.runs if run.survey.stopped is not None]
    last = [survey.values[-1] if survey.values else survey.low for survey in early]
    return f"{median_high(last):.2g} ({len(last)} of {len(arm.runs)})" if last else DASH


def _yes(test: CurveTest | Equivalence) -> str:
    return f"{'yes' if test.equivalent else 'not shown'}, {p_text(test.p_value)}"


def _claim(report: Surveys, claim: str) -> list[SurveyArm]:
    return [arm for arm in report.arms if arm.claim == claim and arm.runs]


def _of_splits(report: Surveys, arms: Sequence[SurveyArm]) -> str:
    names = " and ".join(arm.name for arm in arms)
    pairs = [pair for arm in arms for pair in arm.pairs]
    if not pairs:
        return "No split that claims to be exact was surveyed beside the real batch."
    apart = f"{_pairs_text(pairs)} (rounding in {report.dtype} explains {report.tolerance:g})"
    if not max(pairs) <= report.tolerance:
        return f"NOT THE SAME: paired curves of {names} differ from the real batch's by {apart}."
    if any(arm.curve is None or arm.suggested is None for arm in arms):
        unpaired = "were too few or too noisy for a test"
    else:
        unpaired = f"are {'indistinguishable' if all(arm.alike for arm in arms) else 'NOT shown to be alike'}"
    return (
        f"{names} survey like the real batch: from the same weights and samples the curves agree to {apart}; "
        f"surveys from different seeds {unpaired}."
    )


def _pairs_text(pairs: Sequence[float]) -> str:
    return difference_text(max(pairs)) if math.isfinite(max(pairs)) else "∞ (one ended early)"
