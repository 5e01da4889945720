"""Degenerate losses and gradients: constants, copies, tiny or huge numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

import numpy as np
import pytest

from superbatch.lab.report.json import to_json
from superbatch.noise import NoiseMeter
from superbatch.noise.independence import IndependenceTest
from superbatch.noise.interval import fieller
from superbatch.noise.meter import Estimate, estimate
from superbatch.results.noise import Independence, Noise
from tests.report_json import from_json

K = 8


def judged(windows: Iterable[np.ndarray]) -> Independence:
    """Return the verdict on losses of micro-batches; the test is saved and loaded in between."""
    test, share = IndependenceTest(), np.full(K, 1 / K)
    for each in windows:
        off = share * (each - test.centre)
        mean = float(off.sum())
        test.add(test.centre + mean, estimate(float((off * off).sum()), mean * mean, 1 / K).variance)
    state = json.loads(json.dumps(test.state(), allow_nan=False))
    return IndependenceTest.of_state(state).result()


def windows(rng: np.random.Generator, *, shared: float = 0.5, noise: float = 0.3) -> np.ndarray:
    own, alike = rng.standard_normal((300, K)), rng.standard_normal((300, 1))
    return 2.3 + noise * (math.sqrt(1 - shared) * own + math.sqrt(shared) * alike)


@pytest.mark.parametrize("count", [4, 5, 6, 7, 40])
def test_first_losses_that_differ_only_by_rounding_do_not_dominate(count: int) -> None:
    """A last layer initialized with zeros: every loss is log 10 up to rounding."""
    rng = np.random.default_rng(0)
    alike = math.log(10) * (1 + 1e-16 * rng.standard_normal((count, K)))
    assert judged([*alike, *windows(rng)]).verdict == "shared"
    assert judged([*alike, *windows(rng, shared=0.0)]).verdict is None


def test_noise_that_starts_almost_at_zero_gets_a_verdict() -> None:
    rng = np.random.default_rng(1)
    warming = [windows(rng, noise=1e-7 * t)[0] for t in range(10)]
    assert judged([*warming, *windows(rng)]).verdict == "shared"
    assert judged([*warming, *windows(rng, shared=0.0)]).verdict is None


@pytest.mark.parametrize("rest", [600, 30_000])
def test_later_losses_without_spread_keep_the_verdict(rest: int) -> None:
    rng = np.random.default_rng(2)
    before, after = windows(rng), windows(rng)
    found = judged([*before, *[np.full(K, 1.5)] * rest, *after])
    assert found.verdict == "shared"
    assert found.ratio == pytest.approx(judged([*before, *after]).ratio, rel=0.05)


def test_copied_micro_batches_are_called_shared_and_give_no_noise_scale() -> None:
    """Without the verdict the noise scale would be 0 samples, with the interval [0, 0]."""
    rng, meter = np.random.default_rng(3), NoiseMeter()
    for _ in range(100):
        loss = float(rng.standard_normal())
        meter.add({"a": Estimate(1.0 + 0.01 * loss, 0.0)}, samples=10)
        meter.add_losses(2 + loss, float(rng.normal(0, 1e-17)))  # spread from rounding
    noise = meter.estimate()
    assert noise.independence is not None
    assert (noise.independence.verdict, noise.independence.ratio) == ("shared", math.inf)
    assert (noise.batch_size, noise.high) == (None, math.inf)
    assert noise.reason is not None
    assert noise.reason.startswith("losses of whole windows differ, and those of the micro-batches")
    assert from_json(Noise, to_json(noise)) == noise


def test_negative_estimates_of_the_spread_give_no_verdict() -> None:
    """One heavy micro-batch always has the higher loss while losses fall."""
    test, loss, shares = IndependenceTest(), 100.0, np.array([0.9, 0.1])
    rng = np.random.default_rng(4)
    test.add(loss, 1.0)
    for _ in range(3):
        test.add(loss + float(rng.standard_normal()), 1.0)
    explained: list[float] = []
    for _ in range(300):
        loss -= 0.5
        off = shares * (np.array([loss + 0.1, loss - 0.9]) + 0.01 * rng.standard_normal(2) - test.centre)
        mean = float(off.sum())
        explained.append(estimate(float((off * off).sum()), mean * mean, 0.82).variance)
        test.add(test.centre + mean, explained[-1])
    assert max(explained) < 0, "the premise"
    assert test.result().verdict is None


@pytest.mark.parametrize("size", [1e80, 1e160, 1e300])
def test_losses_of_any_size_leave_finite_sums(size: float) -> None:
    test = IndependenceTest()
    for t in range(30):
        test.add(size * t, 1.0)
    assert all(map(math.isfinite, [*test.state()["means"], *test.state()["products"]]))


@pytest.mark.parametrize("size", [1e80, 1e60, 1e-60, 1e-90])
def test_an_interval_does_not_depend_on_the_unit_of_the_loss(size: float) -> None:
    """Fourth powers of 1e80 and 1e-90 over- or underflow."""
    squares = {"s_xx": 0.01 * size**2, "s_yy": 0.01 * size**2, "s_xy": 0.001 * size**2}
    found = fieller(10 * size, 2 * size, **squares, quantile=2.0)
    assert found == pytest.approx(fieller(10.0, 2.0, s_xx=0.01, s_yy=0.01, s_xy=0.001, quantile=2.0))
    assert found[1] > 1.1 * found[0]
