"""Verdict of a comparison in sentences, and the criterion of `superbatch compare --check`."""

from __future__ import annotations

from collections.abc import Sequence

from .comparison import FEWEST_RUNS, Arm, Comparison
from .table import difference_text, margin_text


def verdict(report: Comparison) -> list[str]:
    """Return the verdict on each kind of arm in one sentence."""
    exact, inexact = _arms(report, "exact"), _arms(report, "inexact")
    sentences = [_exact(report, exact)] if exact else []
    if inexact:
        who = "Plain accumulation does" if exact else "The splits do"
        least, most = (difference_text(bound(map(_weight_difference, inexact))) for bound in (min, max))
        sentences.append(f"{who} not give the real batch's weights: they are {least} to {most} apart.")
    if wrong := _arms(report, "wrong"):
        least = difference_text(min(map(_weight_difference, wrong)))
        sentences.append(f"The weights of the methods that are wrong on purpose differ by {least} or more.")
    if not sentences:
        sentences.append("Interrupted before the first pair of runs was finished: there is no comparison.")
    return sentences


def failures(report: Comparison) -> list[str]:
    """Return a sentence for each difference of an arm that claims to be exact; empty if the check passes."""
    exact = [arm for arm in report.arms if arm.claim == "exact"]
    found = [sentence for arm in exact for sentence in _failures_of(arm, report)]
    if not exact:
        found.append(f"no arm of {report.recipe} claims to be exact: there is nothing to check")
    if report.partial:
        found.append("the comparison was interrupted")
    return found


def _failures_of(arm: Arm, report: Comparison) -> list[str]:
    found: list[str] = []
    difference = arm.weight_difference
    # `not <=` instead of `>`: a NaN must fail.
    if difference is None or not difference <= report.tolerance:
        found.append(
            f"{arm.name}: weights differ by {difference}, but rounding explains {report.tolerance:g}"
        )
    # Weights that agree to rounding are the proof, so that a test with too few runs is no failure.
    if arm.paired is not None and not abs(arm.paired.difference) < arm.paired.margin:
        text = f"{report.metric} differs by {arm.paired.difference:.3g}, which is not within"
        found.append(f"{arm.name}: {text} {margin_text(report)}")
    return found


def _exact(report: Comparison, arms: Sequence[Arm]) -> str:
    largest = max(map(_weight_difference, arms))
    rounding = f"{difference_text(largest)} (rounding in {report.dtype} explains up to {report.tolerance:g})"
    if not largest <= report.tolerance:
        return f"NOT EXACT: a split's weights differ from the real batch's by {rounding}."
    text = f"Every split trains like the real batch: weights within {rounding}"
    pairs = [arm.paired for arm in arms if arm.paired is not None]
    if pairs and all(test.identical for test in pairs):
        return f"{text}, {report.metric} identical."
    if not pairs or min(test.runs for test in pairs) < FEWEST_RUNS:
        return f"{text}; {report.metric} needs at least {FEWEST_RUNS} runs for a test of equivalence."
    shown = "equivalent" if all(test.equivalent for test in pairs) else "NOT shown to be equivalent"
    return f"{text}, {report.metric} {shown} within {margin_text(report)}."


def _arms(report: Comparison, claim: str) -> list[Arm]:
    return [arm for arm in report.arms if arm.claim == claim and arm.weight_difference is not None]


def _weight_difference(arm: Arm) -> float:
    assert arm.weight_difference is not None
    return arm.weight_difference
