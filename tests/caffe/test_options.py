"""Clipping, L1 and ignored labels against the transcription of Caffe's sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from superbatch.caffe import SmoothedLoss, SolverConfig, parse_solver, rate_schedule
from superbatch.caffe.config import TYPES
from superbatch.errors import InputError, LossSpecError, OptimizerError
from superbatch.torch import Accumulator, Window
from superbatch.torch.caffe import CaffeOptimizer, CaffeRate, loss_weight, softmax_loss, solver
from tests.caffe.reference import DEFAULTS, Reference

IGNORED = 7


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def data_of(sizes: Sequence[int], seed: int = 1, *, ignored: bool = False) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(seed)
    parts = []
    for number, size in enumerate(sizes):
        labels = torch.randint(3, (size,), generator=made)
        if ignored:
            labels[: number + 1] = IGNORED
        parts.append((torch.randn(size, 4, generator=made, dtype=torch.float64), labels))
    return parts


def largest(one: nn.Module, two: nn.Module) -> float:
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def moved(model: nn.Module, seed: int = 0) -> float:
    return largest(model, model_of(seed))


def both(
    config: SolverConfig,
    parts: Sequence[Any],
    *,
    clip: Literal["caffe", "mean"] = "caffe",
    updates: int = 5,
) -> tuple[nn.Module, nn.Module]:
    """Train by the Accumulator and by the reference, with multipliers; return both models."""
    ours, theirs = model_of(), model_of()
    lr_mult, decay_mult = (1.0, 2.0, 0.5, 1.0), (1.0, 0.0, 2.0, 1.0)
    groups = [
        {"params": [p], "lr_mult": rate, "decay_mult": decay}
        for p, rate, decay in zip(ours.parameters(), lr_mult, decay_mult, strict=True)
    ]
    caffe = solver(config, groups, clip=clip)
    entropy = nn.functional.cross_entropy
    accumulate = Accumulator(
        ours, caffe.optimizer, lambda part: entropy(ours(part[0]), part[1]), scheduler=caffe.scheduler
    )
    reference = Reference(theirs, lr_mult, decay_mult, **{name: getattr(config, name) for name in DEFAULTS})
    rate = rate_schedule(config)
    for update in range(updates):
        accumulate(Window(parts))
        losses = [lambda part=part: entropy(theirs(part[0]), part[1]) for part in parts]
        reference.step(losses, rate(update))
    return ours, theirs


@settings(max_examples=25)
@given(
    kind=st.sampled_from(TYPES),
    iter_size=st.integers(1, 5),
    clip=st.sampled_from([-1.0, 0.0, 0.05, 0.5, 100.0]),
    decay=st.sampled_from([0.0, 0.03]),
    norm=st.sampled_from(["L1", "L2"]),
    momentum=st.sampled_from([0.0, 0.9]),
    policy=st.sampled_from(["fixed", "exp", "poly"]),
)
def test_any_solver_equals_caffe(
    kind: Any, iter_size: int, clip: float, decay: float, norm: Any, momentum: float, policy: Any
) -> None:
    config = SolverConfig(
        type=kind,
        base_lr=0.1 if kind != "Adam" else 0.01,
        lr_policy=policy,
        gamma=0.8,
        power=1.5,
        max_iter=6,
        momentum=0.0 if kind in ("AdaGrad", "RMSProp") else momentum,
        weight_decay=decay,
        regularization_type=norm,
        clip_gradients=clip,
        iter_size=iter_size,
        delta=1e-3,
    )
    ours, theirs = both(config, data_of([4] * iter_size))
    # Without gradient and decay the weights do not move.
    assert clip == 0.0 or moved(ours) > 1e-4
    assert largest(ours, theirs) <= 2e-14


def clipped(iter_size: int, bound: float) -> SolverConfig:
    return parse_solver(
        f'base_lr: 0.5 lr_policy: "fixed" momentum: 0.9 clip_gradients: {bound} iter_size: {iter_size}'
    )


def test_caffes_threshold_is_iter_size_times_tighter() -> None:
    """caffe#6199: 4 x 4 differs from the batch of 16, unless the mean is clipped."""
    (whole,) = data_of([16])
    parts = [(whole[0][i : i + 4], whole[1][i : i + 4]) for i in range(0, 16, 4)]
    batch, _ = both(clipped(1, 0.1), [whole])
    as_caffe, caffe = both(clipped(4, 0.1), parts)
    mean, _ = both(clipped(4, 0.1), parts, clip="mean")
    four_times, _ = both(clipped(4, 0.4), parts)
    unclipped, _ = both(clipped(4, -1.0), parts)
    assert largest(batch, unclipped) > 0.1, "the premise: the threshold matters"
    assert largest(as_caffe, caffe) <= 1e-15
    assert largest(as_caffe, batch) > 0.05
    assert largest(mean, batch) <= 1e-15
    assert largest(four_times, batch) <= 1e-7, "a threshold iter_size times as large is equal in float32"


def test_clipping_after_the_division_is_found() -> None:
    """clip="mean" as a mutant: it differs from Caffe."""
    config, parts = clipped(4, 0.1), data_of([4] * 4)
    assert largest(*both(config, parts)) <= 1e-15
    assert largest(*both(config, parts, clip="mean")) > 0.05


@pytest.mark.parametrize("average", ["caffe", "exact"])
def test_ignored_labels(average: Literal["caffe", "exact"]) -> None:
    """Caffe takes a mean of means and counts a micro-batch without labels; "exact" takes the batch's loss."""
    config = parse_solver('base_lr: 0.5 lr_policy: "fixed" momentum: 0.9 iter_size: 4')
    parts = data_of([4] * 4, ignored=True)
    valid = [int((labels != IGNORED).sum()) for _, labels in parts]
    assert valid == [3, 2, 1, 0], "the premise: unequal counts, and one is 0"
    ours, means, batch = model_of(), model_of(), model_of()
    caffe = solver(config, ours.parameters())

    def loss_of(model: nn.Module, part: Any) -> Tensor:
        return softmax_loss(model(part[0]), part[1], ignore_label=IGNORED)

    def accumulator(check: bool) -> Accumulator:
        return Accumulator(
            ours,
            caffe.optimizer,
            lambda part: loss_of(ours, part),
            weight=loss_weight("1", ignore_label=IGNORED, average=average),
            scheduler=caffe.scheduler,
            check=check,
        )

    if average == "caffe":
        with pytest.raises(LossSpecError):
            accumulator(check=True)(Window(parts))
    accumulate = accumulator(check=average == "exact")
    whole = (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
    ones = [1.0] * 4
    of_means = Reference(means, ones, ones, momentum=config.momentum, iter_size=4)
    of_batch = Reference(batch, ones, ones, momentum=config.momentum)
    for _ in range(5):
        update = accumulate(Window(parts))
        mean = of_means.step([lambda part=part: loss_of(means, part) for part in parts], 0.5)
        real = of_batch.step([lambda: loss_of(batch, whole)], 0.5)
        assert update.loss == pytest.approx(mean if average == "caffe" else real, abs=1e-14)
    assert largest(means, batch) > 0.05, "the premise: a mean of means is different"
    assert largest(ours, means if average == "caffe" else batch) <= 1e-14


@pytest.mark.parametrize(
    ("normalization", "divisor"), [("VALID", 5), ("FULL", 12), ("BATCH_SIZE", 4), ("NONE", 1)]
)
def test_normalizations(normalization: Any, divisor: int) -> None:
    scores, labels = torch.randn(4, 3, 3, dtype=torch.float64), torch.full((4, 3), IGNORED)
    labels[0], labels[1, :2] = torch.tensor([0, 1, 2]), torch.tensor([2, 1])
    chances = scores.log_softmax(1)
    total = -sum(chances[i, labels[i, j], j] for i in range(4) for j in range(3) if labels[i, j] != IGNORED)
    loss = softmax_loss(scores, labels, ignore_label=IGNORED, normalization=normalization)
    assert float(loss) == pytest.approx(float(total) / divisor)


def test_a_parameter_without_a_gradient_moves_as_in_caffe() -> None:
    """Caffe uses a zero gradient: decay and momentum move the parameter. A frozen one stays."""
    used, unused, frozen = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(3))
    frozen.requires_grad = False
    text = 'base_lr: 0.5 lr_policy: "fixed" momentum: 0.9 weight_decay: 0.5'
    optimizer = CaffeOptimizer([used, unused, frozen], parse_solver(text))
    for parameter in (used, unused):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert unused[0] == 1 - 0.5 * (1 + 0.5)
    optimizer.zero_grad()
    used.grad = torch.ones_like(used)
    before = unused.detach().clone()
    optimizer.step()
    expected = 0.9 * 0.75 + 0.5 * 0.5 * float(before[0])
    assert float(before[0] - unused.detach()[0]) == pytest.approx(expected, abs=1e-7)
    assert torch.equal(frozen, torch.ones_like(frozen))


def test_the_optimizer_refuses_wrong_arguments() -> None:
    config, layer = parse_solver('base_lr: 0.5 lr_policy: "fixed"'), nn.Embedding(3, 2, sparse=True)
    optimizer = CaffeOptimizer(layer.parameters(), config)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(OptimizerError, match="has a sparse gradient, which Caffe"):
        optimizer.step()
    with pytest.raises(InputError, match=r"clip='sum'.* Pass clip=\"caffe\""):
        solver(config, layer.parameters(), clip="sum")  # pyright: ignore[reportArgumentType]  (the mistake)
    with pytest.raises(InputError, match=r"config is a str, not a SolverConfig.*read_solver"):
        solver("solver.prototxt", layer.parameters())  # pyright: ignore[reportArgumentType]  (the mistake)
    with pytest.raises(InputError, match="lr_mult='2'"):
        solver(config, [{"params": layer.parameters(), "lr_mult": "2"}])
    with pytest.raises(InputError, match="normalization='MEAN'"):
        softmax_loss(torch.zeros(1, 2), torch.zeros(1).long(), normalization="MEAN")  # pyright: ignore[reportArgumentType]  (the mistake)
    with pytest.raises(InputError, match="average='token'"):
        loss_weight("1", average="token")  # pyright: ignore[reportArgumentType]  (the mistake)


@given(st.integers(1, 7), st.lists(st.floats(0, 10), min_size=1, max_size=30))
def test_the_smoothed_loss_is_the_mean_of_the_last_losses(length: int, losses: list[float]) -> None:
    smoothed = SmoothedLoss(length)
    for count, loss in enumerate(losses, start=1):
        last = losses[max(0, count - length) : count]
        assert smoothed.add(loss) == pytest.approx(sum(last) / len(last), abs=1e-12)


def test_float32_models_and_a_closure() -> None:
    model = model_of().float()
    caffe = solver(
        parse_solver('type: "Adam" base_lr: 0.01 lr_policy: "fixed" momentum: 0.9'), model.parameters()
    )
    x, y = data_of([8])[0]

    def closure() -> Tensor:
        loss = nn.functional.cross_entropy(model(x.float()), y)
        loss.backward()
        return loss

    assert caffe.optimizer.step(closure).item() > 0
    assert moved(model.double()) > 1e-3


def test_the_policy_drives_a_stock_optimizer_too() -> None:
    """lr_mult defaults to 1; a group added later gets its own rate at the next update."""
    config = parse_solver('base_lr: 1 lr_policy: "step" gamma: 0.5 stepsize: 2')
    one, two = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([one], lr=1.0)
    rate = CaffeRate(optimizer, config)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        rate.step()
    assert rates == [1.0, 1.0, 0.5, 0.5]
    ours = CaffeOptimizer([one], config)
    ours.add_param_group({"params": [two], "lr_mult": 3})
    assert [group["lr"] for group in ours.param_groups] == [1.0, 3.0]
    assert [group["decay_mult"] for group in ours.param_groups] == [1.0, 1.0]
