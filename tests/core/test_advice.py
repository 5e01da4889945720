"""Advice on accumulation: the closed form against a search, the verdict against its definition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superbatch.errors import InputError
from superbatch.lab.report.advice_text import (
    answer,
    caveats,
    memory_table,
    models_table,
    steps_table,
    tables,
    verdict_text,
)
from superbatch.lab.report.json import to_json
from superbatch.lab.report.table import plain
from superbatch.noise.meter import relative_time
from superbatch.results.advice import Advice
from superbatch.results.memory import Limit
from superbatch.results.noise import NoiseOfModel
from superbatch.tuning.advice import Times, advise, best_steps, judge
from superbatch.tuning.noise_range import NoiseRange
from superbatch.tuning.scaling import scale
from tests.report_json import from_json

ALONE = Times(microbatch=0.1, update=0.002)
CLUSTER = Times(microbatch=0.1, update=0.05, all_reduce=1.0)
positive = st.floats(1e-3, 1e3)


@given(noise=st.floats(1, 1e6), batch=st.integers(1, 4096), micro=positive, update=positive)
def test_the_best_number_of_steps_minimizes_the_time(
    noise: float, batch: int, micro: float, update: float
) -> None:
    best = best_steps(noise=noise, batch=batch, microbatch_seconds=micro, update_seconds=update)

    def time(k: float) -> float:
        return relative_time(
            k, noise=noise, microbatch_size=batch, microbatch_seconds=micro, update_seconds=update
        )

    grid = [best * 1.01**i for i in range(-400, 401)]
    assert min(grid, key=time) == pytest.approx(best, rel=0.02)
    assert time(best) <= min(map(time, grid)) * (1 + 1e-12)


def test_free_updates_never_pay() -> None:
    assert best_steps(noise=math.inf, batch=1, microbatch_seconds=0.1, update_seconds=0.0) == 0.0
    report = advise(
        microbatch_size=1, accumulation_steps=4, noise=10.0, times=Times(microbatch=1.0, update=0.0)
    )
    assert all(each.time is not None and each.time >= 1 for each in report.steps)
    assert report.verdict == "wasteful"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.1, 0.949, "helps"),
        (0.1, 0.951, "undetermined"),
        (1.051, 9.0, "wasteful"),
        (1.049, 9.0, "undetermined"),
        (0.99, 1.01, "undetermined"),
    ],
)
def test_the_verdict_holds_over_the_whole_range(low: float, high: float, verdict: str) -> None:
    assert judge(low, high) == verdict


@given(
    noise=st.floats(1, 1e5),
    spread=st.floats(1, 10),
    k=st.integers(2, 128),
    batch=st.integers(1, 1000),
    update=st.floats(0, 10),
)
def test_the_range_covers_every_possible_noise_scale(
    noise: float, spread: float, k: int, batch: int, update: float
) -> None:
    known = NoiseRange(noise, noise / spread, noise * spread)
    times = Times(microbatch=1.0, update=update)
    report = advise(microbatch_size=batch, accumulation_steps=k, noise=known, times=times)
    row = report.of_asked
    assert row.time is not None
    for factor in (1 / 3, 1.0, 3.0):
        for value in (known.low, noise, known.high):
            time = relative_time(
                k,
                noise=value * factor,
                microbatch_size=batch,
                microbatch_seconds=1.0,
                update_seconds=update,
            )
            assert row.low * (1 - 1e-12) <= time <= row.high * (1 + 1e-12)
    assert report.verdict == judge(row.low, row.high)
    assert report.best_low <= (report.best or 0.0) <= report.best_high


def test_the_verdicts_of_one_device_and_of_a_cluster() -> None:
    alone = advise(microbatch_size=32, accumulation_steps=16, noise=200.0, times=ALONE)
    cluster = advise(microbatch_size=4, accumulation_steps=16, ranks=8, noise=4000.0, times=CLUSTER)
    assert (alone.verdict, cluster.verdict) == ("wasteful", "helps")
    assert cluster.best == pytest.approx(math.sqrt(10.5 * 4000 / 32))
    assert "wasteful" in verdict_text(alone)
    assert "save less time than the additional samples" in alone.reason
    assert "10.5 times as long as a micro-batch" in cluster.reason


def test_ranks_add_samples_and_no_time() -> None:
    one = advise(microbatch_size=32, accumulation_steps=4, noise=500.0, times=CLUSTER)
    eight = advise(microbatch_size=4, ranks=8, accumulation_steps=4, noise=500.0, times=CLUSTER)
    assert one.steps == eight.steps


def test_no_noise_scale_gives_the_verdict_undetermined() -> None:
    report = advise(microbatch_size=32, accumulation_steps=16, noise=None, times=ALONE)
    assert report.verdict == "undetermined"
    assert "not determined" in report.reason
    assert report.best is None
    low = advise(
        microbatch_size=32, accumulation_steps=16, noise=NoiseRange(None, 1e6, math.inf), times=CLUSTER
    )
    assert low.verdict == "helps", "a lower end may suffice"


def test_an_unbounded_interval_is_never_wasteful() -> None:
    report = advise(
        microbatch_size=32, accumulation_steps=64, noise=NoiseRange(None, 1e-6, math.inf), times=ALONE
    )
    assert report.verdict == "undetermined"


def full() -> Advice:
    adamw = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1}
    report = advise(
        microbatch_size=32,
        accumulation_steps=16,
        noise=NoiseRange(200.0, 150.0, 300.0),
        times=ALONE,
        alternative=scale(adamw, optimizer="adamw", kappa=1 / 16),
        parameters=1_000_000,
        limit=Limit(10**9, "asked for"),
        peak=10**8,
        whole=9 * 10**8,
    )
    return replace(report, notes=("A note.",))


def test_the_text_contains_every_number_and_caveat() -> None:
    report = full()
    text = " ".join(
        "\n".join(
            [*map(plain, [*tables(report), memory_table(report)]), *answer(report), *caveats(report)]
        ).split()
    )
    for said in (
        "16 <",
        "beta2 0.95 0.996799",
        "weight_decay 0.1 0.025",
        "K* = 0.35 (between 0.177 and 0.75)",
        "3.81 MiB (4 bytes a parameter)",
        "a micro-batch of 32 95.4 MiB fits in 954 MiB (asked for)",
        "16 x 32 in one piece 858 MiB fits: the same update without accumulation",
        "does not apply in these cases: you reproduce hyper-parameters",
        "DP-SGD",
        "unless WholeBatch makes the updates",
        "a lower bound",
        "about 25 %",
        "In 9 of 12 end-to-end runs",
        "A note.",
    ):
        assert said in text, said
    small = replace(report, limit=Limit(10**7, "asked for"))
    assert "does not fit in" in plain(memory_table(small))
    assert caveats(small)[1] == "a micro-batch of 32: 95.4 MiB, does not fit in 9.54 MiB (asked for)."
    assert caveats(report)[1].startswith("16 x 32 in one piece: 858 MiB, fits: the same update without")
    assert "one piece" not in plain(memory_table(small))


def test_the_report_survives_a_json_round_trip() -> None:
    report = full()
    assert from_json(Advice, to_json(report)) == report
    unbounded = advise(microbatch_size=1, accumulation_steps=2, noise=None, times=ALONE)
    assert from_json(Advice, to_json(unbounded)) == unbounded


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accumulation_steps": 1}, "means no accumulation"),
        ({"microbatch_size": 0}, "microbatch_size=0"),
        ({"noise": -1.0}, "noise=-1.0"),
        ({"times": Times(microbatch=0.0, update=1.0)}, "microbatch=0.0 is not a time in seconds"),
        ({"times": Times(microbatch=1.0, update=math.nan)}, "update=nan is not a time in seconds"),
    ],
)
def test_impossible_numbers_are_refused(change: dict[str, object], message: str) -> None:
    arguments = {"microbatch_size": 8, "accumulation_steps": 4, "noise": 100.0, "times": ALONE} | change
    with pytest.raises(InputError, match=message):
        advise(**arguments)  # pyright: ignore[reportArgumentType]


def test_a_verdict_by_the_estimate_alone_would_be_overconfident() -> None:
    """A mutant that uses the estimate, not its range: "wasteful", although accumulation may help."""
    times = Times(microbatch=1.0, update=0.5)
    report = advise(microbatch_size=32, accumulation_steps=8, noise=300.0, times=times)
    point = report.of_asked.time
    assert point is not None and judge(point, point) == "wasteful"
    assert report.verdict == "undetermined"
    assert report.of_asked.low < 0.95


def of_models(*scales: float | None) -> tuple[NoiseOfModel, ...]:
    return tuple(
        NoiseOfModel(
            power=power,
            batch_size=scale,
            low=0.5 * (scale or 80.0),
            high=math.inf if scale is None else 2 * scale,
            signal=1.0,
            variance=scale or 1.0,
            windows=50,
        )
        for power, scale in enumerate(scales)
    )


def test_models_of_adam_widen_the_range_if_they_lie_outside() -> None:
    plain = NoiseRange(100.0, 80.0, 130.0)

    def ask(*scales: float | None) -> Advice:
        return advise(
            microbatch_size=32, accumulation_steps=8, noise=plain, times=ALONE, models=of_models(*scales)
        )

    alone, near, far = ask(), ask(100.0, 200.0, 350.0), ask(100.0, 300.0, 2600.0)
    assert alone.models == () and alone.band is None and alone.of_asked.band is None
    assert (near.of_asked.low, near.of_asked.high) == (alone.of_asked.low, alone.of_asked.high)
    assert near.band == (100.0, 350.0), "premise: within the factor of 3 beyond 130"
    assert far.band == (100.0, 2600.0)
    assert far.of_asked.low < near.of_asked.low and far.of_asked.high == near.of_asked.high
    assert far.of_asked.time == near.of_asked.time == alone.of_asked.time, "q = 0 is used"
    for report in (near, far):
        for each, time in zip(report.models, report.of_asked.by_model, strict=True):
            assert each.noise is not None and time is not None
            assert time == pytest.approx(
                relative_time(
                    8,
                    noise=each.noise,
                    microbatch_size=32,
                    microbatch_seconds=ALONE.microbatch,
                    update_seconds=ALONE.per_update,
                )
            )
            assert report.of_asked.low <= time <= report.of_asked.high, "never claims better than its models"
    assert far.models[2].best == pytest.approx(
        best_steps(noise=2600, batch=32, microbatch_seconds=ALONE.microbatch, update_seconds=ALONE.per_update)
    )
    (rows,) = [models_table(far).rows]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert rows[2][2].startswith("2600 (1300 to 5200)")
    assert "widened by a factor of 3, and Adam's models" in steps_table(far).columns[3].meaning
    assert from_json(Advice, to_json(far)) == far


def test_an_undetermined_model_is_reported_and_widens_nothing() -> None:
    known = NoiseRange(100.0, 80.0, 130.0)
    options = {"microbatch_size": 32, "accumulation_steps": 8, "noise": known, "times": ALONE}
    report = advise(**options, models=of_models(100.0, 200.0, None))  # pyright: ignore[reportArgumentType]
    assert report.of_asked.high == advise(**options).of_asked.high  # pyright: ignore[reportArgumentType]
    assert models_table(report).rows[2][2:] == ("not determined, at least 40", "–", "–")
    lone = advise(**options, models=of_models(100.0, None, None))  # pyright: ignore[reportArgumentType]
    assert lone.band is None
    assert [row[2][:14] for row in models_table(lone).rows[1:]] == ["not determined"] * 2
