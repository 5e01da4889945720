"""Surveys of splits: pairs agree up to rounding, equal arms are equivalent, wrong accumulation fails."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from superbatch import InputError
from superbatch.lab import plot
from superbatch.lab.report.json import to_json
from superbatch.lab.report.survey_text import conclusions, failures, suggestion, surveys_table
from superbatch.lab.report.surveys import SurveyArm, Surveys
from superbatch.lab.studies import survey as module
from superbatch.lab.studies.shared_options import Interrupted, Progress
from superbatch.lab.studies.survey import Options, survey
from superbatch.lab.studies.survey_tests import curve_test, paired_difference, suggestion_test
from superbatch.results.survey import Survey
from superbatch.tuning.survey import Sweep
from tests.report_json import from_json
from tests.studies import own_recipe

SMALL = Options(splits="4x5,13/5/2", repeats=3, updates=30, dtype="float64", high=3.0, low=1e-4)


def arm_of(report: Surveys, name: str) -> SurveyArm:
    return next(arm for arm in report.arms if arm.name == name)


# --------------------------------------------------------------------------------------------------- paired


@pytest.mark.parametrize(
    "recipe", [own_recipe.plane, own_recipe.plane_sum, own_recipe.plane_returned], ids=lambda r: r.__name__
)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.sampled(2)
def test_pairs_agree_to_rounding(recipe: Any, optimizer: str) -> None:
    """Losses are means, sums, or return weights; splits are equal and unequal."""
    report = survey(recipe(), replace(SMALL, optimizer=optimizer))
    assert [arm.name for arm in report.arms] == ["1x20", "1x20 again", "4x5", "13/5/2"]
    for arm in report.arms[2:]:
        assert len(arm.pairs) == 2
        assert max(arm.pairs) <= report.tolerance == 2e-14
        assert min(run.survey.smooth[-1] for run in arm.runs) != arm.runs[0].survey.smooth[0]
    assert failures(report) == []


def test_a_coupled_recipe_is_surveyed_exactly() -> None:
    recipe = own_recipe.crowd(coupled="exact", batchnorm="per_microbatch", batch_size=20)
    report = survey(recipe, replace(SMALL, repeats=1, updates=14))
    assert [arm.claim for arm in report.arms] == ["real", "again", "exact", "exact"]
    # The loss is a softmax of 5 times a cosine, so its rounding error is some units in the last place.
    assert max(pair for arm in report.arms for pair in arm.pairs) < 1e-12


def test_a_mean_of_means_fails_the_comparison_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs must detect equal weights of unequal micro-batches (split 13/5/2)."""
    right = module.accumulator_of

    def wrong(split: Any, recipe: Any, *rest: Any, **options: Any) -> Any:
        return right(split, replace(recipe, weight=lambda batch: 1.0), *rest, check=False)

    monkeypatch.setattr(module, "accumulator_of", wrong)
    report = survey(own_recipe.plane(), SMALL)
    assert max(arm_of(report, "4x5").pairs) <= report.tolerance, "the premise: equal micro-batches are right"
    assert min(arm_of(report, "13/5/2").pairs) > 1e-3
    assert failures(report)[0].startswith("13/5/2: paired curves differ by")
    assert conclusions(report)[0].startswith("NOT THE SAME: paired curves of 4x5 and 13/5/2 differ")


def test_a_pair_that_ends_early_has_infinite_difference() -> None:
    long, short = sweep([2.0, 1.0, 1.5] + [1.0] * 27), sweep([2.0])
    assert paired_difference(short, long) == math.inf
    assert paired_difference(long, short) == 0.0, "up to the lowest point of the real one"


# ------------------------------------------------------------------------------------------------- unpaired


def sweep(losses: Sequence[float]) -> Survey:
    made = Sweep("lr", 1e-4, 10.0, 30)
    for loss in losses:
        if not made.add(loss):
            break
    return made.report()


def bundle(
    seed: int, *, runs: int = 12, noise: float = 0.02, shift: float = 0.0, bump: Any = lambda x: 0.0
) -> list[Survey]:
    """Return curves with their minimum at 0.1 x 10^shift, with noise between curves."""
    generator = random.Random(seed)
    values = Sweep("lr", 1e-4, 10.0, 30).values
    return [
        sweep(
            [
                math.exp(0.3 * abs(math.log10(x / 0.1) - shift) + bump(x) + noise * generator.gauss(0, 1))
                for x in values
            ]
        )
        for _ in range(runs)
    ]


def test_curves_of_one_distribution_are_alike() -> None:
    test = curve_test(bundle(1), bundle(2))
    assert test is not None
    assert test.equivalent
    assert test.p_value < 0.01
    assert test.upto <= 2 / 3 * 0.12
    rate = suggestion_test(bundle(1, noise=0.01), bundle(2, noise=0.01))
    assert rate is not None
    assert rate.equivalent


def test_one_point_beyond_the_margin_fails() -> None:
    """An intersection-union test: 17 points within 10 % and one beyond."""
    values = Sweep("lr", 1e-4, 10.0, 30).values
    test = curve_test(bundle(1, bump=lambda x: math.log(1.15) if x == values[7] else 0.0), bundle(2))
    assert test is not None
    assert not test.equivalent
    assert test.at == values[7]
    assert test.ratio == pytest.approx(1.15, rel=0.03)


def test_points_after_the_lowest_one_do_not_count() -> None:
    test = curve_test(bundle(1, bump=lambda x: 1.0 if x > 0.08 else 0.0), bundle(2))
    assert test is not None
    assert test.equivalent


def test_curves_that_end_early_are_not_alike() -> None:
    short = [sweep(list(survey.losses[:6])) for survey in bundle(1)]
    test = curve_test(short, bundle(2))
    assert test is not None
    assert (test.equivalent, test.p_value) == (False, 1.0)


def test_noise_is_no_evidence_of_equality() -> None:
    """For three noisy curves a test for a difference finds none, but this test shows no equality."""
    test = curve_test(bundle(1, runs=3, noise=0.4), bundle(2, runs=3, noise=0.4))
    assert test is not None
    assert not test.equivalent


def test_shifted_suggestions_are_not_alike() -> None:
    rate = suggestion_test(bundle(1, noise=0.01, shift=0.9), bundle(2, noise=0.01))
    assert rate is not None
    assert not rate.equivalent
    assert rate.difference > 0.15


def test_no_verdict_without_testable_values() -> None:
    negative = [sweep([-1.0] * 30) for _ in range(3)]
    assert curve_test(negative, bundle(2)) is None, "a negative loss has no logarithm"
    rising = [sweep([1.0 + t for t in range(8)]) for _ in range(3)]
    assert suggestion_test(rising, bundle(2)) is None, "no suggestion"
    clear, noisy = bundle(1, noise=0.01), bundle(1, noise=0.3)
    assert all(each.suggestion is None for each in noisy), "the premise"
    assert suggestion_test(clear[:9] + noisy[:3], clear) is not None
    assert suggestion_test(clear[:8] + noisy[:4], clear) is None, "a third of the surveys suggests nothing"


@pytest.mark.slow
def test_the_whole_study_on_digits() -> None:
    """The table of docs/survey.md; about a minute."""
    report = survey("digits", Options(repeats=20, include_wrong=True))
    for arm in report.arms:
        if arm.claim in ("again", "exact"):
            assert arm.alike, arm.name
        if arm.claim == "wrong":
            assert arm.alike is False, arm.name


@pytest.fixture(scope="module")
def digits() -> Surveys:
    """The source's study at a smaller size: 6 surveys of 70 points."""
    return survey("digits", Options(splits="10x10", repeats=6, updates=70, low=1e-4, include_wrong=True))


def test_wrong_accumulation_is_detected(digits: Surveys) -> None:
    assert [(arm.name, arm.claim) for arm in digits.arms] == [
        ("1x100", "real"),
        ("1x100 again", "again"),
        ("10x10", "exact"),
        ("10x10 missing 1/K", "wrong"),
        ("1x10", "wrong"),
        ("1x50", "other"),
    ]
    assert max(arm_of(digits, "10x10").pairs) <= 1e-5
    for name in ("10x10 missing 1/K", "1x10"):
        arm = arm_of(digits, name)
        assert arm.alike is False, name
        assert arm.suggested is None or not arm.suggested.equivalent
    assert arm_of(digits, "10x10 missing 1/K").suggested is not None
    assert arm_of(digits, "1x10").rate is None, "batches of 10 are too noisy for a suggestion"
    curve = arm_of(digits, "10x10").curve
    assert curve is not None
    assert curve.equivalent
    missing, real = arm_of(digits, "10x10 missing 1/K").rate, digits.arms[0].rate
    assert missing is not None
    assert real is not None
    assert real / missing == pytest.approx(10, rel=0.4), "K times the gradient, a K-th of the rate"


def test_conclusions_of_the_report(digits: Surveys) -> None:
    said = conclusions(digits)
    assert said[0].startswith(
        "10x10 survey like the real batch: from the same weights and samples the curves"
    )
    assert "surveys from different seeds" in said[0]
    assert not any("though it is wrong" in text for text in said)
    assert said[-1].startswith("Coinciding curves are weak evidence.")
    assert suggestion(digits).startswith("Begin with a learning rate of about 0.")
    rows = surveys_table(digits).rows
    assert [row[0] for row in rows][:2] == ["1x100 (real batch)", "1x100 again"]
    assert all(len(row) == len(surveys_table(digits).columns) for row in rows)
    (missing,) = (row for row in rows if row[0] == "10x10 missing 1/K")
    assert missing[4].startswith("not shown, p") and missing[5].startswith("not shown, p")


def test_the_report_survives_json_and_is_plotted(digits: Surveys) -> None:
    assert from_json(Surveys, to_json(digits)) == digits
    for dark in (False, True):
        figure = plot.surveys(digits, dark=dark)
        legend = figure.axes[0].get_legend()
        assert legend is not None
        assert next(text.get_text() for text in legend.get_texts()) == "1x100 (real batch)"
    one = plot.one_survey(digits.arms[0].runs[0].survey, dark=True)
    assert one.axes[0].get_xscale() == "log"


# ------------------------------------------------------------------------------------------- other questions


class Spoilt(nn.Module):
    """A model whose loss is not finite from the first window on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * math.nan


def test_surveys_that_end_at_once_are_reported() -> None:
    recipe = own_recipe.plane()
    spoilt = replace(recipe, model=lambda seed: Spoilt(recipe.model(seed)))
    report = survey(spoilt, replace(SMALL, repeats=2, splits="4x5", include_wrong=True))
    assert all(run.survey.values == () for arm in report.arms for run in arm.runs), "the premise"
    assert [row[2] for row in surveys_table(report).rows] == [f"{report.low:.2g} (2 of 2)"] * len(report.arms)
    assert surveys_table(report).rows[2][3] == "∞ (one ended early)"
    assert suggestion(report).startswith("No learning rate is suggested: 0 points are too few")
    assert conclusions(report)[0].startswith("NOT THE SAME")
    assert failures(report)
    assert plot.surveys(report).axes
    assert plot.one_survey(report.arms[0].runs[0].survey).axes
    assert from_json(Surveys, to_json(report)) == report


def test_a_ramp_that_begins_too_high_gives_no_verdict() -> None:
    report = survey(own_recipe.plane(), replace(SMALL, splits="4x5", low=1e4, high=1e9))
    assert report.arms[2].suggested is None
    assert "different seeds were too few or too noisy for a test" in conclusions(report)[0]


def test_two_surveys_are_not_tested() -> None:
    report = survey(own_recipe.plane(), replace(SMALL, splits="4x5", repeats=2))
    assert [arm.alike for arm in report.arms] == [None] * 3
    assert "different seeds were too few or too noisy for a test" in conclusions(report)[0]


def test_too_few_surveys_are_not_attributed_to_the_splits(digits: Surveys) -> None:
    """The repeated survey of the real batch fails the test of the curve too."""
    found = survey(own_recipe.plane(), replace(SMALL, splits="4x5"))
    again, split = arm_of(found, "1x20 again"), arm_of(found, "4x5")
    assert again.curve is not None and split.curve is not None, "the premise"
    no, alike = (
        replace(again.curve, equivalent=False),
        suggestion_test(bundle(1, noise=0.01), bundle(2, noise=0.01)),
    )
    assert alike is not None, "the premise"
    arms = {each.claim: replace(each, curve=no, suggested=alike) for each in (again, split)}
    said = conclusions(replace(found, arms=tuple(arms.get(arm.claim, arm) for arm in found.arms)))
    assert "surveys from different seeds are NOT shown to be alike" in said[0]
    assert said[1].endswith("there are too few surveys for the tests. Give more --repeats.")
    right = arm_of(digits, "10x10")
    assert right.curve is not None and right.curve.equivalent, "the premise"
    wrong = replace(arm_of(digits, "10x10 missing 1/K"), curve=right.curve, suggested=alike)
    found = replace(digits, arms=(*digits.arms[:3], wrong))
    assert "10x10 missing 1/K: FOUND ALIKE, though it is wrong." in conclusions(found)


def test_a_fall_within_noise_is_reported() -> None:
    tiny = survey(own_recipe.plane(), replace(SMALL, splits="1x20", low=1e-9, high=1e-7, updates=60))
    assert "the loss fell no further than noise alone can explain" in suggestion(tiny)
    far = survey(own_recipe.plane(), replace(SMALL, splits="1x20", high=30.0, updates=60))
    assert "noise" not in suggestion(far)


@pytest.mark.parametrize(("what", "high"), [("momentum", 0.99), ("weight_decay", 1.0)])
def test_surveys_of_momentum_and_weight_decay(what: Any, high: float) -> None:
    options = replace(SMALL, what=what, low=None, high=high, repeats=2, splits="4x5", optimizer="sgd")
    report = survey(own_recipe.plane(), options)
    assert report.learning_rate == 0.05
    assert max(report.arms[2].pairs) <= report.tolerance
    assert len(report.arms[2].runs[0].survey.values) > 5
    said = suggestion(report)
    assert "Begin with" not in said, "at a fixed rate the loss falls by itself"
    name = what.replace("_", " ")
    (lowest,) = re.findall(rf"^The loss is lowest at a {name} of about ([\d.e-]+) for batches of 20", said)
    surveys = [run.survey for run in report.arms[0].runs]
    found = [survey.values[survey.smooth.index(min(survey.smooth))] for survey in surveys]
    assert float(lowest) in [pytest.approx(value, rel=0.05) for value in found]
    assert (
        plot.surveys(report)
        .axes[1]
        .get_xlabel()
        .startswith("updates averaged" if what == "momentum" else "weight decay")
    )


def test_a_ramp_that_ends_too_low_is_reported() -> None:
    low = survey(own_recipe.plane(), replace(SMALL, splits="1x20", high=0.03, updates=60))
    assert suggestion(low).endswith(
        "The loss still fell at the end of the ramp: survey up to a higher value."
    )
    far = survey(own_recipe.plane(), replace(SMALL, splits="1x20", high=30.0, updates=60))
    assert "still fell" not in suggestion(far)


def test_an_interrupted_study_keeps_the_finished_surveys() -> None:
    def interrupt(event: Progress) -> None:
        if event.finished is not None and event.finished[:2] == (1, "1x20"):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        survey(own_recipe.plane(), SMALL, progress=interrupt)
    report = caught.value.report
    assert report.partial
    assert [len(arm.runs) for arm in report.arms] == [2, 1, 1, 1]
    assert "interrupted" in failures(report)[-1]
    assert plot.surveys(report).axes
    assert surveys_table(report).title.startswith("plane: 2 of 3 surveys per arm")


def test_a_study_that_is_interrupted_at_once_gives_a_report() -> None:
    def interrupt(event: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        survey(own_recipe.plane(), SMALL, progress=interrupt)
    report = caught.value.report
    assert conclusions(report)[0] == "No split that claims to be exact was surveyed beside the real batch."
    assert suggestion(report) == "No learning rate is suggested: nothing has been surveyed."
    assert plot.surveys(report).axes
    assert from_json(Surveys, to_json(report)) == report


def test_progress_ends_at_100_percent() -> None:
    seen: list[Progress] = []
    survey(own_recipe.plane(), replace(SMALL, repeats=2, updates=15), progress=seen.append)
    assert [event.done for event in seen] == sorted(event.done for event in seen)
    assert seen[-1].done == seen[-1].total == 15 * (2 * 4 + 2 * 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 0}, "repeats=0"),
        ({"updates": 5}, r"an int of at least 12\. Pass at least 16"),
        ({"dtype": "float16"}, "dtype='float16' is not supported"),
        ({"learning_rate": -1.0}, "is not positive"),
        ({"optimizer": "lion"}, "does not offer it"),
        ({"batch_size": 7}, "which is of a batch of 20 samples"),
        ({"splits": None, "batch_size": 1000}, "has 240 training samples"),
        ({"low": 1.0, "high": 0.5}, "not increasing positive numbers"),
        ({"splits": "4x"}, "cannot be read"),
    ],
)
def test_invalid_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        survey(own_recipe.plane(), replace(SMALL, **changes))
