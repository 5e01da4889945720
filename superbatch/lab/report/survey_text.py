"""Surveys of several splits as a table and in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from superbatch.results.survey import Range, What
from superbatch.tuning.survey import averaged
from superbatch.tuning.survey_suggestions import still_falling

from .comparison import FEWEST_RUNS, Equivalence
from .surveys import CurveTest, SurveyArm, Surveys
from .table import DASH, Column, Table, difference_text, p_text, shown

NAMES: dict[What, str] = {"lr": "learning rate", "momentum": "momentum", "weight_decay": "weight decay"}


def surveys_table(report: Surveys) -> Table:
    """The table of a study: one row per arm."""
    name = NAMES[report.what]
    alike = f"rate within {report.margin:g} decades" if report.what == "lr" else "value alike"
    seeds = "largest p-value, arms with seeds of their own"
    columns = (
        Column("split", "micro-batches x samples; the first row is the baseline"),
        Column(
            f"suggested {name}",
            "geometric mean over the surveys that suggest one, and their spread in decades",
        ),
        Column("stopped at", "median of the last values, where surveys stopped early"),
        Column(
            "pairs differ by", "largest relative difference to the lowest point, same weights and samples"
        ),
        Column(f"curve within {100 * (report.factor - 1):.0f} %", f"at every point of the fall: {seeds}"),
        Column(alike, "equivalence of the suggestions, arms with seeds of their own"),
    )
    return Table(title_of(report), columns, tuple(_row(arm) for arm in report.arms))


def title_of(report: Surveys) -> str:
    """A study in one line."""
    runs = max((len(arm.runs) for arm in report.arms), default=0)
    count = f"{runs} of {report.repeats} surveys" if report.partial else f"{runs} surveys"
    rate = "" if report.learning_rate is None else f", lr {report.learning_rate:g}"
    return (
        f"{report.recipe}: {count} per arm, {NAMES[report.what]} {report.low:g} to {report.high:g} in "
        f"{report.updates} updates of {report.batch_size} samples, {report.optimizer}{rate}, {report.dtype}"
    )


# (claim, alike) -> what is said of an arm that is not exact; the table has its tests.
_SAID: Mapping[tuple[str, bool | None], str] = {
    ("wrong", None): "not tested",
    ("wrong", True): "FOUND ALIKE, though it is wrong",
    ("wrong", False): "wrong, and not found alike",
    ("other", None): "not tested",
    ("other", True): "another batch, found alike all the same",
    ("other", False): "another batch, not found alike",
}
_COUPLED = "samples are coupled, and the split does not claim to survey like the real batch"


def conclusions(report: Surveys) -> list[str]:
    """Return one sentence for the splits, one for each other arm, and the notes."""
    exact, again = _claim(report, "exact"), _claim(report, "again")
    sentences = [_of_splits(report, exact)] if exact else []
    for claim in ("inexact", "wrong", "other"):
        sentences += [
            f"{arm.name}: {_SAID.get((claim, arm.alike), _COUPLED)}." for arm in _claim(report, claim)
        ]
    if exact and again and again[0].alike is False and all(arm.alike is not True for arm in exact):
        sentences.append(
            "The real batch itself, surveyed again, is not shown to be alike: these surveys are too few for "
            f"the tests{_needed(again[0])}."
        )
    if not sentences:
        done = any(arm.runs for arm in report.arms)
        sentences = ["No split was surveyed beside the real batch." if done else "Nothing has been surveyed."]
    return [*sentences, *report.notes]


def suggestion(report: Surveys) -> str:
    """Return the value to begin with in words, by the surveys of the real batch."""
    surveys = [run.survey for run in report.arms[0].runs]
    name, rate = NAMES[report.what], report.arms[0].rate
    if not surveys:
        return f"No {name} is suggested: nothing has been surveyed."
    mean = averaged(surveys)
    nothing = [] if mean.reason is None else [f"No {name} is suggested: {mean.reason}."]
    batches = f"{{:.2g}} for batches of {report.batch_size} samples"
    # The mean curve has the least noise; single surveys are asked only where it leaves the onset open.
    value = mean.onset or rate or mean.minimum
    curves = [each for each in surveys if each.smooth]
    if report.what != "lr" and curves:
        # At a fixed rate the loss falls by itself, whatever the option does: no value is recommended.
        lowest = _middle(
            min(pair for pair in zip(each.smooth, each.values, strict=False) if math.isfinite(pair[0]))[1]
            for each in curves
        )
        said = [
            f"The loss is lowest at a {name} of about {batches.format(lowest)}: more is too much. Before "
            f"that it falls because training continues: the descent does not say which {name} is best.",
            *nothing,
        ]
    elif value is None:
        said = nothing or [f"No {name} is suggested: noise leaves open where the loss begins to fall."]
    else:
        curve = f"the mean curve of {len(surveys)} surveys" if len(surveys) > 1 else "the curve"
        said = [
            f"Begin with a {name} of about {batches.format(value)}. By {curve} the loss has begun to fall at "
            f"{_with_range(mean.onset, mean.onset_range)}, a tenth of where it is lowest is "
            f"{_with_range(mean.minimum, mean.minimum_range)}."
        ]
    if 2 * sum(each.stopped is None and still_falling(each.smooth) for each in surveys) > len(surveys):
        said.append("The loss still fell at the end of the ramp: survey up to a higher value.")
    return " ".join(said)


def _with_range(value: float | None, ends: Range | None) -> str:
    if ends is None:
        return "not known"
    said = "not known" if value is None else f"{value:.2g}"
    return f"{said} ({ends[0]:.2g} to {ends[1]:.2g})"


def _middle(values: Iterable[float]) -> float:
    known = sorted(values)
    return known[len(known) // 2]


def headline(report: Surveys) -> str:
    """Return the result of a study about the splits in a few words, for the top of a plot."""
    exact = _claim(report, "exact")
    pairs = [pair for arm in exact for pair in arm.pairs]
    if not pairs:
        return "nothing was compared"
    if not max(pairs) <= report.tolerance:
        return f"NOT THE SAME: from the same weights and samples curves differ by {_pairs_text(pairs)}"
    said = f"same weights and samples: curves agree to {difference_text(max(pairs))}"
    if any(arm.alike is None for arm in exact):
        return said
    alike = all(arm.alike for arm in exact)
    return f"{said}; different seeds: {'indistinguishable' if alike else 'not shown to be alike'}"


def rate_text(arm: SurveyArm) -> str:
    """Return the learning rate that an arm suggests, with its spread."""
    if arm.rate is None:
        return DASH
    return f"{arm.rate:.3g}" + ("" if arm.decades is None else f" (± {arm.decades:.2f} decades)")


def failures(report: Surveys) -> list[str]:
    """List the arms that claim to be exact and are not, beyond rounding: the criterion of ``--check``."""
    found = [
        f"{arm.name}: paired curves differ by {max(arm.pairs):.2g}, rounding explains {report.tolerance:g}"
        for arm in _claim(report, "exact")
        if not all(pair <= report.tolerance for pair in arm.pairs)
    ]
    if not any(arm.pairs for arm in _claim(report, "exact")):
        found.append(f"no pair of surveys of {report.recipe} claims to be alike: there is nothing to check")
    return [*found, "the study was interrupted"] if report.partial else found


def _row(arm: SurveyArm) -> tuple[str, ...]:
    early = [run.survey for run in arm.runs if run.survey.stopped is not None]
    stopped = sorted(survey.values[-1] if survey.values else survey.low for survey in early)
    names = {"real": f"{arm.name} (real batch)", "inexact": f"{arm.name} (not exact)"}
    return (
        names.get(arm.claim, arm.name),
        rate_text(arm),
        f"{stopped[len(stopped) // 2]:.2g} ({len(stopped)} of {len(arm.runs)})" if stopped else DASH,
        _pairs_text(arm.pairs) if arm.pairs else DASH,
        shown(arm.curve, _yes),
        shown(arm.suggested, _yes),
    )


def _yes(test: CurveTest | Equivalence) -> str:
    return f"{'yes' if test.equivalent else 'not shown'}, {p_text(test.p_value)}"


def _claim(report: Surveys, claim: str) -> list[SurveyArm]:
    return [arm for arm in report.arms if arm.claim == claim and arm.runs]


def _of_splits(report: Surveys, arms: Sequence[SurveyArm]) -> str:
    names = " and ".join(arm.name for arm in arms)
    pairs = [pair for arm in arms for pair in arm.pairs]
    if not pairs:
        return f"{names}: no pair was surveyed."
    rounding = f"rounding in {report.dtype} explains {report.tolerance:g}"
    if not max(pairs) <= report.tolerance:
        return (
            f"NOT THE SAME: paired curves of {names} differ from the real batch's by {_pairs_text(pairs)}; "
            f"{rounding}."
        )
    curves = [arm.curve.p_value for arm in arms if arm.curve is not None]
    rates = [arm.suggested.p_value for arm in arms if arm.suggested is not None]
    if len(curves) == len(rates) == len(arms):
        word = "indistinguishable" if all(arm.alike for arm in arms) else "NOT shown to be alike"
        unpaired = (
            f"from different seeds they are {word} (TOST: curve within {100 * (report.factor - 1):.0f} %, "
            f"{p_text(max(curves))}; suggestion within {report.margin:g} decades, {p_text(max(rates))})"
        )
    elif min(len(arm.runs) for arm in arms) < FEWEST_RUNS:
        unpaired = f"at least {FEWEST_RUNS} surveys per arm are needed for a test from different seeds"
    else:
        unpaired = "these surveys suggest too little for a test from different seeds"
    return (
        f"{names} survey like the real batch: from the same weights and samples the curves agree to "
        f"{difference_text(max(pairs))} ({rounding}); {unpaired}."
    )


def _needed(arm: SurveyArm) -> str:
    """Return the number of runs that would be enough, as far as it is known: for the curve it is not."""
    test = arm.suggested
    needed = None if test is None or test.equivalent else test.runs_needed
    if needed is None or needed <= len(arm.runs):
        return ""
    return f" (for that of the suggestion {needed} per arm would do in 4 of 5 studies)"


def _pairs_text(pairs: Sequence[float]) -> str:
    return difference_text(max(pairs)) if math.isfinite(max(pairs)) else "∞ (one ended early)"
