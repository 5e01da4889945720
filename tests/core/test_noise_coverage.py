"""Simulated coverage of the noise scale's interval, and the rate of estimates that are far off."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from superbatch.errors import InputError
from superbatch.noise import NoiseMeter
from superbatch.noise.interval import Moments, Ratio

D = 24
SPECTRUM = 1 / np.arange(1, D + 1.0) / (1 / np.arange(1, D + 1.0)).sum()
DIRECTION = np.random.default_rng(9).standard_normal(D)
DIRECTION /= np.linalg.norm(DIRECTION)
BATCH = 32


def errors(rng: np.random.Generator, shape: tuple[int, ...], tail: str) -> np.ndarray:
    """Draw noise of variance 1: normal, with heavy tails, or 10 times larger in one micro-batch of 100."""
    if tail == "t(3)":
        return rng.standard_t(3, shape) / math.sqrt(3)
    found = rng.standard_normal(shape)
    if tail == "rare":
        found *= np.where(rng.random((*shape[:-1], 1)) < 0.01, 10.0, 1.0) / math.sqrt(0.99 + 0.01 * 100)
    return found


def draw(
    rng: np.random.Generator,
    *,
    windows: int = 200,
    k: int = 4,
    batches: float = 1.0,
    tail: str = "normal",
    lasting: float = 0.0,
) -> tuple[list[float], list[float]]:
    """Draw unbiased variance and signal of each window; the noise scale is `batches` windows."""
    e = errors(rng, (windows, k, D), tail) * np.sqrt(SPECTRUM * k / BATCH)
    for t in range(1, windows if lasting else 1):
        e[t] = lasting * e[t - 1] + math.sqrt(1 - lasting**2) * e[t]
    g = e + DIRECTION / math.sqrt(BATCH * batches)
    a2 = np.einsum("tkd,tkd->t", g, g) / k**2
    mean = g.mean(1)
    b2 = np.einsum("td,td->t", mean, mean)
    q = 1 / k
    return ((a2 - q * b2) / (1 - q) * BATCH).tolist(), ((b2 - a2) / (1 - q)).tolist()


def ratio(rng: np.random.Generator, beta: float = 0.98, **setting: Any) -> Ratio:
    moments = Moments()
    for x, y in zip(*draw(rng, **setting), strict=True):
        moments.add(x, y, beta)
    return moments.of(beta, None)


CASES: Mapping[str, tuple[dict[str, Any], float]] = {
    "normal": ({}, 0.92),
    "rare, K=2": ({"k": 2, "tail": "rare"}, 0.91),
    "windows correlated .8": ({"lasting": 0.8}, 0.9),
    "normal, B = 10 batches": ({"batches": 10.0}, 0.92),
    "8 windows": ({"windows": 8}, 0.92),
    "50 windows": ({"windows": 50}, 0.92),
    "t(3), K=2": ({"k": 2, "tail": "t(3)"}, 0.9),
    "t(3), K=8": ({"k": 8, "tail": "t(3)"}, 0.9),
    "rare, K=8": ({"k": 8, "tail": "rare"}, 0.91),
    "rare, K=4, 50 windows": ({"tail": "rare", "windows": 50}, 0.8),
    "windows correlated .3": ({"lasting": 0.3}, 0.91),
    "windows correlated .6": ({"lasting": 0.6}, 0.9),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", list(CASES))
def test_the_interval_covers(case: str) -> None:
    """The interval is for 95 %; the bounds allow 2 to 3 standard errors, and known errors of the method."""
    setting, least = CASES[case]
    truth = BATCH * setting.get("batches", 1.0)
    rng = np.random.default_rng(1)
    found = [ratio(rng, **setting) for _ in range(300)]
    assert np.mean([one.low <= truth <= one.high for one in found]) >= least


@pytest.mark.parametrize(
    ("setting", "most"), [({"k": 2, "tail": "rare"}, 0.85), ({"lasting": 0.8}, 0.6)], ids=["rare", "lasting"]
)
def test_without_the_two_corrections_the_interval_does_not_cover(
    setting: dict[str, Any], most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant assumes independent windows and no future window."""
    monkeypatch.setattr("superbatch.noise.interval.TO_COME", 0.0)
    monkeypatch.setattr("superbatch.noise.interval.NO_CORRELATION", math.inf)
    rng = np.random.default_rng(1)
    found = [ratio(rng, **setting) for _ in range(200)]
    assert np.mean([one.low <= BATCH <= one.high for one in found]) < most


@pytest.mark.parametrize(("batches", "windows"), [(10, 50), pytest.param(10, 200, marks=pytest.mark.slow)])
def test_a_weak_signal_gives_a_bound_and_no_value(batches: int, windows: int) -> None:
    """A weak signal gives a value only if its estimate is too large; the noise scale is then too low."""
    rng = np.random.default_rng(2)
    found = [ratio(rng, batches=float(batches), windows=windows) for _ in range(300)]
    truth = BATCH * batches
    off = [one.batch_size is not None and one.batch_size < truth / 2 for one in found]
    ends = [math.isfinite(one.high) and one.variance / one.signal < truth / 2 for one in found]
    assert np.mean(off) <= 0.04
    assert windows != 50 or np.mean(ends) > 0.06  # the mutant gives a value if the interval is bounded
    assert np.mean([one.low <= truth for one in found]) >= 0.94
    bounds = [one for one in found if one.batch_size is None and math.isfinite(one.high)]
    assert bounds[0].reason == "signal too uncertain for a value"


def test_a_strong_signal_gives_a_value() -> None:
    rng = np.random.default_rng(3)
    assert np.mean([ratio(rng, batches=1.0).batch_size is not None for _ in range(100)]) > 0.95


def test_a_state_resumes_bit_for_bit_at_any_window() -> None:
    x, y = draw(np.random.default_rng(4), windows=20)
    whole = Moments()
    for count, (a, b) in enumerate(zip(x, y, strict=True)):
        resumed = Moments.of_state(whole.state())
        assert resumed.count == count
        for moments in (whole, resumed):
            moments.add(a, b, 0.9)
        assert resumed.state() == whole.state()
        assert resumed.of(0.9, 1000) == whole.of(0.9, 1000)


def test_a_state_of_another_form_is_refused() -> None:
    meter = NoiseMeter()
    with pytest.raises(
        InputError, match=r"has version 1, and this superbatch reads versions 2 and 3\. Make a new"
    ):
        meter.load_state_dict({**meter.state_dict(), "version": 1})
    with pytest.raises(InputError, match="is incomplete"):
        meter.load_state_dict({**meter.state_dict(), "total": {"values": [0.0] * 7, "last": [], "count": 0}})
