"""Growing batches: each update has the scheduled temperature, and the loss is that of a decaying rate."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superbatch import windows
from superbatch.errors import InputError
from superbatch.results.noise import Noise
from superbatch.tuning.growing import GrowingBatch, grow_batch, grown_batches


def cosine(total: float):
    return lambda seen: 0.5 * (1 + math.cos(math.pi * min(seen / total, 1.0)))


def staircase(every: float, by: float):
    return lambda seen: by ** (seen // every)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[GrowingBatch, Any, int]:
    microbatch = draw(st.integers(1, 16))
    batch = microbatch * draw(st.integers(1, 8)) + draw(st.integers(0, microbatch - 1))
    dataset = batch * draw(st.integers(10, 60)) + draw(st.integers(0, 50))
    factor = draw(
        st.sampled_from(
            [cosine(2.5 * dataset), staircase(dataset, 0.3), lambda seen: 1 / (1 + seen / dataset)]
        )
    )
    form: Any = draw(st.sampled_from(["approximate", "exact"]))
    made = grow_batch(
        factor,
        batch=batch,
        microbatch=microbatch,
        dataset=dataset,
        form=form,
        temperature=draw(st.sampled_from(["sgd", "adam"])),
        largest=draw(st.one_of(st.none(), st.integers(1, dataset))),
        noise=draw(st.one_of(st.none(), st.floats(1, dataset))),
    )
    return made, factor, dataset


@given(schedules())
def test_every_update_has_the_scheduled_temperature(made: tuple[GrowingBatch, Any, int]) -> None:
    schedule, factor, dataset = made
    cap = max(schedule.cap.samples, schedule.batch, schedule.microbatch)
    for update in range(schedule.updates(3 * dataset)):
        asked = factor(schedule.samples(update))
        assert schedule.temperature(update) == pytest.approx(asked, rel=1e-9, abs=1e-12)
        assert schedule.batch_of(update) <= cap + 1e-9
        assert schedule.rate(update) <= 1.34 * schedule.microbatch / min(schedule.microbatch, schedule.batch)


@given(schedules())
def test_the_schedule_counts_samples_of_real_windows(made: tuple[GrowingBatch, Any, int]) -> None:
    """Each window over a loader whose epochs have tails is as long as the schedule predicts."""
    schedule, _, dataset = made
    update = seen = 0
    for _ in range(2):
        data = [
            range(start, min(start + schedule.microbatch, dataset))
            for start in range(0, dataset, schedule.microbatch)
        ]
        for window in windows(data, schedule, first_update=update):
            assert schedule.samples(update) == seen
            assert schedule.batch_of(update) == sum(map(len, window))
            seen, update = seen + sum(map(len, window)), update + 1
    assert schedule.updates(seen) == update


def test_without_absorbed_rounding_the_temperature_would_be_off() -> None:
    """A mutant keeps the rate at 1: rounding to micro-batches shifts the temperature by up to a third."""
    schedule = grow_batch(cosine(10_000), batch=96, microbatch=64, largest=960)
    asked = [cosine(10_000)(schedule.samples(update)) for update in range(schedule.updates(9000))]
    naive = [schedule.batch / schedule.batch_of(update) for update in range(len(asked))]
    assert max(abs(b / a - 1) for a, b in zip(asked, naive, strict=True)) > 0.2
    exact = [schedule.temperature(update) for update in range(len(asked))]
    assert max(abs(b / a - 1) for a, b in zip(asked, exact, strict=True)) < 1e-12


def test_exact_and_approximate_formula_of_the_paper() -> None:
    """f = 0.008, N = 50 000, B = 512: exactly 28 197 samples; approximately 64 000, more than N."""

    def factor(seen: float) -> float:
        return 0.008 if seen else 1.0

    free = grow_batch(factor, batch=512, microbatch=1)
    assert free(1) == 64_000
    exact = grow_batch(factor, batch=512, microbatch=1, dataset=50_000, form="exact")
    assert exact(1) == 28_197
    capped = grow_batch(factor, batch=512, microbatch=1, dataset=50_000)
    assert (capped(1), capped.cap.by) == (5000, "a tenth of the 50000 samples")
    assert capped.rate(1) == pytest.approx(0.008 * 5000 / 512), "beyond the cap the rate decays"


def run(schedule: GrowingBatch | None, factor: Any, *, batch: int, samples: int, adam: bool = False) -> Any:
    """Return the losses at the ends of three phases and the number of updates, by exact second moments.

    SGD (rate 0.1 at first) on curvatures 1, 0.3 and 0.1, noise of variance 1 / batch.
    """
    curvatures, moments = (1.0, 0.3, 0.1), [4.0, 4.0, 4.0]
    seen, update, ends = 0, 0, list[float]()
    while seen < samples:
        size = batch if schedule is None else schedule.batch_of(update)
        lr = 0.1 * (factor(seen) if schedule is None else schedule.rate(update))
        moments = [
            (1 - lr * h) ** 2 * m + lr * lr * 9 / size for h, m in zip(curvatures, moments, strict=True)
        ]
        seen, update = seen + size, update + 1
        if seen >= samples / 3 * (len(ends) + 1):
            ends.append(sum(h * m / 2 for h, m in zip(curvatures, moments, strict=True)))
    return ends, update


@pytest.mark.parametrize("momentum", [None, (0.0, 0.0)])
def test_phases_reach_the_loss_of_the_decayed_rate_in_fewer_updates(momentum: Any) -> None:
    factor = staircase(20_000, 0.2)
    schedule = grow_batch(factor, batch=8, microbatch=8, momentum=momentum)
    decayed, many = run(None, factor, batch=8, samples=60_000)
    grown, few = run(schedule, factor, batch=8, samples=60_000)
    assert decayed[0] > 2 * decayed[1] > 4 * decayed[2], "premise: each phase lowers the noise"
    for ours, theirs in zip(grown, decayed, strict=True):
        assert ours == pytest.approx(theirs, rel=0.08)
    assert few == pytest.approx(many * (1 + 0.2 + 0.04) / 3, rel=0.01)


def test_a_constant_batch_ends_at_a_higher_loss() -> None:
    """A mutant that changes neither rate nor batch."""
    factor = staircase(20_000, 0.2)
    decayed, _ = run(None, factor, batch=8, samples=60_000)
    still, _ = run(None, lambda seen: 1.0, batch=8, samples=60_000)
    assert still[2] > 3 * decayed[2]


def test_adam_cools_by_the_square_root() -> None:
    schedule = grow_batch(staircase(6400, 0.5), batch=64, microbatch=32, temperature="adam")
    assert [schedule(update) for update in (0, 99, 100, 125)] == [2, 2, 8, 32]
    assert {schedule.rate(update) for update in range(120)} == {1.0}
    assert schedule.beta2(0.999, 100) == 0.999**4


def test_the_batch_compensates_for_a_change_of_momentum() -> None:
    schedule = grow_batch(cosine(1e6), batch=64, microbatch=64, dataset=100_000, momentum=(0.9, 0.98))
    assert (schedule(0), schedule.momentum, schedule.batch) == (5, 0.98, pytest.approx(320))
    assert any("averages over 0.16 epochs" in each for each in schedule.limits)


def test_a_warmup_is_left_to_the_rate() -> None:
    def factor(seen: float) -> float:
        return min(1.0, 0.1 + seen / 1000) * (0.5 if seen >= 2000 else 1.0)

    schedule = grow_batch(factor, batch=100, microbatch=50, decay_from=1000)
    assert [schedule(update) for update in (0, 5, 10, 20)] == [2, 2, 2, 4]
    assert [round(schedule.rate(update), 3) for update in (0, 5, 10, 20)] == [0.1, 0.6, 1.0, 1.0]


def noise(high: float) -> Noise:
    return Noise(
        batch_size=300.0 if high < math.inf else None,
        low=100.0,
        high=high,
        signal=1.0,
        variance=300.0,
        windows=50,
        effective_windows=50.0,
        samples_per_window=64.0,
        groups=(),
        reason=None if high < math.inf else "signal not distinguishable from noise",
    )


def test_a_finite_upper_end_of_the_noise_scale_is_a_cap() -> None:
    grown = grow_batch(staircase(640, 0.5), batch=64, microbatch=32, noise=noise(480.0))
    assert max(grown(update) for update in range(100)) == 15
    assert grown.cap.by == "the upper end of the noise scale"
    free = grow_batch(staircase(640, 0.5), batch=64, microbatch=32, noise=noise(math.inf))
    assert free.cap.samples == math.inf


def test_a_cap_below_the_batch_keeps_it() -> None:
    schedule = grow_batch(staircase(640, 0.5), batch=64, microbatch=32, largest=16)
    assert {schedule(update) for update in range(50)} == {2}
    assert schedule.rate(10) == 0.5


def test_batches_for_a_loader_of_samples() -> None:
    schedule = grow_batch(staircase(16, 0.5), batch=4, microbatch=2, dataset=50, largest=20)
    made = list(grown_batches(range(50), schedule))
    assert [index for each in made for index in each] == list(range(50))
    assert [len(each) for each in made] == [schedule.batch_of(update) for update in range(len(made))]
    second = list(grown_batches(range(50), schedule, first_update=len(made)))
    assert [len(each) for each in second] == [
        schedule.batch_of(len(made) + update) for update in range(len(second))
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch=0"),
        ({"microbatch": 65}, "batch=64 is smaller than microbatch=65"),
        ({"form": "exact"}, "the first batch of 64 samples, not None"),
        ({"form": "exact", "dataset": 64}, "the first batch of 64 samples, not 64"),
        ({"form": "other"}, "form='other'"),
        ({"decay_from": -1.0}, "decay_from"),
        ({"momentum": (0.9, 1.0)}, "momentum"),
        ({"factor": lambda seen: -1.0}, "-1.0 at sample 0"),
        ({"factor": lambda seen: 0.0}, "is 0.0 at sample 0, where the decay begins"),
        ({"factor": lambda seen: math.nan}, "nan at sample 0"),
    ],
)
def test_impossible_growth_is_an_error(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"factor": cosine(1000), "batch": 64, "microbatch": 32} | change
    with pytest.raises(InputError, match=message):
        grow_batch(arguments.pop("factor"), **arguments)


def test_a_rate_of_zero_needs_a_cap() -> None:
    schedule = grow_batch(lambda seen: float(seen < 640), batch=64, microbatch=64)
    with pytest.raises(InputError, match="the batch would be infinite"):
        schedule(20)
    capped = grow_batch(lambda seen: float(seen < 640), batch=64, microbatch=64, largest=256)
    assert (capped(20), capped.rate(20)) == (4, 0.0)
