"""Verdict of a comparison, in sentences: for the reader, and for a CI that must fail."""

from __future__ import annotations

from collections.abc import Sequence

from .comparison import FEWEST_RUNS, Arm, Comparison
from .table import difference_text, margin_text


def verdict(report: Comparison) -> list[str]:
    """Return the verdict of a comparison in words; the table has each arm."""
    exact, inexact = _arms(report, "exact"), _arms(report, "inexact")
    sentences = [_exact(report, exact)] if exact else []
    if inexact:
        who = "Plain accumulation does" if exact else "The splits do"
        least, most = (difference_text(bound(map(_apart, inexact))) for bound in (min, max))
        sentences.append(f"{who} not give the real batch's weights: they are {least} to {most} apart.")
    if wrong := _arms(report, "wrong"):
        least = difference_text(min(map(_apart, wrong)))
        sentences.append(f"Ways that are wrong on purpose end {least} or more from the real batch's weights.")
    if not sentences:
        sentences.append("Interrupted before the first pair of runs was finished: nothing has been compared.")
    return sentences


def failures(report: Comparison) -> list[str]:
    """List the arms that claim to be exact and are not: the criterion of ``superbatch compare --check``."""
    exact = [arm for arm in report.arms if arm.claim == "exact"]
    found = [sentence for arm in exact for sentence in _failures_of(arm, report)]
    if not exact:
        found.append(f"no arm of {report.recipe} claims to be exact: there is nothing to check")
    if report.partial:
        found.append("the comparison was interrupted")
    return found


def _failures_of(arm: Arm, report: Comparison) -> list[str]:
    found: list[str] = []
    apart = arm.weight_difference
    # `not <=` instead of `>`: a NaN must fail.
    if apart is None or not apart <= report.tolerance:
        found.append(f"{arm.name}: weights differ by {apart}, rounding explains {report.tolerance:g}")
    # Weights that agree to rounding are the proof: few runs or a coarse metric take nothing from it.
    if arm.paired is not None and not abs(arm.paired.difference) < arm.paired.margin:
        apart_by = f"{report.metric} differs by {arm.paired.difference:.3g}"
        found.append(f"{arm.name}: {apart_by}, which is not within {margin_text(report)}")
    return found


def _exact(report: Comparison, arms: Sequence[Arm]) -> str:
    largest = max(map(_apart, arms))
    rounding = f"{difference_text(largest)} (rounding in {report.dtype} explains up to {report.tolerance:g})"
    if not largest <= report.tolerance:
        return f"NOT EXACT: a split's weights differ from the real batch's by {rounding}."
    said = f"Every split trains like the real batch: weights within {rounding}"
    pairs = [arm.paired for arm in arms if arm.paired is not None]
    if pairs and all(test.identical for test in pairs):
        return f"{said}, {report.metric} identical."
    if not pairs or min(test.runs for test in pairs) < FEWEST_RUNS:
        return f"{said}; {report.metric} needs at least {FEWEST_RUNS} runs for a test of equivalence."
    shown = "equivalent" if all(test.equivalent for test in pairs) else "NOT shown to be equivalent"
    return f"{said}, {report.metric} {shown} within {margin_text(report)}."


def _arms(report: Comparison, claim: str) -> list[Arm]:
    return [arm for arm in report.arms if arm.claim == claim and arm.weight_difference is not None]


def _apart(arm: Arm) -> float:
    assert arm.weight_difference is not None
    return arm.weight_difference
