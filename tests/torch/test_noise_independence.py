"""Trainings whose windows are independent draws, or not: what the noise meter says of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.noise import NoiseMeter
from superbatch.results.noise import Noise
from superbatch.torch import Accumulator

K, SIZE, CLUSTERS, INPUTS = 8, 8, 10, 20


def batch(draw: torch.Generator, way: str, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Samples of clusters: of any; of two of them, as from two documents; or of one in each micro-batch."""
    count = K * SIZE
    if way == "alike":
        two = torch.randperm(CLUSTERS, generator=draw)[:2]
        which = two[torch.randint(2, (count,), generator=draw)]
    elif way == "in turn":
        which = (torch.arange(K) + torch.randint(CLUSTERS, (1,), generator=draw)).repeat_interleave(SIZE)
        which = which % CLUSTERS
    else:
        which = torch.randint(CLUSTERS, (count,), generator=draw)
    x = centres[which] + torch.randn(count, INPUTS, generator=draw)
    noisy = torch.rand(count, generator=draw) < 0.2
    return x, torch.where(noisy, torch.randint(CLUSTERS, (count,), generator=draw), which)


def trained(seed: int, way: str, rate: float, windows: int = 150) -> Noise:
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLUSTERS, INPUTS, generator=draw)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, 24), nn.Tanh(), nn.Linear(24, CLUSTERS))
    accumulate = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), rate),
        lambda part: nn.functional.cross_entropy(model(part[0]), part[1]),
        microbatch_size=SIZE,
        observers=[NoiseMeter(every=1)],
        check=False,
    )
    for _ in range(windows):
        accumulate(batch(draw, way, centres))
    noise = accumulate.noise
    assert noise is not None
    return noise


def verdicts(way: str, rate: float, seeds: range) -> list[Any]:
    found = [trained(seed, way, rate).independence for seed in seeds]
    return [None if each is None else each.verdict for each in found]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rate", [0.05, 0.5, 2.0])
def test_shuffled_windows_pass_at_every_rate(rate: float) -> None:
    assert verdicts("independent", rate, range(4)) == [None] * 4


def test_windows_of_two_documents_are_found_while_their_losses_differ() -> None:
    """12 of 12 at rate 0.05. At 0.5, where all clusters are soon learnt alike, 2 of 12."""
    assert verdicts("alike", 0.05, range(3)) == ["shared"] * 3


@pytest.mark.slow
def test_error_rates_in_trainings() -> None:
    """20 trainings of each: none of the shuffled ones is called anything."""
    for rate in (0.05, 0.5, 2.0):
        assert verdicts("independent", rate, range(20)).count(None) >= 19
    assert verdicts("alike", 0.05, range(20)).count("shared") >= 18


def test_the_noise_scale_of_such_windows_would_have_been_far_too_small() -> None:
    """The premise: shared noise is counted as signal; the value that is withheld is off by more than 3."""
    fine, alike = trained(0, "independent", 0.05), trained(0, "alike", 0.05)
    assert alike.batch_size is None
    assert alike.signal > 0
    assert fine.variance / max(fine.signal, 1e-9) > 3 * alike.variance / alike.signal
    assert alike.reason is not None
    assert "share noise" in alike.reason
