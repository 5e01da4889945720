"""Test for independent micro-batches: error rates, power, and effect of the verdict on the estimate."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from superbatch.errors import InputError
from superbatch.lab.report.json import to_json
from superbatch.noise import NoiseMeter
from superbatch.noise.independence import FEWEST_TRIPLES, IndependenceTest
from superbatch.noise.meter import Estimate, estimate
from superbatch.results.noise import ASSUMPTION, Independence, Noise
from tests.report_json import from_json


def steady(_: int) -> float:
    return 2.3


def falling(t: int) -> float:
    return 0.3 + 2 * math.exp(-t / 40)


def less_noisy(t: int) -> float:
    return 0.05 + 0.5 * math.exp(-t / 40)


def losses(
    rng: np.random.Generator,
    windows: int,
    *,
    k: int = 8,
    shared: float = 0.0,
    tail: str = "normal",
    even: float = 0.0,
    loss: Callable[[int], float] = steady,
    noise: Callable[[int], float] = lambda _: 0.3,
    weights: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw losses of micro-batches that share a fraction of their variance; return losses and weights."""

    def draw(shape: tuple[int, int]) -> np.ndarray:
        if tail == "t(3)":
            return rng.standard_t(3, shape) / math.sqrt(3)
        found = rng.standard_normal(shape)
        if tail == "rare":
            found *= np.where(rng.random(shape) < 0.01, 10.0, 1.0) / math.sqrt(1.99)
        return found

    w = np.full(k, 1 / k) if weights is None else weights / weights.sum()
    own = draw((windows, k)) / np.sqrt(w * k)
    e = math.sqrt(1 - shared) * own + math.sqrt(shared) * draw((windows, 1))
    e -= even * e.mean(1, keepdims=True)
    at = range(windows)
    return np.array([loss(t) for t in at])[:, None] + np.array([noise(t) for t in at])[:, None] * e, w


def window(each: np.ndarray, w: np.ndarray, centre: float) -> tuple[float, float]:
    """Return the mean loss of a window and its variance as estimated from the micro-batches."""
    q, off = float((w * w).sum()), float((w * (each - centre)).sum())
    return centre + off, estimate(float(((w * (each - centre)) ** 2).sum()), off * off, q).variance


def judged(rng: np.random.Generator, windows: int, **setting: Any) -> Independence:
    test = IndependenceTest()
    found, w = losses(rng, windows, **setting)
    for each in found:
        test.add(*window(each, w, test.centre))
    return test.result()


INDEPENDENT: Mapping[str, dict[str, Any]] = {
    "normal": {},
    "loss falls, with its noise": {"loss": falling, "noise": less_noisy},
    "unequal weights": {"weights": np.arange(1.0, 9.0)},
    "t(3)": {"tail": "t(3)"},
    "rare": {"tail": "rare"},
    "loss swings": {"loss": lambda t: 2 + 0.2 * (-1) ** t},
    "loss falls at once": {"loss": lambda t: 0.3 + 2 * math.exp(-t / 8)},
    "K = 2": {"k": 2},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", list(INDEPENDENT))
def test_independent_micro_batches_are_seldom_called_shared_or_even(case: str) -> None:
    """Measured in 300 runs: 0 % "shared"; "even" 1.3 % after 61 windows, 0.3 % after 200."""
    rng = np.random.default_rng(3)
    for windows, most in ((61, 0.04), (200, 0.02)):
        found = [judged(rng, windows, **INDEPENDENT[case]).verdict for _ in range(150)]
        assert found.count("shared") == 0
        assert found.count("even") <= most * len(found)


@pytest.mark.slow
def test_repeated_tests_in_a_run_seldom_reject_independence() -> None:
    rng, said = np.random.default_rng(5), 0
    for _ in range(100):
        test, (found, w) = IndependenceTest(), losses(rng, 1500)
        for t, each in enumerate(found):
            test.add(*window(each, w, test.centre))
            said += t % 30 == 29 and test.result().verdict is not None
    assert said <= 5


@pytest.mark.parametrize(
    ("setting", "windows", "verdict", "least"),
    [
        ({"shared": 0.2}, 200, "shared", 0.9),
        ({"shared": 0.2, "loss": falling, "noise": less_noisy}, 200, "shared", 0.9),
        pytest.param({"shared": 0.2}, 61, "shared", 0.15, marks=pytest.mark.slow),
        pytest.param({"shared": 0.5}, 61, "shared", 0.75, marks=pytest.mark.slow),
        pytest.param({"shared": 0.05}, 600, "shared", 0.2, marks=pytest.mark.slow),
        ({"even": 0.3}, 200, "even", 0.85),
    ],
)
def test_shared_and_even_windows_are_found(
    setting: dict[str, Any], windows: int, verdict: str, least: float
) -> None:
    rng = np.random.default_rng(4)
    found = [judged(rng, windows, **setting) for _ in range(300)]
    assert np.mean([one.verdict == verdict for one in found]) >= least
    rho = setting.get("shared", 0.0)
    if rho >= 0.2 and windows >= 200:
        expected = 1 + 8 * rho / (1 - rho)
        assert np.median([one.ratio or 0 for one in found]) == pytest.approx(expected, rel=0.1)


def test_with_one_lag_only_a_swing_of_the_loss_is_called_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant decides by F_1 alone."""
    monkeypatch.setattr("superbatch.noise.independence._KINDS", ((1.0, 0.0, 0),) * 3)
    rng = np.random.default_rng(3)
    assert judged(rng, 200, loss=INDEPENDENT["loss swings"]["loss"]).verdict == "shared"


def test_windows_that_draw_most_of_the_data_are_even_by_design() -> None:
    rng = np.random.default_rng(6)
    test, (found, w) = IndependenceTest(), losses(rng, 1200, even=0.17)
    for each in found:
        test.add(*window(each, w, test.centre))
    assert test.result().verdict == "even"
    assert test.result(drawn=0.3).verdict is None


# ------------------------------------------------------------------------------------------------- the meter


def measured(rng: np.random.Generator, windows: int, *, shared: float, **options: Any) -> NoiseMeter:
    """Simulate gradients of two micro-batches of 10 (noise scale 15 samples) and losses of eight."""
    meter = NoiseMeter(**options)
    found, w = losses(rng, windows, shared=shared)
    for each in found:
        g = np.array([2.0, 0, 0]) + rng.standard_normal((2, 3)) * np.sqrt(2.0)
        a2, b2 = float((g**2).sum()) / 4, float((g.mean(0) ** 2).sum())
        meter.add({"a": estimate(a2, b2, 0.5)}, samples=20)
        meter.add_beside("power 1", Estimate(b2 - 1.0, 1.0), samples=20)
        meter.add_losses(*window(each, w, meter.centre))
    return meter


def test_shared_noise_withholds_the_value_and_the_upper_end() -> None:
    shared = measured(np.random.default_rng(1), 200, shared=0.5).estimate()
    fine = measured(np.random.default_rng(1), 200, shared=0.0).estimate()
    assert fine.independence is not None
    assert fine.independence.verdict is None
    assert fine.determined
    assert fine.groups[0].batch_size is not None, "the premise"
    assert fine.summary().endswith(f"samples ({fine.low:.4g} to {fine.high:.4g}), {ASSUMPTION}")
    for part in (shared, *shared.groups, *shared.models):
        assert (part.batch_size, part.high) == (None, math.inf)
    assert shared.low > 0, "the true noise scale is even larger"
    assert not shared.determined
    assert shared.reason is not None
    assert "micro-batches of a window share noise" in shared.reason
    assert ". Shuffle samples over windows. If they already are shuffled, the loss jumps" in shared.reason
    assert shared.summary().startswith(
        f"noise scale at least {shared.low:.4g} samples (losses of whole windows"
    )
    assert from_json(Noise, to_json(shared)) == shared


def test_even_windows_keep_the_value_and_are_marked() -> None:
    meter, rng = NoiseMeter(), np.random.default_rng(2)
    found, w = losses(rng, 300, even=0.4)
    for each in found:
        meter.add({"a": Estimate(1.0 + 0.1 * float(rng.standard_normal()), 2.0)}, samples=10)
        meter.add_losses(*window(each, w, meter.centre))
    noise = meter.estimate()
    assert noise.determined
    assert noise.reason is None
    assert "independent draws; they are not: losses of whole windows differ 0." in noise.summary()
    assert "vary less than independent draws" in repr(meter)
    assert repr(NoiseMeter()) == (
        f"<NoiseMeter of 0 windows: noise scale not known (0 windows measured; 8 needed), {ASSUMPTION}>"
    )


def test_no_losses_give_no_verdict_on_independence() -> None:
    assert NoiseMeter().estimate().independence is None


def test_a_meter_resumes_bit_for_bit_at_any_window() -> None:
    rng = np.random.default_rng(7)
    found, w = losses(rng, 3 * FEWEST_TRIPLES + 8)
    whole = NoiseMeter()
    for each in found:
        resumed = NoiseMeter()
        resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        for meter in (whole, resumed):
            meter.add_losses(*window(each, w, meter.centre))
        assert resumed.state_dict() == whole.state_dict()
        assert resumed.estimate() == whole.estimate()


def test_a_state_without_the_independence_test_is_loaded() -> None:
    meter = measured(np.random.default_rng(1), 30, shared=0.0)
    old = {name: value for name, value in meter.state_dict().items() if name != "losses"} | {"version": 2}
    resumed = NoiseMeter()
    resumed.load_state_dict(old)
    assert resumed.estimate().independence is None
    assert resumed.estimate().low == meter.estimate().low
    assert resumed.state_dict()["version"] == 3


def test_an_incomplete_state_is_refused() -> None:
    meter = measured(np.random.default_rng(1), 30, shared=0.0)
    state = meter.state_dict()
    for no_state in (None, [1]):
        with pytest.raises(InputError, match="is not a saved NoiseMeter"):
            NoiseMeter().load_state_dict(no_state)  # pyright: ignore[reportArgumentType]
    for change in ({"means": [0.0]}, {"waiting": [[0.0, 0.0]] * 3}):
        with pytest.raises(InputError, match="is incomplete"):
            NoiseMeter().load_state_dict({**state, "losses": {**state["losses"], **change}})


def test_nonfinite_or_constant_losses_give_no_verdict() -> None:
    test = IndependenceTest()
    for _ in range(100):
        test.add(math.nan, 1.0)
        test.add(1.0, math.inf)
        test.add(1.0, 0.0)
    assert test.result() == Independence(verdict=None, ratio=None, low=0.0, high=math.inf, triples=0)
