"""The noise scale: estimators against known values, its interval, and mutants that must fail."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from superbatch.errors import InputError
from superbatch.lab.report.json import to_json
from superbatch.noise.interval import fieller, student_quantile
from superbatch.noise.meter import (
    Estimate,
    NoiseMeter,
    effective_samples,
    estimate,
    homogeneous_estimate,
    noise_over_run,
    relative_time,
)
from superbatch.results.noise import Noise
from tests.report_json import from_json

SIZES = (80, 15, 5)
DIMENSIONS = 6
SIGNAL, VARIANCE = 0.5, 50.0  # |G|^2, T


def windows(
    count: int, sizes: tuple[int, ...], *, seed: int, signal: float = SIGNAL, variance: float = VARIANCE
) -> np.ndarray:
    """Draw micro-batch gradients (window, micro-batch, dimension) with mean G and covariance S / n_i."""
    normal = np.random.default_rng(seed)
    mean = np.full(DIMENSIONS, math.sqrt(signal / DIMENSIONS))
    noise = normal.standard_normal((count, len(sizes), DIMENSIONS)) * math.sqrt(variance / DIMENSIONS)
    return mean + noise / np.sqrt(np.array(sizes))[:, None]


def scalars(gradients: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Return A2 and b2 of each window, and Q."""
    squares = (gradients**2).sum(-1)
    batch = (weights[:, None] * gradients).sum(1)
    return (weights**2 * squares).sum(-1), (batch**2).sum(-1), float((weights**2).sum())


def z(values: list[float], truth: float) -> float:
    return (statistics.fmean(values) - truth) / (statistics.stdev(values) / math.sqrt(len(values)))


WEIGHTS = [(0.8, 0.15, 0.05), (0.2, 0.3, 0.5), (1 / 3, 1 / 3, 1 / 3)]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_signal_and_variance_are_unbiased_for_unequal_weights_and_sizes(weights: tuple[float, ...]) -> None:
    a2, b2, q = scalars(windows(20_000, SIZES, seed=1), np.array(weights))
    found = [estimate(a, b, q) for a, b in zip(a2.tolist(), b2.tolist(), strict=True)]
    of_batch = VARIANCE / effective_samples(weights, SIZES)
    assert abs(z([one.signal for one in found], SIGNAL)) < 4
    assert abs(z([one.variance for one in found], of_batch)) < 4


def test_mutant_the_usual_formula_with_mean_sizes_is_biased() -> None:
    """The test above would reject McCandlish's two-batch formula with b_small = mean(n_i)."""
    weights = np.array(SIZES) / sum(SIZES)
    gradients = windows(20_000, SIZES, seed=1)
    small = (gradients**2).sum(-1).mean(1)
    big = ((weights[:, None] * gradients).sum(1) ** 2).sum(-1)
    b, total = sum(SIZES) / 3, sum(SIZES)
    assert abs(z(((total * big - b * small) / (total - b)).tolist(), SIGNAL)) > 20
    assert abs(z(((small - big) / (1 / b - 1 / total)).tolist(), VARIANCE)) > 20


def test_the_homogeneous_form_equals_anova_and_has_less_spread() -> None:
    weights = np.array(SIZES) / sum(SIZES)
    gradients = windows(4000, SIZES, seed=2)
    a2, b2, q = scalars(gradients, weights)
    a1 = (weights * (gradients**2).sum(-1)).sum(-1)
    found = [homogeneous_estimate(a, b, weights.tolist(), SIZES) for a, b in zip(a1, b2, strict=True)]
    assert abs(z([one.signal for one in found], SIGNAL)) < 4
    batch = (weights[:, None] * gradients).sum(1)
    anova = (np.array(SIZES) * ((gradients - batch[:, None]) ** 2).sum(-1)).sum(-1) / 2
    np.testing.assert_allclose([one.variance * 100 for one in found], anova, rtol=1e-9)
    general = [estimate(a, b, q).variance for a, b in zip(a2, b2, strict=True)]
    assert statistics.stdev([one.variance for one in found]) < 0.8 * statistics.stdev(general)


def test_equal_sizes_give_mccandlish_formula() -> None:
    small, big = 7.3, 1.9  # mean |g_i|^2 over K = 4 micro-batches of 8, |g|^2
    found = estimate(small / 4, big, 1 / 4)
    assert found.signal == pytest.approx((32 * big - 8 * small) / 24, rel=1e-12)
    assert found.variance * 32 == pytest.approx((small - big) / (1 / 8 - 1 / 32), rel=1e-12)


def test_linear_regression_has_the_analytic_noise_scale() -> None:
    """T = (d'Sd + s^2) tr S + |Sd|^2, |G|^2 = |Sd|^2 for the squared loss (x'd - e)^2 / 2, x ~ N(0, S)."""
    generator = np.random.default_rng(3)
    spectrum = np.array([2.0, 1.0, 0.5, 0.25])
    d, s = np.array([0.6, -0.8, 0.5, 1.0]), 0.7
    of_d = spectrum * d
    signal = float(of_d @ of_d)
    variance = float((d @ of_d + s**2) * spectrum.sum() + signal)
    meter = NoiseMeter(beta=0.9999)
    sizes = np.array([8, 5, 3])
    weights = sizes / sizes.sum()
    for _ in range(20_000):
        x = generator.standard_normal((16, 4)) * np.sqrt(spectrum)
        per_sample = x * (x @ d - s * generator.standard_normal(16))[:, None]
        parts = np.split(per_sample, np.cumsum(sizes)[:-1])
        a2, b2, q = scalars(np.array([[part.mean(0) for part in parts]]), weights)
        meter.add({"all": estimate(float(a2[0]), float(b2[0]), q)}, samples=16)
    noise = meter.estimate()
    assert noise.batch_size is not None
    assert noise.variance == pytest.approx(variance, rel=0.03)
    assert noise.signal == pytest.approx(signal, rel=0.03)
    assert noise.batch_size == pytest.approx(variance / signal, rel=0.03)
    assert noise.low < variance / signal < noise.high


def run(ratio: Callable[[list[Estimate]], float]) -> float:
    """Estimate a noise scale of 100 by one kind of average, from windows of two micro-batches of 4."""
    gradients = windows(20_000, (4, 4), seed=4, signal=0.5, variance=50)
    a2, b2, q = scalars(gradients, np.array([0.5, 0.5]))
    return 8 * ratio([estimate(a, b, q) for a, b in zip(a2.tolist(), b2.tolist(), strict=True)])


def test_a_ratio_of_means_is_right_and_its_mutants_are_not() -> None:
    def of_means(found: list[Estimate]) -> float:
        return statistics.fmean(x for _, x in found) / statistics.fmean(y for y, _ in found)

    def clamped(found: list[Estimate]) -> float:
        return statistics.fmean(max(x, 1e-6) for _, x in found) / statistics.fmean(
            max(y, 0) for y, _ in found
        )

    def mean_of_ratios(found: list[Estimate]) -> float:
        return statistics.fmean(x / y for y, x in found)

    def median_of_ratios(found: list[Estimate]) -> float:
        return statistics.median(x / y for y, x in found)

    assert run(of_means) == pytest.approx(100, rel=0.15)  # 4.5 standard deviations
    for mutant in (clamped, mean_of_ratios, median_of_ratios):
        assert not 60 < run(mutant) < 160, mutant.__name__


def test_the_meter_takes_the_ratio_of_debiased_means() -> None:
    """Compare with explicit weights; negative signals of single windows are not clamped."""
    normal = random.Random(5).gauss
    found = [Estimate(normal(0.5, 2), normal(3, 2)) for _ in range(30)]
    assert min(one.signal for one in found) < 0 < min(30, 1), "the premise: a signal is negative"
    samples = [float(8 + i % 3) for i in range(30)]
    meter = NoiseMeter(beta=0.9)
    for one, n in zip(found, samples, strict=True):
        meter.add({"all": one}, samples=n)
    omega = np.array([0.9 ** (29 - i) for i in range(30)])
    omega /= omega.sum()
    x = np.array([one.variance * n for one, n in zip(found, samples, strict=True)])
    y = np.array([one.signal for one in found])
    noise = meter.estimate()
    assert noise.variance == pytest.approx(omega @ x, rel=1e-12)
    assert noise.signal == pytest.approx(omega @ y, rel=1e-12)
    assert noise.effective_windows == pytest.approx(1 / (omega @ omega), rel=1e-12)
    assert noise.samples_per_window == pytest.approx(omega @ np.array(samples), rel=1e-12)
    dx, dy = np.diff(x, prepend=x[1]), np.diff(y, prepend=y[1])  # the second difference replaces the first
    squares = omega**2
    s_xx, s_yy, s_xy = (float(squares @ (a * b)) / 2 for a, b in ((dx, dx), (dy, dy), (dx, dy)))
    n = 1 / squares.sum()
    t = float(stats.t.ppf(0.975, 2 * (n - 1) ** 2 / (3 * n - 4)))
    low, high = fieller(omega @ x, omega @ y, s_xx=s_xx, s_yy=s_yy, s_xy=s_xy, quantile=t)
    assert (noise.low, noise.high) == (pytest.approx(low, rel=1e-7), pytest.approx(high, rel=1e-7))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_meter_covers_while_the_gradient_shrinks(decay: float) -> None:
    """The signal falls by exp(-decay) per window; the true value is the ratio of the averages."""
    runs, count, beta = 400, 80, 0.95
    weights, fall = np.full(4, 0.25), np.exp(-decay * np.arange(count))
    omega = beta ** np.arange(count - 1, -1, -1.0)
    truth = VARIANCE * omega.sum() / (omega @ (20 * SIGNAL * fall))
    covered = ended = static = 0
    for seed in range(runs):
        gradients = windows(count, (8,) * 4, seed=seed, signal=20 * SIGNAL)
        mean = math.sqrt(20 * SIGNAL / DIMENSIONS)
        gradients += (mean * np.sqrt(fall) - mean)[:, None, None]
        a2, b2, q = scalars(gradients, weights)
        meter = NoiseMeter(beta)
        for a, b in zip(a2.tolist(), b2.tolist(), strict=True):
            meter.add({"all": estimate(a, b, q)}, samples=32)
        noise = meter.estimate()
        covered += noise.low <= truth <= noise.high
        ended += math.isfinite(noise.high)
        y = (b2 - a2) / (1 - q)
        n = noise.effective_windows
        spread = np.cov(y, aweights=omega, ddof=0) / (n - 1)
        static += bool((omega @ y / omega.sum()) ** 2 > stats.t.ppf(0.975, n - 1) ** 2 * spread)
    assert covered / runs >= 0.93 - 2 * math.sqrt(0.95 * 0.05 / runs)
    if decay:
        assert ended > 2 * static > 0, (
            "the mutant: a variance over windows, which takes the fall for uncertainty"
        )


@pytest.mark.parametrize("freedom", [0.7, 1, 1.5, 2, 3.3, 7, 19.5, 98.2, 1e3, 1e6])
@pytest.mark.parametrize("probability", [0.6, 0.9, 0.95, 0.975, 0.999])
def test_the_quantile_is_scipys(probability: float, freedom: float) -> None:
    expected = stats.t.ppf(probability, freedom)
    assert student_quantile(probability, freedom) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(
    ("sizes", "count", "least_unbounded", "most_unbounded"),
    [((8,) * 4, 400, 0.0, 0.1), ((4, 4), 50, 0.4, 1.0)],
)
def test_fieller_covers(
    sizes: tuple[int, ...], count: int, least_unbounded: float, most_unbounded: float
) -> None:
    """The interval is for 95 %; the bound is 93 % minus two standard deviations of the count in 600 runs."""
    weights, runs = np.full(len(sizes), 1 / len(sizes)), 600
    n = sum(sizes)
    covered = unbounded = delta = 0
    for seed in range(runs):
        a2, b2, q = scalars(windows(count, sizes, seed=seed + 100), weights)
        x, y = n * (a2 - q * b2) / (1 - q), (b2 - a2) / (1 - q)
        cov, t = np.cov(x, y) / count, stats.t.ppf(0.975, count - 1)
        low, high = fieller(
            x.mean(), y.mean(), s_xx=cov[0, 0], s_yy=cov[1, 1], s_xy=cov[0, 1], quantile=float(t)
        )
        covered += low <= 100 <= high
        unbounded += math.isinf(high)
        r = x.mean() / y.mean()
        half = t * math.sqrt(max(0.0, cov[0, 0] - 2 * r * cov[0, 1] + r * r * cov[1, 1])) / abs(y.mean())
        delta += abs(r - 100) <= half
    assert covered / runs >= 0.93 - 2 * math.sqrt(0.95 * 0.05 / runs)
    assert least_unbounded <= unbounded / runs <= most_unbounded
    if least_unbounded:
        assert delta / runs < 0.93, "the mutant: a delta-method interval is always bounded"


def test_a_zero_signal_gives_no_value() -> None:
    a2, b2, q = scalars(windows(100, (8,) * 4, seed=6, signal=0.0), np.full(4, 0.25))
    meter = NoiseMeter()
    for a, b in zip(a2.tolist(), b2.tolist(), strict=True):
        meter.add({"all": estimate(a, b, q)}, samples=32)
    noise = meter.estimate()
    assert (noise.batch_size, noise.high, noise.determined) == (None, math.inf, False)
    assert noise.reason == "signal not distinguishable from noise"
    assert noise.low > 32, "the noise scale is known to be large"
    assert from_json(Noise, to_json(noise)) == noise


def test_a_signal_below_zero_beyond_chance_is_explained() -> None:
    """Draws without replacement from few data lower the noise in |g|^2; data_size corrects this."""
    generator = np.random.default_rng(7)
    data = generator.standard_normal((40, DIMENSIONS))
    data -= data.mean(0)  # at the minimum: no signal at all
    data += math.sqrt(0.02 / DIMENSIONS)
    plain, aware = NoiseMeter(0.999), NoiseMeter(0.999, data_size=40)
    for _ in range(2000):
        drawn = data[generator.permutation(40)[:32]].reshape(4, 8, DIMENSIONS).mean(1)
        a2, b2, q = scalars(drawn[None], np.full(4, 0.25))
        for meter in (plain, aware):
            meter.add({"all": estimate(float(a2[0]), float(b2[0]), q)}, samples=32)
    assert "without replacement" in (plain.estimate().reason or "")
    noise = aware.estimate()
    truth = float(data.var(0, ddof=1).sum())
    assert noise.signal == pytest.approx(0.02, rel=0.1)
    assert noise.variance == pytest.approx(truth, rel=0.05)
    assert noise.ratio == pytest.approx(truth * (1 / 32 - 1 / 40) / 0.02, rel=0.15)


def test_groups_are_summed_before_the_ratio() -> None:
    meter = NoiseMeter()
    for i in range(10):
        meter.add({"a": Estimate(4.0 + 0.1 * (-1) ** i, 1.0), "b": Estimate(1.0, 9.0)}, samples=10)
    noise = meter.estimate()
    a, b = noise.groups
    assert (a.name, a.variance, b.name, b.variance) == ("a", pytest.approx(10), "b", pytest.approx(90))
    assert noise.batch_size == pytest.approx(100 / noise.signal)
    assert noise.signal == pytest.approx(a.signal + b.signal)


def test_too_few_windows_give_no_value() -> None:
    meter = NoiseMeter()
    for i in range(7):
        meter.add({"all": Estimate(1.0 + 0.01 * i, 1.0)}, samples=8)
    assert meter.estimate().reason == "7 windows measured; 8 needed"
    assert meter.estimate().batch_size is None
    meter.leave_out("it was raining")
    assert meter.estimate().reason == "7 windows measured; 8 needed (1 left out: it was raining)"
    meter.add({"all": Estimate(1.0, 1.0)}, samples=8)
    assert meter.estimate().determined


def test_a_saved_meter_resumes_bit_for_bit() -> None:
    normal = random.Random(8).gauss
    found = [Estimate(normal(1, 1), normal(3, 1)) for _ in range(40)]
    one, two = NoiseMeter(0.95), NoiseMeter(0.95)
    for each in found[:20]:
        one.add({"a": each}, samples=8)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for each in found[20:]:
        one.add({"a": each}, samples=8)
        two.add({"a": each}, samples=8)
    assert one.estimate() == two.estimate()
    assert one.state_dict() == two.state_dict()
    with pytest.raises(InputError, match=r"has beta=0.95, but this one has beta=0.9"):
        NoiseMeter(0.9).load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    "change", [{"windows": None}, {"total": [1.0, 2.0]}, {"groups": [1]}, {"groups": {"a": [1.0]}}]
)
def test_a_damaged_state_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    saved, meter = NoiseMeter(), NoiseMeter()
    for _ in range(3):
        saved.add({"a": Estimate(1.0, 2.0)}, samples=8)
    state = saved.state_dict() | {"passed": 7} | change
    before = meter.state_dict()
    with pytest.raises(InputError, match="The saved NoiseMeter is incomplete"):
        meter.load_state_dict(state)
    del state[next(iter(change))]
    with pytest.raises(InputError, match="The saved NoiseMeter is incomplete"):
        meter.load_state_dict(state)
    assert meter.state_dict() == before


@pytest.mark.parametrize("beta", [1e-20, 0.05, 0.33])
def test_an_average_over_fewer_than_two_windows_has_no_interval(beta: float) -> None:
    meter = NoiseMeter(beta)
    for number in range(20):
        meter.add({"a": Estimate(2.0 + number % 3, 3.0)}, samples=8)
    noise = meter.estimate()
    assert (noise.batch_size, noise.low, noise.high) == (None, 0.0, math.inf)
    assert noise.reason == "the average remembers fewer than 2 windows: pass a beta above 1/3"


def test_wrong_input_is_refused() -> None:
    with pytest.raises(InputError, match="differences between micro-batches"):
        estimate(1.0, 1.0, 1.0)
    with pytest.raises(InputError, match="differences between micro-batches"):
        homogeneous_estimate(1.0, 1.0, [1.0], [4])
    with pytest.raises(InputError, match="0 < beta < 1"):
        NoiseMeter(1.0)
    with pytest.raises(InputError, match="0 < beta < 1"):
        NoiseMeter("0.9")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="every=0"):
        NoiseMeter(every=0)
    with pytest.raises(InputError, match="estimates must be finite"):
        NoiseMeter().add({"all": Estimate(math.nan, 1.0)}, samples=8)
    meter = NoiseMeter()
    meter.add({"all": Estimate(1.0, 1.0)}, samples=8)
    with pytest.raises(InputError, match="Make a new NoiseMeter"):
        meter.add({"other": Estimate(1.0, 1.0)}, samples=8)
    with pytest.raises(InputError, match="positive numbers"):
        noise_over_run([], batch_size=8)


def test_the_mean_noise_scale_of_a_run_predicts_its_samples() -> None:
    """Samples for the same progress with another batch: the sum over stretches equals one mean for all."""
    scales, samples, batch, other = [50.0, 400.0, 2000.0], [1000.0, 3000.0, 6000.0], 64.0, 1024.0
    progress = [n / (1 + batch / b) for n, b in zip(samples, scales, strict=True)]
    needed = sum(p * (1 + other / b) for p, b in zip(progress, scales, strict=True))
    mean = noise_over_run(scales, batch_size=batch, samples=samples)
    assert sum(progress) * (1 + other / mean) == pytest.approx(needed, rel=1e-12)


def test_the_formula_gives_the_best_number_of_micro_batches() -> None:
    options = {
        "noise": 900.0,
        "microbatch_size": 8,
        "microbatch_seconds": 0.02,
        "update_seconds": 0.5,
        "ranks": 2,
    }
    best = math.sqrt(0.5 / 0.02 * 900 / 16)
    times = {k: relative_time(k, **options) for k in (best * 0.97, best, best * 1.03)}
    assert min(times, key=lambda k: times[k]) == best
    assert relative_time(1, **options) == 1
    assert relative_time(4, **{**options, "noise": math.inf}) == pytest.approx((0.02 + 0.125) / 0.52)
    assert relative_time(4, **{**options, "noise": 0.0, "update_seconds": 0.0}) == pytest.approx(4)
