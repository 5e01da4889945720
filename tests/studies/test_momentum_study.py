"""The study of momentum: theory, direction of the effects, and conclusions."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from superbatch.lab.report.study import Study
from superbatch.lab.studies import study_momentum
from tests.studies import own_recipe
from tests.studies.planted import METRIC, around, planted


@pytest.mark.parametrize(
    ("lr", "momentum", "h"), [(0.01, 0.0, 1.0), (0.05, 0.9, 2.0), (0.001, 0.99, 1.0), (1.8, 0.9, 1.0)]
)
def test_the_variance_of_heavy_ball_solves_its_covariance_equation(
    lr: float, momentum: float, h: float
) -> None:
    """Compare with the stationary covariance of (v, x) -> (m v + h x + n, x - lr v')."""
    step = torch.tensor([[momentum, h], [-lr * momentum, 1 - lr * h]], dtype=torch.float64)
    noise = torch.tensor([[1.0, -lr]], dtype=torch.float64)
    kicked = noise.T @ noise
    stay = torch.linalg.solve(
        torch.eye(4, dtype=torch.float64) - torch.kron(step, step), kicked.flatten()
    ).reshape(2, 2)
    assert torch.allclose(step @ stay @ step.T + kicked, stay), "the premise: it is stationary"
    assert study_momentum.heavy_ball_variance(lr, momentum, h, 1.0) == pytest.approx(
        float(stay[1, 1]), rel=1e-8
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_variance_of_heavy_ball_equals_that_of_torch(momentum: float) -> None:
    """200,000 chains of torch.optim.SGD at 4 nearly independent times give a standard error of 0.16 %."""
    torch.manual_seed(0)
    h, lr, noise = 2.0, 0.2 * (1 - momentum), 0.5
    x = torch.zeros(200_000, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=lr, momentum=momentum)
    looks = []
    for update in range(1, 201):
        x.grad = (h * x + noise**0.5 * torch.randn_like(x)).detach()
        optimizer.step()
        if update >= 80 and update % 40 == 0:
            looks.append(x.detach().square().mean().item())
    expected = study_momentum.heavy_ball_variance(lr, momentum, h, noise)
    assert sum(looks) / len(looks) == pytest.approx(expected, rel=0.01)


def test_momentum_does_not_lower_the_noise_at_a_fixed_effective_rate() -> None:
    variance = partial(study_momentum.heavy_ball_variance, curvature=1.0, noise=1.0)
    for m in (0.9, 0.99):
        assert variance(0.01 * (1 - m), m) == pytest.approx(variance(0.01, 0.0), rel=0.005)
    # Near the limit of stability momentum does lower it: the numbers of section 5.
    assert [round(variance(1 - m, m), 3) for m in (0.0, 0.9, 0.99)] == [1.0, 0.514, 0.501]
    assert [round(variance(1.8 * (1 - m), m), 2) for m in (0.0, 0.9, 0.99)] == [9.0, 0.94, 0.9]
    assert variance(2.1, 0.0) == math.inf


def test_effects_of_momentum_have_the_right_sign(momentum: Study) -> None:
    facts = {arm.name: arm.facts for arm in momentum.arms}
    assert facts["A"]["updates"] == 16 * facts["D"]["updates"] == facts["F"]["updates"] == 800
    assert facts["F"]["samples"] == 16 * facts["A"]["samples"]
    error = {arm.name: arm.mean("squared error") for arm in momentum.arms}
    assert all(value is not None and value < 0.5 for name, value in error.items() if name in "ABCDF"), error
    lost = error["G"]
    assert lost is not None and not lost < 3 * max(error[name] or 0 for name in "ABCDF"), (
        "the noise of G is too high"
    )
    noise = {arm.name: arm.mean("noise excess") or math.nan for arm in momentum.arms}
    # The large batch at the same rate has a sixteenth of the noise; momentum does not lower it.
    assert noise["F"] < noise["A"] / 4
    assert noise["A"] / 2.5 < noise["C"] < 2.5 * noise["A"]


def conclude_momentum(
    c_noise: float, c_accuracy: float = 97.0, spread: float = 0.05, large: float = 6e-4
) -> str:
    noise = {"A": 1e-2, "B": 1e-2, "C": c_noise, "D": 1e-2, "E": 1e-1, "F": large, "G": 9.0}
    arms = tuple(
        planted(
            name,
            {
                "test accuracy, %": around(c_accuracy if name == "C" else 97.0, 0.0005),
                "noise excess": around(value, spread if name == "C" else 0.05),
            },
            {"updates": 100.0 if name in "DE" else 1600.0},
        )
        for name, value in noise.items()
    )
    return study_momentum.conclude(arms, metric=METRIC, margin=0.5, recipe=own_recipe.plane()).conclusion


def test_momentum_concludes_from_the_numbers() -> None:
    assert conclude_momentum(1e-2).startswith(
        "Momentum 0.99 with lr/(1-m) kept acts like the small batch, not like a large"
    )
    assert conclude_momentum(1e-2 / 199).startswith(
        "Momentum 0.99 with lr/(1-m) kept acts like a large batch"
    )
    assert conclude_momentum(2.5e-3, spread=0.9).startswith("Undecided"), "between both, with much noise"
    assert conclude_momentum(1e-2, c_accuracy=95.0).startswith("Undecided")
    alike = conclude_momentum(1e-2, large=0.9e-2)
    assert alike.startswith("Undecided"), "with equal noise in the large batch there is no verdict"
    assert "no clearly lower noise" in alike
    nothing = tuple(planted(name) for name in "ABCDEFG")
    found = study_momentum.conclude(nothing, metric=METRIC, margin=0.5, recipe=own_recipe.plane())
    assert found.conclusion == "Too few runs were finished to conclude anything."
