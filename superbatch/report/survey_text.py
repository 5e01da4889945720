"""Surveys of several splits as a table and in sentences."""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Sequence

from superbatch.report.survey import What
from superbatch.report.surveys import SurveyArm, Surveys
from superbatch.report.table import Column, Table, difference_text

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
        Column(f"suggested {name}", "geometric mean over the surveys, and their spread in decades"),
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
    """Say what a study has shown.

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
    if again and again[0].alike is False and all(arm.alike is not True for arm in exact):
        sentences.append(
            "The real batch itself, surveyed again, is not shown to be alike: these surveys are too few for "
            f"the tests ({_needed(again)} per arm would do in 4 of 5 studies)."
        )
    return [*sentences, *report.notes] if sentences else ["Nothing has been surveyed.", *report.notes]


def headline(report: Surveys) -> str:
    """Say what a study has shown about the splits in a few words, for the top of a picture.

    Args:
        report: whole or partial.
    """
    exact = _claim(report, "exact")
    pairs = [pair for arm in exact for pair in arm.pairs]
    if not pairs:
        return "nothing was compared"
    said = f"same weights and samples: curves agree to {difference_text(max(pairs))}"
    if any(arm.alike is None for arm in exact):
        return said
    alike = all(arm.alike for arm in exact)
    return f"{said}; different seeds: {'indistinguishable' if alike else 'not shown to be alike'}"


def rate_text(arm: SurveyArm) -> str:
    """What an arm suggests, with its spread.

    Args:
        arm: of a study.

    Returns:
        Such as ``0.0912 (± 0.08 decades)``; a dash where nothing is suggested.
    """
    if arm.rate is None:
        return "–"
    return f"{arm.rate:.3g}" + ("" if arm.decades is None else f" (± {arm.decades:.2f} decades)")


def failures(report: Surveys) -> list[str]:
    """Say where an arm that claims to be exact is not, beyond rounding: what ``--check`` looks at.

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
    stopped = sorted(run.survey.values[-1] for run in arm.runs if run.survey.stopped is not None)
    names = {"real": f"{arm.name} (real batch)", "inexact": f"{arm.name} (not exact)"}
    curve, rate = arm.curve, arm.suggested
    return (
        names.get(arm.claim, arm.name),
        rate_text(arm),
        f"{stopped[len(stopped) // 2]:.2g} ({len(stopped)} of {len(arm.runs)})" if stopped else "–",
        difference_text(max(arm.pairs)) if arm.pairs and math.isfinite(max(arm.pairs)) else "–",
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
            f"{difference_text(largest)}; rounding in {report.dtype} explains {report.tolerance:g}."
        )
    said = (
        f"{names} survey like the real batch: from the same weights and samples the curves agree to "
        f"{difference_text(largest)} (rounding in {report.dtype} explains {report.tolerance:g})"
    )
    tests = [
        (arm.curve, arm.suggested) for arm in arms if arm.curve is not None and arm.suggested is not None
    ]
    if len(tests) < len(arms):
        return f"{said}; at least 2 surveys per arm are needed for a test from different seeds."
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
        return f"{arm.name}: NOT told apart from the real batch, though it should be."
    failed = [
        name
        for name, test in (("the curve", arm.curve), ("the suggestion", arm.suggested))
        if test is not None and not test.equivalent
    ]
    return f"{arm.name}: told apart, as it should be, by {' and '.join(failed)}."


def _of_other(arm: SurveyArm) -> str:
    if arm.alike is None:
        return f"{arm.name}: not tested."
    how = (
        "not told apart from the real batch"
        if arm.alike
        else "told apart from the real batch, but not by far"
    )
    curve, rate = arm.curve, arm.suggested
    assert curve is not None
    assert rate is not None
    return f"{arm.name}: another batch, {how} (curve p {_p(curve.p_value)}, suggestion p {_p(rate.p_value)})."


def _needed(arms: Sequence[SurveyArm]) -> str:
    test = arms[0].suggested
    needed = None if test is None else test.runs_needed
    return "more" if needed is None else f"{max(needed, len(arms[0].runs) + 1)}"
