"""Verdicts of the noise meter on trainings with and without independent windows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import InputError
from superbatch.noise import NoiseMeter
from superbatch.noise.independence import IndependenceTest
from superbatch.noise.meter import estimate
from superbatch.results.noise import Independence, Noise
from superbatch.torch import Accumulator
from superbatch.torch.tuning.independence import independence_at_rest
from tests.torch import independence_ranks
from tests.torch.two_ranks import found_by_both

K, SIZE, CLUSTERS, INPUTS = 8, 8, 10, 20


def batch(draw: torch.Generator, kind: str, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Samples from all clusters, from two of them (as from two documents) or from one per micro-batch."""
    count = K * SIZE
    if kind == "alike":
        two = torch.randperm(CLUSTERS, generator=draw)[:2]
        which = two[torch.randint(2, (count,), generator=draw)]
    elif kind == "in turn":
        which = (torch.arange(K) + torch.randint(CLUSTERS, (1,), generator=draw)).repeat_interleave(SIZE)
        which = which % CLUSTERS
    else:
        which = torch.randint(CLUSTERS, (count,), generator=draw)
    x = centres[which] + torch.randn(count, INPUTS, generator=draw)
    noisy = torch.rand(count, generator=draw) < 0.2
    return x, torch.where(noisy, torch.randint(CLUSTERS, (count,), generator=draw), which)


class Training:
    """Small network, trained at one rate on windows of one kind."""

    def __init__(self, seed: int) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(CLUSTERS, INPUTS, generator=self.draw)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(INPUTS, 24), nn.Tanh(), nn.Linear(24, CLUSTERS))

    def loss(self, mb: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.model(mb[0]), mb[1])

    def batches(self, kind: str) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield batch(self.draw, kind, self.centres)

    def run(self, kind: str, rate: float, windows: int = 150) -> Noise:
        sgd, meter = torch.optim.SGD(self.model.parameters(), rate), NoiseMeter(every=1)
        accumulate = Accumulator(
            self.model, sgd, self.loss, microbatch_size=SIZE, observers=[meter], check=False
        )
        for each in itertools.islice(self.batches(kind), windows):
            accumulate(each)
        return meter.estimate()

    def at_rest(self, kind: str, **options: Any) -> Independence:
        options = {"microbatch_size": SIZE, "check": False} | options
        return independence_at_rest(self.model, self.loss, self.batches(kind), **options)


def trained(seed: int, kind: str, rate: float) -> Noise:
    return Training(seed).run(kind, rate)


def verdicts(kind: str, rate: float, seeds: range) -> list[Any]:
    found = [trained(seed, kind, rate).independence for seed in seeds]
    return [None if each is None else each.verdict for each in found]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rate", [0.05, 0.5, 2.0])
def test_shuffled_windows_pass_at_every_rate(rate: float) -> None:
    assert verdicts("independent", rate, range(4)) == [None] * 4


def with_restarts(seed: int, windows: int = 200, *, hidden: int = 0) -> Independence:
    """Train Adam at a large rate, restarted after every 10 updates, on windows of independent draws.

    The model is linear, or has a layer of `hidden` units.
    """
    torch.manual_seed(seed)
    draw, inputs, size = torch.Generator().manual_seed(seed), 20, 64
    truth, model = torch.randn(inputs, generator=draw), nn.Linear(inputs, 1)
    if hidden:
        model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    adam = torch.optim.Adam(model.parameters(), 0.2)
    restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(adam, 10)
    test = IndependenceTest()
    for _ in range(windows):
        x = torch.randn(K * size, inputs, generator=draw)
        y = torch.tanh(x @ truth / 3) + 0.1 * torch.randn(K * size, generator=draw)
        losses = (model(x)[:, 0] - y).square().view(K, size).mean(1)
        adam.zero_grad()
        losses.mean().backward()
        adam.step()
        restarts.step()
        off = losses.detach().double() - test.centre
        mean, squares = float(off.mean()), float((off / K).square().sum())
        test.add(test.centre + mean, estimate(squares, mean * mean, 1 / K).variance)
    return test.result()


def test_restarts_of_the_rate_are_not_called_shared_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 of 20 trainings get the verdict; by the intervals alone, as in the mutant, 19 of 20 do."""
    assert [with_restarts(seed).verdict for seed in range(4)] == [None] * 4
    monkeypatch.setattr("superbatch.noise.independence._STILL", (4 / 3, -1 / 3))
    assert [with_restarts(seed).verdict for seed in range(4)] == ["shared"] * 4


@pytest.mark.slow
def test_restarts_in_twenty_trainings() -> None:
    """Figures of docs/noise.md, also for a network whose loss jumps within an update."""
    assert [with_restarts(seed).verdict for seed in range(20)].count("shared") == 0
    for windows, most in ((200, 2), (600, 13)):
        found = [with_restarts(seed, windows, hidden=16).verdict for seed in range(20)]
        print(windows, found.count("shared"))
        assert found.count("shared") <= most


def test_windows_of_two_documents_are_detected_while_their_losses_differ() -> None:
    """Found in 12 of 12 trainings at rate 0.05. At 0.5 all clusters are soon learnt: 2 of 12."""
    assert verdicts("alike", 0.05, range(3)) == ["shared"] * 3


@pytest.mark.slow
def test_error_rates_in_trainings() -> None:
    """Of 20 trainings, at most one with shuffled windows gets a verdict."""
    for rate in (0.05, 0.5, 2.0):
        assert verdicts("independent", rate, range(20)).count(None) >= 19
    assert verdicts("alike", 0.05, range(20)).count("shared") >= 18


def test_shared_noise_makes_the_noise_scale_far_too_small() -> None:
    """Premise: shared noise counts as signal, so the withheld value is wrong by a factor above 3."""
    fine, alike = trained(0, "independent", 0.05), trained(0, "alike", 0.05)
    assert alike.batch_size is None
    assert alike.signal > 0
    assert fine.variance / max(fine.signal, 1e-9) > 3 * alike.variance / alike.signal
    assert alike.reason is not None
    assert "share noise" in alike.reason


# -------------------------------------------------------------------------------- gradients of a fixed model


AT_REST = [("independent", 2.0, None), ("alike", 2.0, "shared"), ("in turn", 0.05, "even")]


@pytest.mark.parametrize(("kind", "rate", "verdict"), AT_REST)
def test_gradients_at_rest_reveal_dependence_that_losses_hide(
    kind: str, rate: float, verdict: str | None
) -> None:
    """At rate 2 the losses of all clusters are soon alike and reveal nothing."""
    for seed in range(2):
        training = Training(seed)
        training.run(kind, rate, 60)
        found = training.at_rest(kind)
        assert (found.verdict, found.by, found.triples) == (verdict, "gradients", 20)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rate", "verdict"), [*AT_REST, ("alike", 0.05, "shared")])
def test_error_rates_at_rest(kind: str, rate: float, verdict: str | None) -> None:
    found: list[str | None] = []
    for seed in range(12):
        training = Training(seed)
        training.run(kind, rate, 60)
        found.append(training.at_rest(kind).verdict)
    assert found.count(verdict) >= 11, found


def test_the_effective_noise_scale_includes_shared_noise() -> None:
    """The gradient 2 (w - mean y) of one parameter has mean 2 and a known variance over windows."""
    draw = torch.Generator().manual_seed(1)
    shared, own, count = 0.5, 4.0, 32
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            y = -1 + own * torch.randn(count, 1, generator=draw) + shared * torch.randn(1, generator=draw)
            yield torch.ones(count, 1), y

    found = independence_at_rest(
        model,
        lambda mb: nn.functional.mse_loss(model(mb[0]), mb[1]),
        batches(),
        windows=900,
        microbatch_size=4,
    )
    window = 4 * (own**2 / count + shared**2)  # variance of a window's gradient
    assert found.ratio == pytest.approx(1 + shared**2 * count / own**2, rel=0.15)
    assert found.updates_see == pytest.approx(count * window / 4, rel=0.15)
    assert found.text is not None
    assert f"the effective noise scale is about {found.updates_see:.2g}" in found.text


def test_windows_drawn_without_replacement_are_even_by_design() -> None:
    """Each window draws half of 64 samples without replacement, so windows vary less than by chance."""
    draw = torch.Generator().manual_seed(3)
    x, y = torch.ones(64, 1), torch.randn(64, 1, generator=draw)
    model = nn.Linear(1, 1, bias=False)

    def judged(**options: Any) -> Independence:
        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            while True:
                order = torch.randperm(64, generator=draw)[:32]
                yield x[order], y[order]

        loss = lambda mb: nn.functional.mse_loss(model(mb[0]), mb[1])  # noqa: E731
        return independence_at_rest(model, loss, batches(), windows=600, microbatch_size=4, **options)

    assert judged().verdict == "even", "premise"
    assert judged(data_size=64).verdict is None
    with pytest.raises(InputError, match="data_size=0 is below 1"):
        judged(data_size=0)


def test_two_ranks_find_what_one_process_finds(tmp_path: Path) -> None:
    ranks, alone = found_by_both("tests.torch.independence_ranks", tmp_path), independence_ranks.judged("one")
    assert ranks[0] == ranks[1]
    assert ranks[0]["DDP"]["verdict"] == alone["verdict"] == "shared"
    numbers = [name for name, value in alone.items() if isinstance(value, int | float)]
    assert len(numbers) == 5, "premise"
    for name in numbers:
        assert ranks[0]["DDP"][name] == pytest.approx(alone[name], rel=1e-9)
    assert ranks[0]["FSDP2"].startswith("The parameters are sharded over ranks")


def test_parameters_and_gradients_do_not_change() -> None:
    training = Training(0)
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [p.detach().clone() for p in training.model.parameters()]
    training.at_rest("alike", windows=6)
    for parameter, value in zip(training.model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is not None
        assert bool((parameter.grad == 1).all())


def test_too_few_batches_and_windows_of_one_micro_batch_are_refused() -> None:
    training = Training(0)
    few = list(itertools.islice(training.batches("alike"), 5))
    with pytest.raises(InputError, match=r"The batches end before 60 windows\. Pass more of them"):
        independence_at_rest(training.model, training.loss, few, microbatch_size=SIZE)
    with pytest.raises(InputError, match="could not be measured: one micro-batch has nearly all the weight"):
        training.at_rest("alike", microbatch_size=None)
    assert all(p.grad is None for p in training.model.parameters())


@pytest.mark.parametrize("windows", [0, -3, 2, True, "60", 60.5])
def test_an_invalid_number_of_windows_and_observers_are_refused(windows: Any) -> None:
    with pytest.raises(InputError, match=f"windows={windows!r} is (a|below|too few)"):
        Training(0).at_rest("independent", windows=windows)
    with pytest.raises(InputError, match="Leave observers= out"):
        Training(0).at_rest("independent", observers=[NoiseMeter()])
