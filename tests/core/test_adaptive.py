"""Norm and cosine tests, the batch controller and AdaScale, on simulated gradients of known noise scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from superbatch import windows
from superbatch.errors import InputError
from superbatch.noise.meter import NoiseMeter, estimate
from superbatch.results.noise import Noise
from superbatch.tuning.adaptive import (
    Controller,
    cosine_test,
    expected_cosine,
    naive_ratio,
    norm_test,
    ratio_at_cosine,
)
from superbatch.tuning.adascale import AdaScale
from superbatch.tuning.scaling import gain


def noise(batch_size: float | None, *, samples: float = 100.0) -> Noise:
    known = batch_size is not None
    return Noise(
        batch_size=batch_size,
        low=0.8 * batch_size if known else 40.0,
        high=1.3 * batch_size if known else math.inf,
        signal=1.0,
        variance=batch_size or 0.0,
        windows=50,
        effective_windows=50.0,
        samples_per_window=samples,
        groups=(),
        reason=None if known else "signal not distinguishable from noise",
    )


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


@pytest.mark.parametrize("ratio", [0.1, 1.0, 4.0])
def test_the_cosine_of_two_halves_has_the_expected_mean(ratio: float) -> None:
    """Expected: .833, .333 and .111; in d dimensions the mean is lower by a relative O(1/d)."""
    random, d, runs = np.random.default_rng(1), 4000, 400
    signal = np.zeros(d)
    signal[0] = 1.0
    # tr Cov is `ratio` for the batch, and twice that for half a batch.
    halves = signal + random.normal(0, math.sqrt(2 * ratio / d), (2, runs, d))
    cosines = (
        (halves[0] * halves[1]).sum(1) / np.linalg.norm(halves[0], axis=1) / np.linalg.norm(halves[1], axis=1)
    )
    mean, error = mean_and_error(cosines)
    assert abs(mean - expected_cosine(ratio)) < 4 * error + 4 / d
    assert abs(mean - 1 / (1 + ratio)) > 10 * error, "the mutant: each half has the noise of the batch"


@given(st.floats(1e-3, 1e3))
def test_cosine_test_and_norm_test_are_equivalent(ratio: float) -> None:
    assert ratio_at_cosine(expected_cosine(ratio)) == pytest.approx(ratio, rel=1e-9)
    cosine = expected_cosine(ratio)
    tested = cosine_test(noise(1000.0), cosine=cosine)
    assert tested.batch == pytest.approx(2 * 1000.0 * cosine / (1 - cosine), rel=1e-9)
    assert tested.passed == norm_test(noise(1000.0), target=ratio_at_cosine(cosine)).passed


def test_the_naive_norm_test_passes_whatever_the_noise() -> None:
    """Noise 7.3 times the signal, K = 2, theta = 1: the naive test passes, the unbiased test fails."""
    random, d, ratio = np.random.default_rng(2), 1000, 7.3
    signal = np.zeros(d)
    signal[0] = 1.0
    micro = signal + random.normal(0, math.sqrt(2 * ratio / d), (4000, 2, d))
    batch = micro.mean(1)
    a2, b2 = (micro**2).sum((1, 2)) / 4, (batch**2).sum(1)
    parts = [estimate(a, b, 0.5) for a, b in zip(a2, b2, strict=True)]
    variance, signals = (np.array([part[i] for part in parts]) for i in (1, 0))
    naive = variance.mean() / b2.mean()
    assert naive == pytest.approx(naive_ratio(ratio), abs=0.01)
    assert naive < 1, "the naive test passes"
    mean, error = mean_and_error(signals)
    assert abs(mean - 1) < 4 * error
    assert variance.mean() / mean == pytest.approx(ratio, rel=4 * error / mean + 0.02)
    assert not norm_test(noise(ratio * 100.0)).passed


def test_an_undetermined_noise_scale_gives_no_verdict() -> None:
    assert norm_test(noise(None)).passed is None
    assert cosine_test(noise(None), cosine=0.5).value is None
    for cosine in (0.0, 1.0, -0.1):
        with pytest.raises(InputError, match="is not between 0 and 1"):
            cosine_test(noise(100.0), cosine=cosine)
    with pytest.raises(InputError, match="target=0"):
        norm_test(noise(100.0), target=0)


def test_a_batch_of_the_noise_scale_just_passes() -> None:
    found = norm_test(noise(400.0), samples=400)
    assert (found.passed, found.value, found.batch) == (True, 1.0, 400.0)
    assert not norm_test(noise(400.0), samples=399).passed


class Gradients:
    """Gradients of micro-batches of `b` samples: |G|^2 = 1, a noise scale of T samples, d dimensions."""

    def __init__(self, noise_scale: float, *, b: int, d: int = 50, seed: int = 0) -> None:
        self.random, self.b, self.d = np.random.default_rng(seed), b, d
        self.signal = np.zeros(d)
        self.signal[0] = 1.0
        self.sd = math.sqrt(noise_scale / b / d)
        self.meter = NoiseMeter(beta=0.9)

    def window(self, k: int) -> np.ndarray:
        micro = self.signal + self.random.normal(0, self.sd, (k, self.d))
        mean = micro.mean(0)
        if k > 1:
            found = estimate(float((micro**2).sum()) / k**2, float((mean**2).sum()), 1 / k)
            self.meter.add({"all": found}, samples=k * self.b)
        return mean


@pytest.mark.parametrize("scale", [64.0, 400.0])
def test_the_controller_finds_the_noise_scale_and_stays_unbiased(scale: float) -> None:
    gradients = Gradients(scale, b=8)
    steps = Controller(gradients.meter.estimate, microbatch=8, start=2, least=2, most=256)
    ks, along = [], []
    for update in range(3000):
        ks.append(steps(update))
        along.append(gradients.window(ks[-1])[0])
    settled = np.array(ks[200:])
    # The average spans 19 windows, so the length varies by a few per cent; ceil() rounds it up.
    assert 0.9 * scale / 8 < np.median(settled) < 1.3 * scale / 8
    assert all(after <= 2 * before and before <= 2 * after for before, after in pairwise(ks))
    moved = sum(after != before for before, after in pairwise(ks))
    assert all(abs(after - before) > 0.1 * before for before, after in pairwise(ks) if after != before)
    assert moved > 10, "premise: it continues to decide"
    mean, error = mean_and_error(np.array(along))
    assert abs(mean - 1) < 4 * error, "windows of predictable length leave the mean unbiased"
    assert error < 0.03


class Holding(Controller):
    """A mutant: the length stays until the noise scale is determined."""

    def propose(self, noise: Noise | None) -> int:
        return self.steps if noise is None or not noise.determined else super().propose(noise)


def lengths(kind: type[Controller], gradients: Gradients, updates: int) -> list[int]:
    steps = kind(gradients.meter.estimate, microbatch=gradients.b, start=4, least=2)
    found: list[int] = []
    for update in range(updates):
        found.append(steps(update))
        gradients.window(found[-1])
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scale", [400.0, 3200.0], ids=["50 steps are ideal", "400 steps are ideal"])
def test_windows_too_short_to_show_the_signal_grow_until_they_do(scale: float, seed: int) -> None:
    """The mutant stays below 8 steps where 400 are ideal."""
    found = lengths(Controller, Gradients(scale, b=8, seed=seed), 400)
    assert max(found[:40]) > 8, "the length grows from its start"
    assert 0.85 < np.median(found[200:]) * 8 / scale < 1.2
    assert max(found) * 8 < 1.8 * scale, "the length does not explode"
    if scale == 3200.0:
        assert np.mean(lengths(Holding, Gradients(scale, b=8, seed=seed), 80)) < 8


@pytest.mark.slow
@pytest.mark.parametrize("d", [2, 10])
def test_noise_of_few_directions_does_not_make_windows_run_away(d: int) -> None:
    for seed in range(12):
        found = lengths(Controller, Gradients(400.0, b=8, d=d, seed=seed), 600)
        assert 0.6 < np.median(found[200:]) * 8 / 400 < 1.4
        assert max(found) * 8 < 2.5 * 400


def until(gradients: Gradients, most: int = 64) -> tuple[np.ndarray, int]:
    """End the window when the estimated noise is below the signal; return the gradient sum and the length."""
    micro: list[np.ndarray] = []
    while True:
        micro.append(gradients.signal + gradients.random.normal(0, gradients.sd, gradients.d))
        k = len(micro)
        if k < 2:
            continue
        mean = np.mean(micro, axis=0)
        found = estimate(sum(float((g**2).sum()) for g in micro) / k**2, float((mean**2).sum()), 1 / k)
        if k >= most or (found.signal > 0 and found.variance <= found.signal):
            return mean * k, k


@pytest.mark.parametrize(("d", "least_bias"), [(1, 0.2), (5, 0.1), (100, 0.005)])
def test_stopping_inside_a_window_biases_the_mean_and_not_the_sum(d: int, least_bias: float) -> None:
    """Wald: E[sum of K gradients] = E[K] G. The mean is biased, most in few dimensions d."""
    gradients = Gradients(40.0, b=8, d=d, seed=4)
    ended = [until(gradients) for _ in range(4000)]
    sums, counts = np.array([s[0] for s, _ in ended]), np.array([k for _, k in ended])
    assert len(set(counts)) > 3, "premise: the length is random"
    mean, error = mean_and_error(sums - counts)  # of sum . G - K |G|^2
    assert abs(mean) < 4 * error, "the sum is unbiased"
    assert error / counts.mean() < 0.02
    biased, error = mean_and_error(sums / counts)
    assert biased - 1 > max(least_bias, 4 * error), "the mean is biased"


def test_an_undetermined_noise_scale_keeps_the_length() -> None:
    known: list[Noise | None] = [None, noise(None), noise(800.0), noise(None), noise(800.0)]
    asked = iter(known)
    steps = Controller(lambda: next(asked), microbatch=10, start=8, most=100)
    assert [steps(update) for update in range(6)] == [8, 8, 8, 16, 16, 32]


def test_without_a_value_the_target_is_the_nearer_end_of_the_interval() -> None:
    open_ended = replace(noise(None), low=200.0)
    bounded = replace(noise(None), low=100.0, high=300.0)
    for known, start, expected in (
        (open_ended, 8, 16),
        (bounded, 16, 16),
        (bounded, 40, 30),
        (bounded, 9, 10),
    ):
        assert Controller(lambda each=known: each, microbatch=10, start=start).propose(known) == expected


def test_a_controller_that_does_not_hold_would_explode() -> None:
    """A mutant that treats an undetermined noise scale as infinite."""

    class Mutant(Controller):
        def propose(self, noise: Noise | None) -> int:
            return 2 * self.steps if noise is None or not noise.determined else super().propose(noise)

    kinds: list[Callable[..., Controller]] = [Controller, Mutant]
    made = [kind(lambda: noise(None), microbatch=10, start=4) for kind in kinds]
    lengths = [[each(update) for update in range(8)] for each in made]
    assert [each[-1] for each in lengths] == [4, 512]


def test_small_changes_are_ignored() -> None:
    scales = iter([105.0, 95.0, 89.0, 111.0])
    steps = Controller(lambda: noise(next(scales)), microbatch=1, start=100)
    assert [steps(update) for update in range(5)] == [100, 100, 100, 89, 111]


def test_the_length_stays_within_its_bounds() -> None:
    steps = Controller(lambda: noise(1.0), microbatch=10, start=8, least=3, most=8)
    assert [steps(update) for update in range(4)] == [8, 4, 3, 3]
    steps = Controller(lambda: noise(1e9), microbatch=10, start=8, least=3, most=20)
    assert [steps(update) for update in range(4)] == [8, 16, 20, 20]
    with pytest.raises(InputError, match="least <= start <= most"):
        Controller(lambda: None, microbatch=1, start=1, least=2)


def test_the_length_of_an_update_is_decided_once() -> None:
    asked = []

    def now() -> Noise:
        asked.append(1)
        return noise(200.0)

    steps = Controller(now, microbatch=10, start=5)
    assert [steps(3), steps(3), steps(3)] == [10, 10, 10]
    assert len(asked) == 1, "update 3 is decided once, although it is not the first"
    steps = Controller(now, microbatch=10, start=5)
    assert [len(window) for window in windows(range(50), steps)] == [5, 10, 20, 15]


def test_rank_0_decides() -> None:
    answers = iter([7, 9])
    steps = Controller(lambda: noise(80.0), microbatch=10, start=8, first=lambda mine: next(answers))
    assert [steps(update) for update in range(3)] == [8, 7, 9]


def test_a_controller_resumes_from_its_state() -> None:
    def scales() -> Iterator[Noise]:
        yield from (noise(100.0 * 2**i) for i in range(8))

    def run(restart_after: int | None) -> list[int]:
        source = scales()
        steps = Controller(lambda: next(source), microbatch=10, start=4)
        lengths = []
        for update in range(6):
            lengths.append(steps(update))
            if update == restart_after:
                state = steps.state_dict()
                steps = Controller(lambda: next(source), microbatch=10, start=4)
                steps.load_state_dict(state)
                assert steps(update) == lengths[-1], "the open window keeps its length"
        return lengths

    assert run(None) == run(0) == run(3)
    with pytest.raises(InputError, match="so no Controller saved it"):
        Controller(lambda: None, microbatch=10, start=4).load_state_dict({})


def test_adascale_follows_the_schedule_of_the_base_batch() -> None:
    """The base batch keeps its rate; a larger batch completes the same schedule in fewer updates."""

    def rate(tau: float) -> float:
        return 0.1 if tau < 100 else 0.01

    base = AdaScale(rate, 32)
    rates = []
    for _ in range(150):
        rates.append(base.rate(32, 500.0))
        base.advance()
    assert rates == [0.1] * 100 + [0.01] * 50

    large, updates = AdaScale(rate, 32), 0
    while large.progress < 150:
        expected = gain(8, 500.0 / 32) * rate(large.progress)
        assert large.rate(256, 500.0) == pytest.approx(expected, rel=1e-12)
        large.advance()
        updates += 1
    assert updates == math.ceil(150 / gain(8, 500.0 / 32)) == 27


def test_adascale_takes_the_least_gain_within_the_interval() -> None:
    adascale = AdaScale(lambda tau: 1.0, 32)
    assert adascale.rate(128, None) == 1.0
    assert adascale.rate(128, noise(None)) == gain(4, 40.0 / 32)
    assert AdaScale(lambda tau: 1.0, 32, power=0.5).rate(128, 96.0) == pytest.approx(math.sqrt(gain(4, 3.0)))


def test_adascale_resumes_from_its_state() -> None:
    first = AdaScale(lambda tau: 1 / (1 + tau), 32)
    first.rate(128, 96.0)
    first.advance()
    first.rate(256, 96.0)
    second = AdaScale(lambda tau: 1 / (1 + tau), 32)
    second.load_state_dict(first.state_dict())
    for each in (first, second):
        each.advance()
    assert first.progress == second.progress > 2
    assert first.rate(64, 10.0) == second.rate(64, 10.0)


@pytest.mark.parametrize(
    "wrong",
    [{"steps": None}, {"steps": "x"}, {"steps": 0}, {"steps": math.nan}, {"update": -2}, {"update": None}],
)
def test_an_incomplete_state_is_refused_and_changes_nothing(wrong: dict[str, object]) -> None:
    steps = Controller(lambda: noise(80.0), microbatch=10, start=4)
    whole = steps.state_dict()
    with pytest.raises(
        InputError, match=r"an int of at least -1\. Pass the result of Controller\.state_dict\(\)"
    ):
        steps.load_state_dict({**whole, **wrong})
    with pytest.raises(InputError, match="so no Controller saved it"):
        steps.load_state_dict(None)  # pyright: ignore[reportArgumentType]
    assert steps.state_dict() == whole


@pytest.mark.parametrize("known", [None, noise(1000.0)])
def test_a_resumed_controller_obeys_new_bounds(known: Noise | None) -> None:
    """The open window keeps its length; the next is within the bounds, even after a small change."""
    saved = Controller(lambda: known, microbatch=10, start=100)
    saved(0)
    for least, most, expected in ((1, 95, 95), (105, 200, 105), (1, 8, 8)):
        steps = Controller(lambda: known, microbatch=10, start=least, least=least, most=most)
        steps.load_state_dict(saved.state_dict())
        assert (steps(0), steps(1)) == (100, expected)
