"""Surveys of several splits as a table and in sentences."""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Sequence

from superbatch.results.survey import Range, What
from superbatch.tuning.survey import averaged
from superbatch.tuning.survey_suggestions import still_falling

from .comparison import FEWEST_RUNS
from .surveys import SurveyArm, Surveys
from .table import Column, Table, difference_text

NAMES: dict[What, str] = {"lr": "learning rate", "momentum": "momentum", "weight_decay": "weight decay"}


def surveys_table(report: Surveys) -> Table:
    """The table of a study: one row per arm.

    Args:
        report: whole or partial.

    Returns:
        Text; a dash stands for what was not measured.
    """
    name = NAMES[report.what]
    columns = (
        Column("split", "micro-batches x samples; the first row is the baseline"),
        Column(
            f"suggested {name}",
            "geometric mean over the surveys that suggest one, and their spread in decades",
        ),
        Column("stopped at", "median of the last values, where surveys stopped early"),
        Column(
            "pairs differ by",
            "largest relative difference of the curve from the real batch's with the same weights and "
            "samples, up to its lowest point",
        ),
        Column(
            f"curve within {100 * (report.factor - 1):.0f} %",
            "equivalence of the log loss at every point up to 2/3 of where the baseline is lowest, arms with "
            "seeds of their own: the largest p-value",
        ),
        Column(
            f"rate within {report.margin:g} decades" if report.what == "lr" else "value alike",
            "equivalence of the suggestions, arms with seeds of their own",
        ),
    )
    return Table(title_of(report), columns, tuple(_row(arm) for arm in report.arms))


def title_of(report: Surveys) -> str:
    """A study in one line.

    Args:
        report: of surveys.
    """
    runs = max((len(arm.runs) for arm in report.arms), default=0)
    count = f"{runs} of {report.repeats} surveys" if report.partial else f"{runs} surveys"
    rate = "" if report.learning_rate is None else f", lr {report.learning_rate:g}"
    return (
        f"{report.recipe}: {count} per arm, {NAMES[report.what]} {report.low:g} to {report.high:g} in "
        f"{report.updates} updates of {report.batch_size} samples, {report.optimizer}{rate}, {report.dtype}"
    )


def conclusions(report: Surveys) -> list[str]:
    """Return the conclusions of a study in words.

    Args:
        report: whole or partial.

    Returns:
        One sentence for the splits, one for each arm that should be told apart, one on what that is worth.
    """
    exact = _claim(report, "exact")
    sentences = [_of_splits(report, exact)] if exact else []
    sentences += [_of_inexact(arm) for arm in _claim(report, "inexact")]
    sentences += [_of_wrong(arm) for arm in _claim(report, "wrong")]
    sentences += [_of_other(arm) for arm in _claim(report, "other")]
    again = _claim(report, "again")
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
    """Return the value to begin with in words, by the surveys of the real batch.

    Args:
        report: whole or partial.
    """
    runs = report.arms[0].runs
    name, rate = NAMES[report.what], report.arms[0].rate
    if not runs:
        return f"No {name} is suggested: nothing has been surveyed."
    mean = averaged([run.survey for run in runs])
    fell = sum(run.survey.stopped is None and still_falling(run.survey.smooth) for run in runs)
    further = (
        " The loss still fell at the end of the ramp: survey up to a higher value."
        if 2 * fell > len(runs)
        else ""
    )
    nothing = "" if mean.reason is None else f"No {name} is suggested: {mean.reason}."
    if report.what != "lr":
        return " ".join(filter(None, (_too_much(report), nothing))) + further
    # The mean curve has the least noise; single surveys are asked only where it leaves the onset open.
    value = mean.onset or rate or mean.minimum
    if value is None:
        nothing = nothing or f"No {name} is suggested: noise leaves open where the loss begins to fall."
        return f"{nothing}{further}"
    said = (
        f"the loss has begun to fall at {_with_range(mean.onset, mean.onset_range)}, "
        f"a tenth of where it is lowest is {_with_range(mean.minimum, mean.minimum_range)}"
    )
    of_curve = f"By the mean curve of {len(runs)} surveys" if len(runs) > 1 else "By the curve"
    return (
        f"Begin with a {name} of about {value:.2g} for batches of {report.batch_size} samples. "
        f"{of_curve} {said}.{further}"
    )


def _with_range(value: float | None, ends: Range | None) -> str:
    if ends is None:
        return "not known"
    said = "not known" if value is None else f"{value:.2g}"
    return f"{said} ({ends[0]:.2g} to {ends[1]:.2g})"


def _too_much(report: Surveys) -> str:
    """Say up to where the loss fell: at a fixed rate it falls by itself, whatever the option does."""
    surveys = [run.survey for run in report.arms[0].runs]
    curves = [zip(survey.smooth, survey.values, strict=False) for survey in surveys]
    lowest = sorted(min(pair for pair in curve if math.isfinite(pair[0]))[1] for curve in curves)
    name = NAMES[report.what]
    return (
        f"The loss is lowest at a {name} of about {lowest[len(lowest) // 2]:.2g} for batches of "
        f"{report.batch_size} samples: more is too much. Before that it falls because training goes on, so "
        f"that the descent does not tell which {name} is best."
    )


def headline(report: Surveys) -> str:
    """Return the result of a study about the splits in a few words, for the top of a plot.

    Args:
        report: whole or partial.
    """
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
    """Return the learning rate that an arm suggests, with its spread.

    Args:
        arm: of a study.

    Returns:
        Such as ``0.0912 (± 0.08 decades)``; a dash where nothing is suggested.
    """
    if arm.rate is None:
        return "–"
    return f"{arm.rate:.3g}" + ("" if arm.decades is None else f" (± {arm.decades:.2f} decades)")


def failures(report: Surveys) -> list[str]:
    """List the arms that claim to be exact and are not, beyond rounding: the criterion of ``--check``.

    Args:
        report: of surveys.

    Returns:
        One sentence per failure. The unpaired tests are no check: too few surveys show nothing.
    """
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
    curve, rate = arm.curve, arm.suggested
    return (
        names.get(arm.claim, arm.name),
        rate_text(arm),
        f"{stopped[len(stopped) // 2]:.2g} ({len(stopped)} of {len(arm.runs)})" if stopped else "–",
        _pairs_text(arm.pairs) if arm.pairs else "–",
        "–" if curve is None else _yes(p=curve.p_value, equivalent=curve.equivalent),
        "–" if rate is None else _yes(p=rate.p_value, equivalent=rate.equivalent),
    )


def _yes(*, p: float, equivalent: bool) -> str:
    return f"{'yes' if equivalent else 'not shown'}, p {_p(p)}"


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def _claim(report: Surveys, claim: str) -> list[SurveyArm]:
    return [arm for arm in report.arms if arm.claim == claim and arm.runs]


def _of_splits(report: Surveys, arms: Sequence[SurveyArm]) -> str:
    names = " and ".join(
        [", ".join(arm.name for arm in arms[:-1]), arms[-1].name] if arms[1:] else [arms[0].name]
    )
    pairs = [pair for arm in arms for pair in arm.pairs]
    largest = max(pairs, default=math.nan)
    if not largest <= report.tolerance:
        if not pairs:
            return f"{names}: no pair was surveyed."
        return (
            f"NOT THE SAME: paired curves of {names} differ from the real batch's by "
            f"{_pairs_text(pairs)}; rounding in {report.dtype} explains {report.tolerance:g}."
        )
    said = (
        f"{names} survey like the real batch: from the same weights and samples the curves agree to "
        f"{difference_text(largest)} (rounding in {report.dtype} explains {report.tolerance:g})"
    )
    tests = [
        (arm.curve, arm.suggested) for arm in arms if arm.curve is not None and arm.suggested is not None
    ]
    if len(tests) < len(arms):
        few = min(len(arm.runs) for arm in arms) < FEWEST_RUNS
        why = (
            f"at least {FEWEST_RUNS} surveys per arm are needed for"
            if few
            else "these surveys suggest too little for"
        )
        return f"{said}; {why} a test from different seeds."
    curve = max(c.p_value for c, _ in tests)
    rate = max(r.p_value for _, r in tests)
    word = "indistinguishable" if all(arm.alike for arm in arms) else "NOT shown to be alike"
    return (
        f"{said}; from different seeds they are {word} (TOST: every point of the curve within "
        f"{100 * (report.factor - 1):.0f} %, p {_p(curve)}; suggestion within {report.margin:g} decades, "
        f"p {_p(rate)})."
    )


def _of_inexact(arm: SurveyArm) -> str:
    return f"{arm.name}: samples see each other, and the split does not claim to survey like the real batch."


def _of_wrong(arm: SurveyArm) -> str:
    if arm.alike is None:
        return f"{arm.name}: not tested."
    if arm.alike:
        return f"{arm.name}: FOUND ALIKE, though it is wrong."
    return f"{arm.name}: wrong, and not found alike ({_tests(arm)})."


def _of_other(arm: SurveyArm) -> str:
    if arm.alike is None:
        return f"{arm.name}: not tested."
    found = "found alike all the same" if arm.alike else "not found alike"
    return f"{arm.name}: another batch, {found} ({_tests(arm)})."


def _tests(arm: SurveyArm) -> str:
    words = [
        f"{name} {_yes(p=test.p_value, equivalent=test.equivalent)}"
        for name, test in (("curve:", arm.curve), ("suggestion:", arm.suggested))
        if test is not None
    ]
    return "; ".join(words)


def _needed(arm: SurveyArm) -> str:
    """Return the number of runs that would be enough, as far as it is known: for the curve it is not."""
    test = arm.suggested
    needed = None if test is None or test.equivalent else test.runs_needed
    if needed is None or needed <= len(arm.runs):
        return ""
    return f" (for that of the suggestion {needed} per arm would do in 4 of 5 studies)"


def _pairs_text(pairs: Sequence[float]) -> str:
    return difference_text(max(pairs)) if math.isfinite(max(pairs)) else "∞ (one ended early)"
