"""Ramp, smoothing, stop rule and suggestions of a survey, on curves with known answers."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from superbatch.errors import InputError
from superbatch.lab.report.json import to_json
from superbatch.results.survey import Survey
from superbatch.tuning.survey import Sweep, averaged, remarks
from superbatch.tuning.survey_curve import PATIENCE, Curve, exploded, smoothing
from superbatch.tuning.survey_ramp import exponential, from_axis, to_axis, values_of
from superbatch.tuning.survey_suggestions import FIRST, LAST, suggest
from tests.report_json import from_json

positive = st.floats(1e-8, 1e2)
losses_of = st.lists(st.floats(1e-3, 1e3), min_size=12, max_size=60)

# ----------------------------------------------------------------------------------------------------- ramp


@given(low=positive, factor=st.floats(1.5, 1e6), updates=st.integers(12, 300))
def test_the_ramp_is_even_on_a_logarithmic_axis(low: float, factor: float, updates: int) -> None:
    values = exponential(low, low * factor, updates)
    assert (len(values), values[0], values[-1]) == (updates, low, low * factor)
    step = math.log(factor) / (updates - 1)
    for a, b in pairwise(values):
        assert math.log(b / a) == pytest.approx(step, rel=1e-6, abs=1e-9)


@given(low=st.floats(0, 0.9), share=st.floats(0.01, 0.999), updates=st.integers(12, 100))
def test_one_minus_momentum_falls_evenly(low: float, share: float, updates: int) -> None:
    high = 1 - (1 - low) * (1 - share)
    values = values_of("momentum", low, high, updates)
    assert (values[0], values[-1]) == (low, high)
    ratio = math.log((1 - high) / (1 - low)) / (updates - 1)
    for a, b in pairwise(values):
        assert math.log((1 - b) / (1 - a)) == pytest.approx(ratio, rel=1e-5, abs=1e-8)


@given(m=st.floats(0, 0.9999))
def test_axis_round_trip(m: float) -> None:
    assert from_axis("momentum", to_axis("momentum", m)) == pytest.approx(m, abs=1e-9)


@pytest.mark.parametrize(
    ("low", "high", "updates", "message"),
    [
        (0.0, 1.0, 100, "not increasing positive numbers"),
        (1.0, 1.0, 100, "not increasing positive numbers"),
        (1e-3, math.inf, 100, "not increasing positive numbers"),
        (math.nan, 1.0, 100, "not increasing positive numbers"),
        (1e-3, 1.0, 11, r"an int of at least 12\. Pass at least 16"),
        (1e-3, 1.0, True, r"an int of at least 12\. Pass at least 16"),
    ],
)
def test_an_invalid_ramp_is_refused(low: float, high: float, updates: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        exponential(low, high, updates)


def test_an_invalid_momentum_is_refused() -> None:
    with pytest.raises(InputError, match="not increasing values of momentum"):
        values_of("momentum", 0.5, 1.0, 100)


# ------------------------------------------------------------------------------------------------ smoothing


@given(value=st.floats(0.1, 100), beta=st.floats(0, 0.99), points=st.integers(1, 50))
def test_a_constant_loss_is_unchanged(value: float, beta: float, points: int) -> None:
    """The bias of the first points is corrected; otherwise the first would be (1 - beta) times the loss."""
    curve = Curve(beta)
    assert [curve.add(value) for _ in range(points)] == [None] * points
    assert curve.smooth == pytest.approx([value] * points)


@given(losses=st.lists(st.floats(1.0, 2.0), min_size=1, max_size=40))
def test_smoothing_is_a_weighted_mean(losses: list[float]) -> None:
    beta, curve = 0.8, Curve(0.8)
    for loss in losses:
        curve.add(loss)
    weights = [beta ** (len(losses) - 1 - i) for i in range(len(losses))]
    expected = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
    assert curve.smooth[-1] == pytest.approx(expected)


def test_more_points_smooth_over_the_same_share_of_the_axis() -> None:
    assert smoothing(100) == 0.8
    assert smoothing(400) ** 4 == pytest.approx(0.8)


# ------------------------------------------------------------------------------------------------ stop rule


def stops_at(losses: list[float], beta: float = 0.8) -> int | None:
    curve = Curve(beta)
    return next((i for i, loss in enumerate(losses) if curve.add(loss) is not None), None)


def test_one_noisy_window_does_not_stop_the_survey() -> None:
    """Ten times the loss in one window would stop sconce, which reads the raw loss."""
    assert stops_at([1.0] * 20 + [10.0] + [1.0] * 20) is None
    assert stops_at([1.0] * 20 + [10.0], beta=0.0) == 20, (
        "the premise: the raw loss exceeds 4 times its minimum"
    )


def test_it_stops_when_the_smoothed_loss_is_beyond_four_times_its_best() -> None:
    losses = [1.0] * 20 + [7.0] * 20
    at = stops_at(losses)
    assert at is not None
    curve = Curve(0.8)
    reasons = [curve.add(loss) for loss in losses[: at + 1]]
    assert curve.smooth[-1] > 4 * min(curve.smooth) >= curve.smooth[-2]
    assert reasons[-1] is not None
    assert "more than 4 times its minimum" in reasons[-1]


def test_the_first_points_never_stop_the_survey() -> None:
    assert stops_at([1.0, *[100.0] * 10]) == PATIENCE


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_loss_stops_at_once_and_adds_no_point(loss: float) -> None:
    sweep = Sweep("lr", 1e-3, 1.0, 20)
    assert sweep.add(1.0)
    assert not sweep.add(loss)
    report = sweep.report()
    assert (len(report.values), len(report.smooth)) == (1, 1)
    assert report.stopped == f"the loss is {loss}"


@given(best=st.floats(-100, 100), smooth=st.floats(-100, 500))
def test_a_negative_loss_is_no_explosion(best: float, smooth: float) -> None:
    if best > 0:
        assert exploded(smooth, best) == (smooth - best > 3 * best)
    if smooth <= 0 and best <= smooth:
        assert not exploded(smooth, best)


def test_a_negative_log_likelihood_is_surveyed_to_the_end() -> None:
    """The rule "more than 4 times the minimum" alone would stop at the sixth point, as -0.9 > -4."""
    assert stops_at([-1 - 0.01 * i for i in range(30)] + [-0.9] * 10) is None


# ---------------------------------------------------------------------------------------------- suggestions

AXIS = [10 ** (t / 20 - 4) for t in range(100)]
"""Twenty points per decade, 1e-4 to 9e0."""


def vee(x: float, at: float) -> float:
    return abs(math.log10(x / at)) + 1


@pytest.mark.parametrize("at", [1e-2, 1e-1, 1.0])
def test_the_onset_of_an_even_descent_is_after_a_fifth(at: float) -> None:
    """log(loss) falls from the first used point to `at`; the onset is at a fifth of it, in decades."""
    found = suggest(AXIS, [math.exp(vee(x, at)) for x in AXIS])
    assert found.onset is not None
    assert found.minimum is not None
    fifth = AXIS[FIRST] * (at / AXIS[FIRST]) ** 0.2
    assert abs(math.log10(found.onset / fifth)) <= 0.12, "the smoothed curve turns before the edge"
    assert found.minimum == pytest.approx(at / 10, rel=0.13), "a point of the axis"
    assert found.onset_range is not None
    assert found.onset_range[0] <= found.onset <= found.onset_range[1]


def noisy_plateau(x: float, generator: random.Random) -> float:
    return math.exp(max(-1.0, -max(0.0, math.log10(x / 1e-2))) + 0.03 * generator.gauss(0, 1))


def test_a_noisy_plateau_is_not_in_the_descent() -> None:
    generator = random.Random(0)
    found = suggest(AXIS, [noisy_plateau(x, generator) if x < 1 else 9.0 for x in AXIS])
    assert found.onset is not None
    assert 10**-2 < found.onset < 10**-1.5


def test_the_steepest_point_of_a_sigmoid_is_its_middle() -> None:
    losses = [math.exp(1 / (1 + (x / 0.03) ** 2)) + (0 if x < 1 else 5 * x) for x in AXIS]
    found = suggest(AXIS, losses)
    assert found.steepest == pytest.approx(0.03, rel=0.13)


def test_on_the_linear_axis_the_steepest_point_is_elsewhere() -> None:
    """Lightning's rule, d loss / d lr, gives a rate ten times too small on the same curve."""
    losses = [2 - 0.3 * math.log10(x / 1e-4) if x < 1 else 3 * x for x in AXIS]
    linear = [(losses[i + 1] - losses[i - 1]) / (AXIS[i + 1] - AXIS[i - 1]) for i in range(1, 99)]
    wrong = AXIS[1 + linear.index(min(linear))]
    found = suggest(AXIS, losses)
    assert found.onset is not None
    assert found.onset / wrong > 10


def test_a_recovery_after_the_lowest_point_is_ignored() -> None:
    """The loss explodes and then falls long and steeply, as with dead ReLUs."""
    losses = [2 - 0.5 * t / 39 for t in range(40)] + [30 - 0.4 * t for t in range(60)]
    found = suggest(AXIS, losses)
    assert found.onset is not None
    assert found.steepest is not None
    assert max(found.onset, found.steepest) <= AXIS[39]


@pytest.mark.parametrize("height", [3.0, 30.0, 3000.0])
def test_the_height_of_an_explosion_does_not_count_as_noise(height: float) -> None:
    """Residuals of the explosion in the noise estimate would make the curve look flat."""
    generator = random.Random(1)
    losses = [noisy_plateau(x, generator) for x in AXIS if x < 1]
    losses += [height * (1 + generator.random()) for x in AXIS if x >= 1]
    found = suggest(AXIS, losses)
    assert found.reason is None
    assert found == suggest(AXIS, [min(loss, 3.0) for loss in losses])


FALLING = [math.exp(0.02 * random.Random(3).gauss(0, 1) - 0.01 * t) for t in range(60)]


@given(losses=losses_of, factor=st.floats(1e-3, 1e3))
@example(losses=FALLING, factor=1000.0)
def test_suggestions_do_not_depend_on_the_unit_of_the_loss(losses: list[float], factor: float) -> None:
    axis = AXIS[: len(losses)]
    one, other = suggest(axis, losses), suggest(axis, [factor * loss for loss in losses])
    assert (one.onset, one.minimum) == (other.onset, other.minimum)


@given(losses=losses_of, factor=st.floats(1e-3, 1e3))
@example(losses=FALLING, factor=10.0)
def test_suggestions_move_with_the_axis(losses: list[float], factor: float) -> None:
    axis = AXIS[: len(losses)]
    one, other = suggest(axis, losses), suggest([factor * x for x in axis], losses)
    assert (one.onset is None) == (other.onset is None)
    if one.onset is not None and other.onset is not None:
        assert other.onset == pytest.approx(factor * one.onset)


@given(losses=losses_of)
@example(losses=FALLING)
def test_suggestions_are_among_the_points(losses: list[float]) -> None:
    axis = AXIS[: len(losses)]
    found, kept = suggest(axis, losses), axis[FIRST : len(axis) - LAST]
    assert found.onset is None or found.onset in kept
    assert found.steepest is None or found.steepest in kept
    assert found.minimum is None or 10 * found.minimum in [pytest.approx(x) for x in kept]
    if found.onset is not None and found.minimum is not None:
        assert found.onset <= 10.001 * found.minimum, "the onset is not after the lowest point"


@given(losses=losses_of)
@example(losses=FALLING)
def test_first_and_last_points_do_not_count(losses: list[float]) -> None:
    axis = AXIS[: len(losses)]
    changed = [1e-9] * FIRST + losses[FIRST:-LAST] + [1e-9] * LAST
    assert suggest(axis, losses) == suggest(axis, changed)


def test_a_negative_log_likelihood_gives_suggestions() -> None:
    found = suggest(AXIS, [vee(x, 0.1) - 9 for x in AXIS])
    assert found.minimum == pytest.approx(0.01, rel=0.13)


def test_a_noisy_rule_has_a_range_and_no_value() -> None:
    sweep, generator = Sweep("lr", 1e-4, 10.0, 100), random.Random(2)
    for x in sweep.values:
        assert sweep.add(math.exp(-min(1.0, x / 3)) * generator.lognormvariate(0, 0.1))
    report = sweep.report()
    found = report.suggestions
    assert (found.onset, found.reason) == (None, None)
    assert found.onset_range is not None
    assert found.onset_range[1] / found.onset_range[0] > 2
    low, high = found.onset_range
    assert remarks(report)[-1] == (
        f"The loss begins to fall between {low:.2g} and {high:.2g}; noise hides the exact value. Use larger "
        "batches or more points, or average several surveys."
    )


def test_a_mean_needs_surveys_of_one_ramp() -> None:
    assert averaged([survey(), survey()]) == survey().suggestions
    with pytest.raises(InputError, match="The 0 surveys have 0 different ramps"):
        averaged([])
    with pytest.raises(InputError, match="The 2 surveys have 2 different ramps"):
        averaged([survey(), survey(high=1.0)])


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ([1.0] * 11, "11 points are too few"),
        ([1.0 + t for t in range(50)], "the loss never fell: start the survey at a lower value"),
        ([1.0] * 50, "the loss did not change: survey up to a higher value"),
    ],
)
def test_a_missing_suggestion_has_a_reason(losses: list[float], reason: str) -> None:
    found = suggest(AXIS[: len(losses)], losses)
    assert (found.onset, found.minimum, found.steepest) == (None, None, None)
    assert found.reason is not None
    assert found.reason.startswith(reason)


# ------------------------------------------------------------------------------------------------- a report


def survey(what: str = "lr", low: float = 1e-4, high: float = 10.0) -> Survey:
    sweep = Sweep(what, low, high, 60)  # pyright: ignore[reportArgumentType]  (one of What)
    for value in sweep.values:
        if not sweep.add(vee(to_axis(what, value), 0.1 if what == "lr" else 10.0)):  # pyright: ignore[reportArgumentType]
            break
    return sweep.report(ratios=(1.0, 0.1))


def test_a_report_survives_a_json_round_trip() -> None:
    report = survey()
    assert from_json(Survey, to_json(report)) == report
    assert report.suggestion is not None
    assert report.of_groups() == (report.suggestion, report.suggestion * 0.1)
    assert report.of_groups(1.0) == (1.0, 0.1)


def test_a_momentum_is_suggested_as_a_momentum() -> None:
    report = survey("momentum", 0.0, 0.999)
    found = report.suggestions
    assert found.onset is not None
    assert 0 < found.onset < 0.9
    assert found.minimum == pytest.approx(0.0, abs=0.25), "a tenth of the updates of 0.9"
    assert found.minimum is not None
    assert found.minimum_range is not None
    assert 0 <= found.minimum_range[0] <= found.minimum <= found.minimum_range[1] < 0.25


def test_the_report_says_the_next_step() -> None:
    assert remarks(survey()) == []
    falling = Sweep("lr", 1e-4, 1e-2, 50)
    assert all(falling.add(1 - value) for value in falling.values)
    assert remarks(falling.report(skipped=(0, 1))) == [
        "The loss still fell at the end of the ramp, at 0.01: survey up to a higher value.",
        "2 points made no update: the GradScaler was still lowering its scale.",
    ]
    rising = Sweep("lr", 1e-4, 1e-2, 50)
    assert all(rising.add(1 + value) for value in rising.values)
    assert remarks(rising.report()) == [
        "There is no suggestion: the loss never fell: start the survey at a lower value."
    ]


def test_the_report_gives_a_remedy_for_noise() -> None:
    flat = Sweep("lr", 1e-6, 10.0, 100)
    draw = random.Random(1)
    assert all(flat.add(2.3 + 0.1 * draw.gauss(0, 1)) for _ in flat.values)
    assert remarks(flat.report()) == [
        "There is no suggestion: the loss fell no further than noise alone can explain: use more "
        "points or larger batches, or average several surveys."
    ]


def test_a_constant_loss_gives_no_suggestion() -> None:
    """Rounding in the mean of ones is not a descent."""
    found = suggest([10.0**t for t in range(20)], [1 + 1e-16 * (t % 3) - 1e-15 * t for t in range(20)])
    assert found.onset is None
    assert found.reason == "the loss did not change: survey up to a higher value"
