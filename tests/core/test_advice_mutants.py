"""Wrong rules, schedules and advice: a test of the other files must fail for each.

Each case patches in one mutant and runs one test, to show that this test can fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from superbatch.tuning import adaptive, adascale, advice, growing, scaling
from superbatch.tuning.growing import grow_batch
from tests.core import test_adaptive, test_advice, test_growing, test_scaling

Patch = pytest.MonkeyPatch


def inner(test: Any) -> Callable[..., None]:
    """Return a test without its hypothesis decorator; this file gives the examples."""
    return test.hypothesis.inner_test


def linear_whatever_the_noise(patch: Patch) -> None:
    patch.setattr(test_scaling, "gain", lambda kappa, ratio: kappa)
    inner(test_scaling.test_the_gain_is_the_ratio_of_the_best_rates)(8.0, 4.0)


def beta2_as_it_was(patch: Patch) -> None:
    patch.setattr(test_scaling, "scaled_beta", lambda beta, kappa: beta)
    inner(test_scaling.test_beta2_keeps_its_half_life_in_samples)(0.99, 8.0, 32)


def beta2_to_first_order(patch: Patch) -> None:
    patch.setattr(test_scaling, "scaled_beta", lambda beta, kappa: 1 - kappa * (1 - beta))
    test_scaling.test_betas_of_the_paper(0.999, 32, 2048, 0.9380)


def weight_decay_as_it_was(patch: Patch) -> None:
    change = scaling._change

    def mutant(name: str, value: float, *others: Any) -> float:
        return value if name == "weight_decay" else change(name, value, *others)

    patch.setattr(scaling, "_change", mutant)
    inner(test_scaling.test_adamw_decays_weights_as_fast_per_sample)(4.0, "sqrt", 100.0)


def square_root_for_sgd(patch: Patch) -> None:
    patch.setattr(scaling, "rate_factor", lambda optimizer, rule, kappa, ratio: math.sqrt(kappa))
    test_scaling.test_linear_scaling_keeps_the_trajectory_of_sgd(16)


def rounding_left_alone(patch: Patch) -> None:
    patch.setattr(growing.GrowingBatch, "rate", lambda self, update: 1.0)
    made = grow_batch(test_growing.cosine(2000), batch=24, microbatch=16, dataset=800)
    inner(test_growing.test_every_update_has_the_scheduled_temperature)(
        (made, test_growing.cosine(2000), 800)
    )


def tails_taken_for_whole_windows(patch: Patch) -> None:
    patch.setattr(growing.GrowingBatch, "_left_in_epoch", lambda self, samples: math.inf)
    made = grow_batch(test_growing.cosine(2000), batch=32, microbatch=16, dataset=808)
    inner(test_growing.test_the_schedule_counts_samples_of_real_windows)(
        (made, test_growing.cosine(2000), 808)
    )


def the_batch_of_the_inverse_rate(patch: Patch) -> None:
    """B0 f instead of B0 / f."""
    wanted = growing.GrowingBatch._target_batch
    patch.setattr(
        growing.GrowingBatch, "_target_batch", lambda self, seen: self.batch**2 / wanted(self, seen)
    )
    test_growing.test_exact_and_approximate_formula_of_the_paper()


def best_steps_without_the_root(patch: Patch) -> None:
    def mutant(*, noise: float, batch: float, microbatch_seconds: float, update_seconds: float) -> float:
        return update_seconds / microbatch_seconds * noise / batch

    patch.setattr(test_advice, "best_steps", mutant)
    inner(test_advice.test_the_best_number_of_steps_minimizes_the_time)(1600.0, 64, 0.1, 0.4)


def no_systematic_error(patch: Patch) -> None:
    patch.setattr(advice, "SYSTEMATIC", 1.0)
    inner(test_advice.test_the_range_covers_every_possible_noise_scale)(500.0, 2.0, 8, 32, 0.5)


def samples_for_free(patch: Patch) -> None:
    """Count only throughput, so that accumulation never loses."""

    def mutant(k: float, *, microbatch_seconds: float, update_seconds: float, **_: Any) -> float:
        return (microbatch_seconds + update_seconds / k) / (microbatch_seconds + update_seconds)

    patch.setattr(advice, "relative_time", mutant)
    test_advice.test_the_verdicts_of_one_device_and_of_a_cluster()


def no_bound_on_changes(patch: Patch) -> None:
    patch.setattr(adaptive, "FACTOR", 1000)
    test_adaptive.test_an_undetermined_noise_scale_keeps_the_length()


def every_change_made(patch: Patch) -> None:
    patch.setattr(adaptive, "CHANGE", 0.0)
    test_adaptive.test_small_changes_are_ignored()


def the_naive_test(patch: Patch) -> None:
    patch.setattr(test_adaptive, "naive_ratio", lambda ratio: ratio)
    test_adaptive.test_the_naive_norm_test_passes_whatever_the_noise()


def cosine_of_whole_batches(patch: Patch) -> None:
    patch.setattr(test_adaptive, "expected_cosine", lambda ratio: 1 / (1 + ratio))
    test_adaptive.test_the_cosine_of_two_halves_has_the_expected_mean(1.0)


def progress_by_updates(patch: Patch) -> None:
    patch.setattr(adascale.AdaScale, "advance", lambda self: setattr(self, "_progress", self._progress + 1))
    test_adaptive.test_adascale_follows_the_schedule_of_the_base_batch()


MUTANTS = [
    linear_whatever_the_noise,
    beta2_as_it_was,
    beta2_to_first_order,
    weight_decay_as_it_was,
    square_root_for_sgd,
    rounding_left_alone,
    tails_taken_for_whole_windows,
    the_batch_of_the_inverse_rate,
    best_steps_without_the_root,
    no_systematic_error,
    samples_for_free,
    no_bound_on_changes,
    every_change_made,
    the_naive_test,
    cosine_of_whole_batches,
    progress_by_updates,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_found(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    with pytest.raises(AssertionError):
        mutant(monkeypatch)
