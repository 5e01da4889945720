"""Windows, schedules and the divisor of the loss, on generated inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superbatch import normalize
from superbatch.batch.split import near_equal
from superbatch.errors import InputError
from superbatch.schedule import as_schedule, constant, piecewise, ramp
from superbatch.window import Window, windows

COUNTS = st.integers(0, 60)
STEPS = st.integers(1, 12)
WEIGHTS = st.one_of(
    st.integers(0, 10**6), st.floats(0, 1e6, allow_nan=False).filter(lambda w: w == 0 or w > 1e-6)
)

# -- windows ----------------------------------------------------------------------------------------------


@given(count=COUNTS, steps=STEPS)
def test_windows_hold_every_microbatch_once_and_in_order(count: int, steps: int) -> None:
    found = list(windows(iter(range(count)), steps))
    assert [item for window in found for item in window] == list(range(count))
    assert [len(window) for window in found[:-1]] == [steps] * (len(found) - 1)
    assert len(found) == -(-count // steps)
    if found:
        assert 1 <= len(found[-1]) <= steps


@given(count=COUNTS, steps=STEPS)
def test_dropping_the_tail_keeps_all_other_windows(count: int, steps: int) -> None:
    kept, dropped = list(windows(range(count), steps)), list(windows(range(count), steps, tail="drop"))
    assert [list(w) for w in dropped] == [list(w) for w in kept if len(w) == steps]
    assert len(dropped) == count // steps


@given(count=COUNTS, lengths=st.lists(STEPS, min_size=1, max_size=8), first=st.integers(0, 20))
def test_a_schedule_gives_the_length_of_each_window(count: int, lengths: list[int], first: int) -> None:
    def schedule(update: int) -> int:
        return lengths[update % len(lengths)]

    found = list(windows(range(count), schedule, first_update=first))
    assert sum(map(len, found)) == count
    expected = [schedule(first + index) for index in range(len(found))]
    assert [len(w) for w in found[:-1]] == expected[:-1]
    assert not found or len(found[-1]) <= expected[-1]


@given(steps=STEPS)
def test_windows_read_the_loader_lazily(steps: int) -> None:
    """Each window loads its micro-batches when it is requested."""
    read: list[int] = []

    def loader() -> Iterator[int]:
        for item in range(1000):
            read.append(item)
            yield item

    found = windows(loader(), steps)
    assert read == []
    next(found)
    next(found)
    assert read == list(range(2 * steps))


def test_windows_over_an_endless_loader() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 1

    found = windows(endless(), 3)
    assert [len(next(found)) for _ in range(4)] == [3] * 4


def test_a_window_cannot_be_changed() -> None:
    microbatches = [1, 2, 3]
    window = Window(microbatches)
    microbatches.append(4)
    assert list(window) == [1, 2, 3]
    with pytest.raises(TypeError):
        window[0] = 5  # type: ignore[index]  # pyright: ignore[reportIndexIssue]
    assert window[-1] == 3 and window[1:] == (2, 3) and 2 in window
    assert repr(window) == "Window of 3 micro-batches" and repr(Window([0])) == "Window of 1 micro-batch"


def test_an_empty_window_can_be_constructed() -> None:
    """The accumulator refuses it, on all ranks; an error in Window would leave the other ranks waiting."""
    assert len(Window([])) == 0 and repr(Window([])) == "Window of 0 micro-batches"


@pytest.mark.parametrize("steps", [0, -1, True, 2.0, "4", None])
def test_bad_accumulation_steps_are_refused_before_the_loader_is_read(steps: object) -> None:
    def loader() -> Iterator[int]:
        raise AssertionError("the loader was read")
        yield 0

    with pytest.raises(InputError, match="is not a positive int"):
        windows(loader(), steps)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("tail", ["keep", None, True])
def test_an_unknown_tail_is_refused(tail: object) -> None:
    with pytest.raises(InputError, match='tail="update" to train on the shorter last window'):
        windows([1], 1, tail=tail)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_a_loader_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(InputError, match="a loader of type int"):
        windows(5, 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("first", [-1, 1.0, True])
def test_a_bad_first_update_is_refused(first: object) -> None:
    with pytest.raises(InputError, match="first_update"):
        windows([1], 1, first_update=first)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_an_invalid_length_from_a_schedule_is_refused_with_its_update() -> None:
    found = windows(range(9), lambda update: 2 - update)
    assert [len(next(found)), len(next(found))] == [2, 1]
    with pytest.raises(InputError, match=r"accumulation_steps\(2\)=0"):
        next(found)


# -- schedules -------------------------------------------------------------------------------------------


@given(steps=STEPS, update=st.integers(0, 10**9))
def test_a_constant_is_constant(steps: int, update: int) -> None:
    assert constant(steps)(update) == as_schedule(steps)(update) == steps


@given(
    entries=st.dictionaries(st.integers(1, 1000), STEPS, max_size=6), first=STEPS, update=st.integers(0, 1200)
)
def test_piecewise_takes_the_last_entry_that_has_begun(
    entries: dict[int, int], first: int, update: int
) -> None:
    entries = {0: first, **entries}
    assert piecewise(entries)(update) == entries[max(start for start in entries if start <= update)]


@pytest.mark.parametrize("entries", [{}, {1: 2}, {-1: 2, 0: 1}, {0: 0}, {0: 1.5}, {0.0: 1}])
def test_a_piecewise_schedule_with_a_hole_or_no_counts_is_refused(entries: dict[int, int]) -> None:
    with pytest.raises(InputError):
        piecewise(entries)


@given(start=STEPS, stop=STEPS, updates=st.integers(1, 50))
def test_a_ramp_runs_between_its_ends(start: int, stop: int, updates: int) -> None:
    schedule = ramp(start, stop, updates)
    values = [schedule(update) for update in range(updates + 5)]
    assert values[0] == start and values[updates:] == [stop] * 5
    assert values == sorted(values, reverse=stop < start)
    for update, value in enumerate(values[:updates]):
        assert abs(value - (start + (stop - start) * update / updates)) <= 0.5 + 1e-9


@given(
    schedule=st.sampled_from([constant(3), piecewise({0: 2, 4: 5}), ramp(1, 9, 6)]), stop=st.integers(0, 9)
)
def test_a_schedule_resumes_at_any_update(schedule: object, stop: int) -> None:
    loader = list(range(200))
    whole = list(windows(loader, schedule))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    read = sum(len(window) for window in whole[:stop])
    rest = list(windows(loader[read:], schedule, first_update=stop))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert [list(w) for w in rest] == [list(w) for w in whole[stop:]]


# -- the divisor ------------------------------------------------------------------------------------------


@given(weights=st.lists(WEIGHTS, min_size=1, max_size=20).filter(any))
def test_the_scales_of_a_mean_add_up_to_one(weights: list[float]) -> None:
    total = normalize.total_weight(weights)
    scales = [normalize.scale(weight, total, reduction="mean") for weight in weights]
    assert math.fsum(scales) == pytest.approx(1.0, rel=1e-14)
    assert all((scale == 0) == (weight == 0) for scale, weight in zip(scales, weights, strict=True))


@given(weights=st.lists(st.integers(1, 10**6), min_size=1, max_size=20), ranks=st.integers(1, 8))
def test_each_scale_is_rounded_once(weights: list[int], ranks: int) -> None:
    total = normalize.total_weight(weights)
    assert total == sum(weights) and isinstance(total, int)
    for weight in weights:
        mean = normalize.scale(weight, total, reduction="mean", ranks=ranks)
        assert mean == float(Fraction(ranks * weight, total))
        assert normalize.scale(weight, total, reduction="sum", ranks=ranks) == float(Fraction(ranks, total))


@given(weights=st.lists(st.floats(0, 1e6), max_size=30))
def test_the_total_of_floats_is_rounded_once(weights: list[float]) -> None:
    assert normalize.total_weight(weights) == float(sum(map(Fraction, weights)))


def test_the_total_of_many_ints_is_exact_where_float64_would_stop_counting() -> None:
    assert normalize.total_weight([2**53, 1, 1]) == 2**53 + 2 != float(2**53) + 1.0 + 1.0


@given(
    samples=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40),
    size=st.integers(1, 40),
)
def test_the_loss_of_the_micro_batches_is_the_loss_of_the_batch(samples: list[float], size: int) -> None:
    counts = near_equal(len(samples), size)
    parts, start = [], 0
    for count in counts:
        parts.append(samples[start : start + count])
        start += count
    mean = math.fsum(samples) / len(samples)
    means = [math.fsum(part) / len(part) for part in parts]
    close = pytest.approx(mean, rel=1e-12, abs=1e-10)
    assert normalize.mean_loss(means, counts, reduction="mean") == close
    assert normalize.mean_loss(map(math.fsum, parts), counts, reduction="sum") == close


def test_a_microbatch_without_weight_adds_nothing_and_no_nan_to_a_mean() -> None:
    with_it = normalize.mean_loss([2.0, math.nan, 4.0], [3, 0, 1], reduction="mean")
    assert with_it == normalize.mean_loss([2.0, 4.0], [3, 1], reduction="mean")
    assert math.isnan(normalize.mean_loss([math.nan], [0], reduction="mean"))


def test_a_microbatch_without_weight_adds_its_sum() -> None:
    assert normalize.mean_loss([2.0, 6.0, 4.0], [3, 0, 1], reduction="sum") == 3.0
    assert math.isnan(normalize.mean_loss([2.0, math.nan, 4.0], [3, 0, 1], reduction="sum"))


def test_a_sum_of_huge_losses_is_infinite_without_an_error() -> None:
    huge = [1.2e308, 1.2e308]
    with pytest.raises(OverflowError):
        math.fsum(huge)  # the premise
    assert normalize.loss_sum(huge, [1, 1], reduction="sum") == math.inf
    assert normalize.loss_sum([-each for each in huge], [1, 1], reduction="total") == -math.inf
    assert normalize.mean_loss(huge, [8, 8], reduction="mean") == math.inf
    assert normalize.loss_sum([*huge, -1e308], [1, 1, 1], reduction="sum") == pytest.approx(1.4e308)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.data())
def test_the_divisor_undoes_a_planned_weight(weights: list[int], data: st.DataObject) -> None:
    """Scaling by the planned weight and then dividing gives the scale without the micro-batches left out."""
    kept = data.draw(st.lists(st.booleans(), min_size=len(weights), max_size=len(weights)).filter(any))
    planned = normalize.total_weight(weights)
    counted = normalize.total_weight([w for w, keep in zip(weights, kept, strict=True) if keep])
    divisor = normalize.divisor(planned, counted)
    for weight, keep in zip(weights, kept, strict=True):
        if keep:
            scaled = normalize.scale(weight, planned, reduction="mean") / divisor
            assert scaled == pytest.approx(normalize.scale(weight, counted, reduction="mean"), rel=1e-15)


@pytest.mark.parametrize("weight", [-1, -0.5, math.nan, math.inf, True, "3", None, 1j])
def test_an_invalid_weight_is_refused(weight: object) -> None:
    with pytest.raises(InputError, match="of micro-batch 7"):
        normalize.check_weight(weight, "micro-batch 7")


@given(WEIGHTS)
def test_a_weight_keeps_its_type(weight: float) -> None:
    class Scalar:
        def item(self) -> float:
            return weight

    assert normalize.check_weight(weight, "") == normalize.check_weight(Scalar(), "") == weight
    assert type(normalize.check_weight(Scalar(), "")) is type(weight)


@pytest.mark.parametrize("reduction", ["average", "none", None, 1])
def test_another_reduction_is_refused(reduction: str) -> None:
    with pytest.raises(InputError, match=r'"mean".*"sum"'):
        normalize.check_reduction(reduction)
