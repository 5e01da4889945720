"""Search for the largest size under a limit and for the fastest size."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superbatch.errors import InputError
from superbatch.tuning.search import (
    ENOUGH,
    MOST,
    corrected,
    fastest,
    fit_curve,
    halvings,
    next_trial,
    time_per_sample,
)

POINTS = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 10**12)), min_size=1, max_size=6)


@given(POINTS)
def test_a_curve_never_falls_and_is_no_lower_than_its_points(points: list[tuple[int, int]]):
    curve = fit_curve(points)
    values = [curve.at(samples) for samples in range(1, 6000, 7)]
    assert values == sorted(values)
    assert all(curve.at(samples) >= size for samples, size in points)


@given(POINTS, st.integers(0, 10**12), st.integers(1, 10_000))
def test_the_largest_size_fits_and_the_next_one_does_not(
    points: list[tuple[int, int]], limit: int, most: int
):
    curve = fit_curve(points)
    largest = curve.largest(limit, most)
    assert 0 <= largest <= most
    assert largest == 0 or curve.at(largest) <= limit
    assert largest == most or curve.at(largest + 1) > limit


def test_a_maximum_of_lines_is_overestimated_between_its_points():
    """A memory peak is the maximum of linear phases; between points the curve must not be below it."""

    def peak(n: int) -> int:
        return max(5000, 100 + 20 * n, 2000 + 15 * n)

    curve = fit_curve([(n, peak(n)) for n in (1, 100, 400, 1000)])
    assert all(curve.at(n) >= peak(n) for n in range(1, 1001))
    assert any(curve.at(n) > peak(n) for n in range(1, 1001)), "there would be as many measurements as sizes"
    assert curve.error > 0


@pytest.mark.parametrize(
    ("points", "match"), [([], "at least one point"), ([(0, 5)], "samples=0"), ([(1.5, 5)], "samples=1.5")]
)
def test_invalid_points_are_refused(points: list[tuple[int, int]], match: str):
    with pytest.raises(InputError, match=match):
        fit_curve(points)


@given(
    fixed=st.integers(0, 10**8),
    each=st.integers(100, 10**6),
    wrong=st.floats(0.95, 2.0),
    more=st.integers(0, 10**8),
    small=st.integers(1, 100),
)
def test_two_measurements_correct_slope_and_offset_of_a_prediction(
    fixed: int, each: int, wrong: float, more: int, small: int
):
    predicted = fit_curve([(n, fixed + each * n) for n in (1, 10, 4000)])

    def real(n: int) -> int:
        return int(wrong * each * n) + fixed + more

    curve = corrected(predicted, [(small, real(small)), (2 * small, real(2 * small))])
    assert curve.at(2 * small) == real(2 * small)
    for n in (3 * small, 20 * small, 10_000):
        assert abs(curve.at(n) - real(n)) <= 2 * n + 2  # extrapolated rounding of two measurements


def test_one_measurement_above_the_prediction_raises_the_rest_of_the_curve():
    predicted = fit_curve([(1, 1000), (100, 100_000)])
    curve = corrected(predicted, [(10, 15_000)])
    assert curve.at(100) >= 1.5 * predicted.at(100)
    below = corrected(predicted, [(10, 5000)])
    assert below.at(100) == 5000 + predicted.at(100) - predicted.at(10)  # beyond 10 it rises as predicted
    assert corrected(predicted, []) is predicted


def test_two_measurements_close_together_do_not_make_a_slope():
    """The difference between two close sizes is noise and gives no reliable slope."""
    predicted = fit_curve([(1, 1000), (100, 100_000)])
    curve = corrected(predicted, [(50, 50_100), (51, 50_000)])
    assert curve.at(100) == 50_100 + predicted.at(100) - predicted.at(51)


def test_halvings():
    assert halvings(1000) == [1, 2, 4, 8, 16, 32, 63, 125, 250, 500, 1000]
    assert halvings(5, smallest=8) == [5]
    assert halvings(1) == [1]


def times_of(sizes: list[int], truth: dict[int, float], noise: float, seed: int) -> dict[int, list[float]]:
    """Run a search to its end on a machine with occasional disturbances."""
    draw = random.Random(seed)
    timings: dict[int, list[float]] = {}
    for _ in range(100 * len(sizes)):
        size = next_trial(sizes, timings)
        if size is None:
            return timings
        first = size not in timings
        disturbance = 3.0 if draw.random() < 0.1 else 1 + noise * draw.random()
        timings.setdefault(size, []).append(truth[size] * (5.0 if first else disturbance))
    raise AssertionError("the search does not end")


CONVNET = {8: 1.60, 16: 1.29, 32: 1.0, 64: 0.87, 128: 0.81, 256: 1.0, 512: 1.05, 1024: 1.1}
TRANSFORMER = {1: 1.14, 4: 0.84, 16: 0.72, 32: 0.73, 64: 0.73, 256: 1.0, 512: 1.0}
FLAT = {8: 4.0, 16: 2.0, 32: 1.0, 64: 0.99, 128: 0.985, 256: 0.98}


@pytest.mark.parametrize(
    ("truth", "wanted"),
    [(CONVNET, {128}), (TRANSFORMER, {16, 32, 64}), (FLAT, {256})],
    ids=["u", "flat u", "gpu"],
)
@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
@pytest.mark.parametrize("seed", range(20))
def test_the_search_finds_the_fastest_size(truth: dict[int, float], wanted: set[int], order: int, seed: int):
    sizes = sorted(truth)[::order]
    timings = times_of(sizes, truth, 0.02, seed)
    assert fastest(timings) in wanted
    assert max(map(len, timings.values())) <= MOST + 1
    assert sum(map(len, timings.values())) <= (ENOUGH + 1) * len(sizes) + 4 * MOST


def test_a_search_stops_after_two_worse_sizes():
    timings = times_of(sorted(CONVNET), CONVNET, 0.0, 0)
    assert set(timings) == {8, 16, 32, 64, 128, 256, 512}


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=12, unique=True), st.integers(0, 2**32))
def test_a_search_always_ends(sizes: list[int], seed: int):
    draw = random.Random(seed)
    timings: dict[int, list[float]] = {}
    for _ in range((MOST + 1) * len(sizes) + 1):
        size = next_trial(sizes, timings)
        if size is None:
            break
        timings.setdefault(size, []).append(draw.random())
    assert next_trial(sizes, timings) is None
    assert fastest(timings) in sizes


def test_the_first_timing_of_a_size_does_not_count():
    assert time_per_sample([100.0, 1.0, 1.0]) == 1.0
    assert time_per_sample([100.0]) == 100.0


def test_no_timed_size_gives_no_fastest_size():
    with pytest.raises(InputError, match="no timing"):
        fastest({4: []})
