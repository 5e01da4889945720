"""`--quick` takes less than a minute on any recipe: slow recipes have shorter runs, and a note states it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from superbatch.lab.recipes import Recipe
from superbatch.lab.studies import quick
from superbatch.lab.studies.study import Options, study
from tests.studies import own_recipe

PLANE = f"{own_recipe.__file__}:plane"
EACH = 0.0001
"""Simulated seconds of a sample. Nothing waits for them."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the samples of each loss, and patch the clock so that only samples advance it."""
    seen: list[int] = []

    def seconds_of(run: Callable[[], object]) -> float:
        before = sum(seen)
        run()
        return (sum(seen) - before) * EACH

    monkeypatch.setattr(quick, "seconds_of", seconds_of)
    return seen


def counting(seen: list[int]) -> Recipe:
    """Return a recipe that counts its samples."""
    plane = own_recipe.plane()

    def loss_fn(model: Any) -> Any:
        fast = plane.loss_fn(model)

        def loss(batch: dict[str, Any]) -> Any:
            seen.append(len(batch["x"]))
            return fast(batch)

        return loss

    return replace(plane, loss_fn=loss_fn, updates=1000)


@pytest.mark.parametrize(
    ("name", "batch_size", "each"),
    [("critical-batch", 8, 1e-3), ("grow-batch", 2, 4e-4), ("splits", 240, 4e-4), ("momentum", 16, 3e-4)],
)
@pytest.mark.sampled(2)
def test_runs_of_a_slow_recipe_are_made_shorter(
    name: str, batch_size: int, each: float, seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.studies.test_quick.EACH", each)
    report = study(name, counting(seen), Options(quick=True, runs=2, batch_size=batch_size))
    assert 20 < sum(seen) * each < 60, "the seconds include the pilot run"
    (note,) = [note for note in report.notes if "--quick" in note]
    assert "in each run, so that all runs end within a minute on this machine" in note
    assert "samples" not in report.command, "it was not requested"


def test_runs_that_are_short_enough_keep_their_length(seen: list[int]) -> None:
    report = study("critical-batch", counting(seen), Options(quick=True, runs=1, batch_size=10))
    assert sum(seen) * EACH < 30, "the premise: time suffices"
    assert not [note for note in report.notes if "--quick" in note]
    assert report.setting["branches of"] == "6,000"


def test_a_recipe_too_slow_for_any_length_is_reported(
    seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.studies.test_quick.EACH", 1.0)
    report = study("critical-batch", counting(seen), Options(quick=True, runs=2, batch_size=2))
    assert any("the fewest that are meaningful" in note for note in report.notes)
    assert report.setting["branches of"] == "128"


def test_a_length_from_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "SECONDS", 0.001)
    report = study("critical-batch", PLANE, Options(quick=True, runs=1, batch_size=2, samples=500))
    assert not [note for note in report.notes if "--quick" in note]
    assert report.setting["branches of"] == "500"


@pytest.mark.parametrize(("fixed", "each"), [(0.0, 0.01), (1.0, 0.01), (0.0, 1e-6), (3.0, 1e-6), (50.0, 1.0)])
def test_the_length_fits_the_time(fixed: float, each: float) -> None:
    """Costs per sample are constant. If even the shortest run does not fit, it is returned."""
    asked: list[int] = []

    def cost(samples: int) -> float:
        asked.append(samples)
        return fixed + each * samples

    samples, fits = quick.affordable(cost, least=100, most=10_000, runs=2)
    pilot = sum(fixed + each * count for count in asked)
    assert 100 <= samples <= 10_000
    assert fits == (2 * (fixed + 100 * each) <= 40.0)
    if fits:
        assert 2 * (fixed + each * samples) + pilot <= 60.0
    if samples < 10_000:
        assert 2 * (fixed + each * samples) > 10.0, "available time is used"
