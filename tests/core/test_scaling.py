"""Scaling rules for another batch size keep drift, noise and memory per sample."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from superbatch.errors import InputError
from superbatch.lab.report.json import to_json
from superbatch.results.noise import Noise
from superbatch.results.scaling import Scaling
from superbatch.tuning.noise_range import noise_range
from superbatch.tuning.scaling import RULES, gain, half_life, scale, scale_config, scaled_beta, warmup_updates
from tests.report_json import from_json

kappas = st.floats(1e-3, 1e3)
ratios = st.floats(1e-3, 1e6)
ADAMW = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@given(kappas, ratios)
def test_the_gain_is_the_ratio_of_the_best_rates(kappa: float, ratio: float) -> None:
    """AdaScale's gain and McCandlish's lr(B) = lr_max / (1 + B_noise / B) are one function."""

    def best(batch: float) -> float:
        return 1 / (1 + ratio / batch)  # in units of the base batch

    assert gain(kappa, ratio) == pytest.approx(best(kappa) / best(1.0), rel=1e-12)


@given(kappas, kappas, ratios)
def test_gains_chain(first: float, second: float, ratio: float) -> None:
    both = gain(first, ratio) * gain(second, ratio / first)
    assert both == pytest.approx(gain(first * second, ratio), rel=1e-9)


@given(st.floats(1, 1e3), ratios)
def test_the_gain_lies_between_one_and_kappa(kappa: float, ratio: float) -> None:
    assert 1 - 1e-12 <= gain(kappa, ratio) <= kappa * (1 + 1e-12)
    assert gain(kappa, math.inf) == kappa
    assert gain(kappa, 0.0) == 1.0


def second_moment(lr: float, batch: float, samples: float, *, h: float, start: float = 4.0) -> float:
    """Return the exact E x^2 of SGD after `samples` on h x^2 / 2; gradient noise has variance 1 / batch."""
    value = start
    for _ in range(round(samples / batch)):
        value = (1 - lr * h) ** 2 * value + lr * lr / batch
    return value


@pytest.mark.parametrize("kappa", [4, 16, 64])
def test_linear_scaling_keeps_the_trajectory_of_sgd(kappa: float) -> None:
    lr, h = 0.002, 0.3
    new = scale({"lr": lr}, optimizer="sgd", kappa=kappa).after["lr"]
    assert new == kappa * lr
    for samples in (640, 6400):
        base, scaled = second_moment(lr, 1, samples, h=h), second_moment(new, kappa, samples, h=h)
        # (1 - k a)^(n/k) and (1 - a)^n differ by about n k a^2 / 2 relatively, their squares by twice that.
        # The noise terms differ by less: k a / 2 relatively.
        a = lr * h
        assert scaled == pytest.approx(base, rel=1.1 * (samples * kappa * a * a + kappa * a / 2))


@pytest.mark.parametrize("kappa", [4, 16, 64])
def test_the_square_root_rule_would_lower_the_noise_of_sgd(kappa: float) -> None:
    """The rule would scale the std of x by 0.71, 0.5, 0.35, so it raises an error."""
    lr, h, samples = 0.002, 0.3, 100_000
    base = second_moment(lr, 1, samples, h=h, start=0.0)
    root = second_moment(lr * math.sqrt(kappa), kappa, samples, h=h, start=0.0)
    assert math.sqrt(root / base) == pytest.approx(kappa**-0.25, rel=0.01)
    with pytest.raises(InputError, match="lowers the noise of SGD"):
        scale({"lr": lr}, optimizer="sgd", kappa=kappa, rule="sqrt")


@given(st.floats(0.5, 0.99999), st.floats(1 / 64, 64), st.integers(1, 10_000))
def test_beta2_keeps_its_half_life_in_samples(beta: float, kappa: float, batch: int) -> None:
    new = scaled_beta(beta, kappa)
    assert 0 < new < 1
    assert half_life(new, kappa * batch) == pytest.approx(half_life(beta, batch), rel=1e-6)


@pytest.mark.parametrize(
    ("beta", "batch", "to", "expected"),
    [
        (0.95, 512, 1, 0.9999),
        (0.999, 32, 1, 0.999969),
        (0.999, 32, 512, 0.9841),
        (0.999, 32, 2048, 0.9380),
    ],
)
def test_betas_of_the_paper(beta: float, batch: int, to: int, expected: float) -> None:
    """Betas of Marek et al. 2025, arXiv:2507.07101."""
    digits = len(str(expected)) - 2
    assert round(scaled_beta(beta, to / batch), digits) == expected


def adam_steps(batch: int, beta2: float, *, updates: int, seed: int) -> float:
    """Return the RMS of Adam's updates (beta1 0.9) on coordinates with a gradient in 1 of 512 samples."""
    random = np.random.default_rng(seed)
    count, beta1, total = 400, 0.9, 0.0
    m, v = np.zeros(count), np.zeros(count)
    for update in range(1, updates + 1):
        hits = random.binomial(batch, 1 / 512, count)
        gradient = np.sqrt(hits) * random.standard_normal(count) / batch
        m += (1 - beta1) * (gradient - m)
        v += (1 - beta2) * (gradient**2 - v)
        if update > updates // 2:
            hat = v / (1 - beta2**update)
            total += float(np.mean((m / (1 - beta1**update) / (np.sqrt(hat) + 1e-12)) ** 2))
    return math.sqrt(total / (updates - updates // 2))


def test_a_kept_half_life_keeps_the_steps_of_rare_coordinates() -> None:
    """Argument of Marek et al.: an unscaled beta2 makes the steps of a small batch collapse."""
    large = adam_steps(512, 0.95, updates=3000, seed=0)
    left_alone = adam_steps(1, 0.95, updates=20_000, seed=1)
    kept = adam_steps(1, scaled_beta(0.95, 1 / 512), updates=40_000, seed=2)
    assert (left_alone, large) == pytest.approx((0.050, 0.223), rel=0.05)
    assert kept == pytest.approx(large, rel=0.1), "0.229 for a well-estimated second moment"


@given(st.floats(1 / 64, 64), st.sampled_from(RULES["adamw"]), ratios)
def test_adamw_decays_weights_as_fast_per_sample(kappa: float, rule: str, ratio: float) -> None:
    done = scale(ADAMW, optimizer="adamw", kappa=kappa, ratio=ratio, rule=rule)  # pyright: ignore[reportArgumentType]
    before, after = done.before, done.after
    assert after["lr"] * after["weight_decay"] / kappa == pytest.approx(before["lr"] * before["weight_decay"])
    assert after["eps"] == pytest.approx(before["eps"] / math.sqrt(kappa))
    if rule in ("sqrt", "power"):
        assert after["weight_decay"] == pytest.approx(0.1 * math.sqrt(kappa))
    if rule == "keep":
        assert after["weight_decay"] == pytest.approx(0.1 * kappa)


def test_coupled_weight_decay_and_momentum_are_kept() -> None:
    for optimizer in ("sgd", "adam"):
        done = scale({"lr": 0.1, "weight_decay": 0.1}, optimizer=optimizer, kappa=16)
        assert done.after["weight_decay"] == 0.1, optimizer
    assert scale({"lr": 0.1, "momentum": 0.9}, optimizer="sgd", kappa=16).after["momentum"] == 0.9


@given(st.floats(1 / 64, 64), ratios)
def test_scaling_up_and_down_restores_the_settings(kappa: float, ratio: float) -> None:
    for rule in RULES["adamw"]:
        there = scale(ADAMW, optimizer="adamw", kappa=kappa, ratio=ratio, rule=rule)
        back = scale(there.after, optimizer="adamw", kappa=1 / kappa, ratio=ratio / kappa, rule=rule)
        assert back.after == pytest.approx(ADAMW, rel=1e-6)


def test_the_power_rule_stays_valid_unlike_the_first_order_rule() -> None:
    """1 - kappa (1 - beta1) is -0.1 at kappa = 11; beta1 ** kappa is not."""
    assert 1 - 11 * (1 - 0.9) < 0
    assert 0 < scale(ADAMW, optimizer="adamw", kappa=11, rule="power").after["beta1"] < 1
    assert scale(ADAMW, optimizer="adamw", kappa=11).after["beta1"] == 0.9, "kept by default"


def test_the_default_rule_depends_on_optimizer_and_noise() -> None:
    assert scale({"lr": 1.0}, optimizer="sgd", kappa=4).rule == "linear"
    assert scale({"lr": 1.0}, optimizer="adam", kappa=4).rule == "sqrt"
    known = scale({"lr": 1.0}, optimizer="adam", kappa=4, ratio=4.0)
    assert (known.rule, known.gain, known.rate) == ("gain", 2.5, math.sqrt(2.5))


def test_the_report_states_its_limits() -> None:
    linear = scale({"lr": 0.1, "momentum": 0.9}, optimizer="sgd", kappa=64, ratio=16.0, rule="linear")
    said = " ".join(linear.limits)
    assert "4 times the noise scale" in said
    assert f"{64 / gain(64, 16.0):.3g} times the best rate" in said
    assert "h below 0.594" in said, "2 (1 + m) / lr"
    assert "Shorten warm-up and schedule" in said
    adam = scale({"lr": 1e-3}, optimizer="adam", kappa=64, ratio=16.0)
    assert any("signal is stronger than the noise" in each for each in adam.limits)
    unknown = scale({"lr": 1e-3}, optimizer="adam", kappa=64)
    assert any("noise scale is not known" in each for each in unknown.limits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "gain"}, "needs a noise scale. Measure it"),
        ({"rule": "linear"}, "multiplies the noise of the weights"),
        ({"rule": "cubic"}, "there is no such rule"),
        ({"optimizer": "lion"}, "optimizer='lion' is unknown"),
        ({"kappa": 0}, "kappa=0"),
        ({"kappa": math.inf}, "kappa=inf"),
        ({"settings": {"lr": math.nan}}, "lr=nan"),
        ({"settings": {"lr": 1.0, "beta2": 1.0}}, "beta2|beta=1.0|between 0 and 1"),
        ({"settings": {"lr": 1.0, "trust": 1.0}}, "the setting 'trust'"),
    ],
)
def test_settings_that_cannot_be_scaled_raise(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"settings": {"lr": 1e-3}, "optimizer": "adam", "kappa": 4} | change
    with pytest.raises(InputError, match=message):
        scale(arguments.pop("settings"), **arguments)  # pyright: ignore[reportArgumentType]


def test_configurations_of_other_libraries() -> None:
    optax = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "mask": None}
    assert scale_config({"eps_root": 1e-16}, 512, 128, optimizer="adam") == {"eps_root": 4e-16}, (
        "as eps squared"
    )
    new = scale_config(optax, 512, 128, optimizer="adamw")
    ours = scale(ADAMW, optimizer="adamw", kappa=1 / 4).after
    assert list(new) == list(optax), "order and other entries are kept"
    assert [new[name] for name in ("learning_rate", "b1", "b2", "eps", "weight_decay")] == list(ours.values())
    keras = {"learning_rate": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": None}
    assert scale_config(keras, 32, 64, optimizer="sgd") == keras | {"learning_rate": 0.02}
    with pytest.raises(InputError, match="is not a number"):
        scale_config({"learning_rate": lambda count: 0.1}, 32, 64, optimizer="sgd")
    with pytest.raises(InputError, match="given twice, under two names"):
        scale_config({"learning_rate": 0.1, "lr": 0.1}, 32, 64, optimizer="sgd")
    by_gain = scale_config({"learning_rate": 0.1}, 32, 128, optimizer="sgd", noise=96.0)
    assert by_gain["learning_rate"] == pytest.approx(0.1 * gain(4, 3.0))


def test_an_undetermined_noise_scale_is_not_used() -> None:
    noise = Noise(
        batch_size=None,
        low=50.0,
        high=math.inf,
        signal=0.1,
        variance=9.0,
        windows=20,
        effective_windows=20.0,
        samples_per_window=64.0,
        groups=(),
        reason="signal not distinguishable from noise",
    )
    assert noise_range(noise).low == 50.0
    assert scale_config({"learning_rate": 0.1}, 32, 128, optimizer="sgd", noise=noise)["learning_rate"] == 0.4
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(InputError, match="is not a noise scale"):
            noise_range(wrong)


def test_warmup_keeps_its_samples() -> None:
    assert [warmup_updates(1000, kappa) for kappa in (0.5, 1, 8, 1e6)] == [2000, 1000, 125, 1]


def test_the_report_survives_a_json_round_trip() -> None:
    done = scale(ADAMW, optimizer="adamw", kappa=3, ratio=2.0)
    assert from_json(Scaling, to_json(done)) == done
