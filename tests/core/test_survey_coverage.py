"""Simulated rates of suggestions of surveys: share with a suggestion, share far off."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from superbatch.results.survey import Suggestions
from superbatch.tuning.survey import Sweep, averaged
from superbatch.tuning.survey_suggestions import _Points, _with_ranges  # pyright: ignore[reportPrivateUsage]  (the mutant)

RULES = ("onset", "minimum", "steepest")
FAR = 0.25
"""Decades from the rule on the curve without noise."""

CURVES: Mapping[str, dict[str, float]] = {
    "deep valley": {},
    "falls by a fifth": {"rest": 1.84},
    "broad minimum": {"rest": 1.0, "speed": 30.0, "breaks": 3.0},
}


def learner(
    *, start: float = 2.3, rest: float = 0.05, speed: float = 3.0, breaks: float = 1.0
) -> Callable[[float], float]:
    """Return the loss of a model that trains while the rate grows, and diverges at a high rate."""
    done = 0.0

    def loss(rate: float) -> float:
        nonlocal done
        done += rate * speed
        return rest + (start - rest) * math.exp(-done) + start * (rate / breaks) ** 3

    return loss


def survey(loss: Callable[[float], float], points: int, noise: float, draw: random.Random) -> Any:
    sweep = Sweep("lr", 1e-6, 10.0, points)
    for rate in sweep.values:
        if not sweep.add(loss(rate) * draw.lognormvariate(0, noise)):
            break
    return sweep.report()


def rates(found: list[Suggestions], exact: Suggestions) -> dict[str, tuple[float, float]]:
    """Return for each rule the share of surveys with a suggestion and the share of suggestions far off."""

    def of(rule: str) -> tuple[float, float]:
        values = [value for each in found if (value := getattr(each, rule)) is not None]
        off = [value for value in values if abs(math.log10(value / getattr(exact, rule))) > FAR]
        return len(values) / len(found), len(off) / len(found)

    return {rule: of(rule) for rule in RULES}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("name", list(CURVES))
def test_suggestions_are_seldom_far_off(name: str, noise: float) -> None:
    """Target: 5 % of surveys (10 % at a broad minimum); the bounds add 3 % or more for 60 runs."""
    draw = random.Random(4)
    exact = survey(learner(**CURVES[name]), 100, 0.0, draw).suggestions
    found = [survey(learner(**CURVES[name]), 100, noise, draw).suggestions for _ in range(60)]
    for rule, (suggested, off) in rates(found, exact).items():
        assert off <= (0.18 if (name, rule) == ("broad minimum", "minimum") else 0.08), (rule, suggested)
    if name == "deep valley" and noise <= 0.1:
        assert all(suggested > 0.9 for suggested, _ in rates(found, exact).values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("points", [40, 100])
def test_a_flat_loss_seldom_suggests_anything(points: int) -> None:
    """Target: 5 %; the bound adds 3 % for 200 runs."""
    draw = random.Random(5)
    found = [survey(lambda _: 2.3, points, 0.1, draw).suggestions for _ in range(200)]
    assert sum(each.reason is None for each in found) <= 0.08 * len(found)


@pytest.mark.slow
def test_a_flat_loss_of_many_points_and_heavy_tails_seldom_suggests_anything() -> None:
    draw, named = random.Random(6), 0
    for _ in range(100):
        sweep = Sweep("lr", 1e-6, 10.0, 400)
        for _ in sweep.values:
            tail = draw.gauss(0, 1) / math.sqrt(draw.gammavariate(1.5, 2) / 3) / math.sqrt(3)  # t(3)
            if not sweep.add(2.3 * math.exp(0.1 * tail)):
                break
        named += sweep.report().suggestions.reason is None
    assert named <= 10


def test_the_onset_does_not_move_with_the_noise() -> None:
    """Noise of 0.3 instead of 0.02 would move the middle of the longest descent by 0.5 decades."""
    draw, places = random.Random(7), []
    for noise in (0.02, 0.3):
        found = [survey(learner(), 100, noise, draw).suggestions.onset for _ in range(30)]
        logs = [math.log10(value) for value in found if value is not None]
        assert len(logs) >= 5, "the premise"
        places.append(sum(logs) / len(logs))
    assert abs(places[0] - places[1]) < 0.1


def test_without_the_noise_test_suggestions_are_far_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant makes a suggestion even if its resampled values lie far apart."""
    assert _with_ranges([1.0, 10.0], _Points(0, 0, 0), [_Points(1, 0, 0)] * 100).onset == 1.0
    monkeypatch.setattr("superbatch.tuning.survey_suggestions.WIDEST", math.inf)
    draw = random.Random(4)
    exact = survey(learner(rest=1.84), 100, 0.0, draw).suggestions
    found = [survey(learner(rest=1.84), 100, 0.1, draw).suggestions for _ in range(30)]
    assert rates(found, exact)["onset"][1] > 0.2


def test_the_mean_of_five_surveys_restores_the_suggestions() -> None:
    draw = random.Random(8)
    exact = survey(learner(), 100, 0.0, draw).suggestions
    single = [survey(learner(), 100, 0.3, draw) for _ in range(60)]
    several = [averaged(single[i : i + 5]) for i in range(0, 60, 5)]
    assert rates([each.suggestions for each in single], exact)["onset"][0] < 0.6
    suggested, off = rates(several, exact)["onset"]
    assert (suggested > 0.7, off) == (True, 0)
