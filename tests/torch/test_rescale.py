"""`rescale` on torch optimizers keeps the course of training, and is applied completely or not at all."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler, swa_utils

from superbatch.errors import InputError, OptimizerError
from superbatch.torch.tuning import scaling
from superbatch.torch.tuning.scaling import rescale

PARTICLES = 4000


def mean_and_spread(
    make: Callable[[list[Tensor]], Optimizer],
    *,
    batch: int,
    samples: int,
    noise: float,
    change: Callable[[Optimizer], object] = lambda optimizer: None,
) -> tuple[float, float]:
    """Mean and standard deviation of particles that start at 2 on x^2 / 2, with gradient noise per sample."""
    generator = torch.Generator().manual_seed(batch)
    x = torch.full((PARTICLES,), 2.0, dtype=torch.float64, requires_grad=True)
    optimizer = make([x])
    change(optimizer)
    for _ in range(samples // batch):
        disturbed = (
            torch.randn(PARTICLES, generator=generator, dtype=torch.float64) * noise / math.sqrt(batch)
        )
        x.grad = x.detach() + disturbed
        optimizer.step()
    return float(x.detach().mean()), float(x.detach().std())


@pytest.mark.parametrize("kappa", [4, 16])
def test_sgd_keeps_mean_and_spread(kappa: int) -> None:
    def make(parameters: list[Tensor]) -> Optimizer:
        return SGD(parameters, lr=0.002)

    def change(optimizer: Optimizer) -> None:
        rescale(optimizer, 1, kappa)

    base = mean_and_spread(make, batch=1, samples=512, noise=10.0)
    ours = mean_and_spread(make, batch=kappa, samples=512, noise=10.0, change=change)
    # The mean of PARTICLES has an error of sd / 63, their sd one of sd / 89. The rule has relative errors of
    # about n kappa a^2 / 2 (a = lr h = 0.002, n = 512) in the mean and kappa a / 2 in the sd.
    a = 0.002
    assert abs(ours[0] - base[0]) < 4 * math.sqrt(2) * base[1] / 63 + base[0] * 512 * kappa * a * a / 2
    assert abs(ours[1] / base[1] - 1) < 4 * math.sqrt(2) / 89 + kappa * a
    still = mean_and_spread(make, batch=kappa, samples=512, noise=10.0)
    assert still[0] > 1.5 * base[0], "mutant: unchanged rate"


def test_adam_keeps_mean_and_spread_in_the_noise() -> None:
    def make(parameters: list[Tensor]) -> Optimizer:
        return Adam(parameters, lr=0.01, betas=(0.9, 0.999), eps=1e-12)

    def change(optimizer: Optimizer) -> None:
        (done,) = rescale(optimizer, 1, 9)
        assert done.rule == "sqrt"

    base = mean_and_spread(make, batch=1, samples=1800, noise=20.0)
    ours = mean_and_spread(make, batch=9, samples=1800, noise=20.0, change=change)
    # Besides the errors of mean and sd: momentum lags 10 updates, 90 samples instead of 10. At a drift of
    # lr / noise = 0.0005 per sample this is 4 % of the mean. The first of 200 updates is a full step.
    assert abs(ours[0] - base[0]) < 4 * math.sqrt(2) * base[1] / 63 + 0.05 * base[0]
    assert abs(ours[1] / base[1] - 1) < 4 * math.sqrt(2) / 89 + 0.05

    def linear(optimizer: Optimizer) -> None:
        optimizer.param_groups[0].update(lr=0.09, betas=(0.9, 0.999**9))

    wrong = mean_and_spread(make, batch=9, samples=1800, noise=20.0, change=linear)
    assert wrong[0] < 0.7 * base[0] and wrong[1] > 1.5 * base[1], "mutant: linear in kappa"


@pytest.mark.parametrize("kappa", [1 / 16, 16])
def test_moments_keep_their_debiased_value(kappa: float) -> None:
    """After 20 updates with beta2 = 0.99, 1 - beta2^20 is 0.18; another beta2 gives another debiasing."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(50, dtype=torch.float64))
    optimizer = AdamW([weight], lr=1e-3, betas=(0.9, 0.99), eps=1e-12, amsgrad=True)
    for _ in range(20):
        weight.grad = torch.randn_like(weight)
        optimizer.step()

    def debiased() -> Tensor:
        beta2 = optimizer.param_groups[0]["betas"][1]
        return optimizer.state[weight]["exp_avg_sq"] / (1 - beta2**20)

    before = debiased().clone()
    plain = before * (1 - 0.99**20) / (1 - (0.99**kappa) ** 20)
    assert not torch.allclose(plain, before, rtol=0.5), "premise: an unchanged moment would be far off"
    rescale(optimizer, 16, 16 * kappa, rule="keep")
    torch.testing.assert_close(debiased(), before, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        optimizer.state[weight]["exp_avg_sq"],
        optimizer.state[weight]["max_exp_avg_sq"],
        rtol=1.0,
        atol=0,
    )


def test_a_mutant_that_changes_only_the_betas_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:

    def only_betas(optimizer: Any, group: Any, *, beta1: float, beta2: float) -> list[Any]:
        return [lambda: group.update(betas=(beta1, beta2))]

    monkeypatch.setattr(scaling, "change_betas", only_betas)
    with pytest.raises(AssertionError):
        test_moments_keep_their_debiased_value(16)


def two_groups(kind: Callable[..., Optimizer], **options: Any) -> Optimizer:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3)) for _ in range(2)]
    optimizer = kind([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}], lr=0.1, **options)
    for parameter in parameters:
        parameter.grad = torch.randn(3)
    optimizer.step()
    return optimizer


def state_of(optimizer: Optimizer) -> Any:
    return copy.deepcopy(optimizer.state_dict())


def assert_same(one: Any, other: Any) -> None:
    assert one["param_groups"] == other["param_groups"]
    for index, state in one["state"].items():
        for name, value in state.items():
            assert value is other["state"][index][name] or torch.equal(
                torch.as_tensor(value), torch.as_tensor(other["state"][index][name])
            )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda group: group.update(lr=math.nan), "lr=nan"),
        (lambda group: group.update(eps=-1.0), "eps=-1.0"),
        (lambda group: group.update(betas=(0.9, 1.0)), "between 0 and 1"),
        (lambda group: group.update(weight_decay=math.inf), "weight_decay=inf"),
    ],
)
def test_rescale_is_never_applied_in_part(spoil: Callable[[dict[str, Any]], object], message: str) -> None:
    optimizer = two_groups(AdamW)
    spoil(optimizer.param_groups[1])
    before = state_of(optimizer)
    with pytest.raises(InputError, match=message):
        rescale(optimizer, 8, 64)
    after = state_of(optimizer)
    if message == "lr=nan":
        assert math.isnan(after["param_groups"][1].pop("lr")) and math.isnan(
            before["param_groups"][1].pop("lr")
        )
    assert_same(before, after)


@pytest.mark.parametrize("wrong", [0, -8, math.nan, math.inf])
def test_invalid_batch_sizes_are_refused(wrong: float) -> None:
    optimizer = two_groups(SGD)
    before = state_of(optimizer)
    for batches in ((wrong, 8), (8, wrong)):
        with pytest.raises(InputError, match="is not a number of samples"):
            rescale(optimizer, *batches)
    assert_same(before, state_of(optimizer))


def test_every_group_is_scaled() -> None:
    optimizer = two_groups(SGD, momentum=0.9)
    done = rescale(optimizer, 8, 32)
    assert [group["lr"] for group in optimizer.param_groups] == [0.4, 2.0]
    assert [each.after["lr"] for each in done] == [0.4, 2.0]
    assert {group["momentum"] for group in optimizer.param_groups} == {0.9}


def test_only_decoupled_weight_decay_is_scaled() -> None:
    for kind, expected in ((AdamW, 0.2), (Adam, 0.1)):
        optimizer = two_groups(kind, weight_decay=0.1)
        rescale(optimizer, 8, 32)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [expected] * 2, kind
        assert optimizer.param_groups[0]["lr"] == 0.2


def test_rates_in_tensors_stay_tensors() -> None:
    weight = nn.Parameter(torch.zeros(2))
    rate = torch.tensor(0.1)
    optimizer = SGD([weight], lr=rate)
    rescale(optimizer, 8, 16)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.2)


def test_other_optimizers_get_only_the_rate_by_an_explicit_rule() -> None:
    optimizer = two_groups(torch.optim.RMSprop)
    before = state_of(optimizer)
    with pytest.raises(OptimizerError, match=r"type RMSprop.*To scale its learning rate only"):
        rescale(optimizer, 8, 32)
    assert_same(before, state_of(optimizer))
    done = rescale(optimizer, 8, 32, rule="sqrt")
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 1.0]
    assert [group["alpha"] for group in optimizer.param_groups] == [0.99, 0.99]
    assert "Only the rate was changed" in done[0].limits[0]
    assert done[0].optimizer == "RMSprop"


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20, eta_min=0.01),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=20),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
            lr_scheduler.CosineAnnealingLR(optimizer, 15, eta_min=0.01),
        ],
        milestones=[5],
    ),
    "weight averaging": lambda optimizer: swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=10),
}


# Until torch 2.10 SequentialLR passes its schedulers an argument that warns (pytorch/pytorch#149392).
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_continues_at_the_new_rate(name: str) -> None:
    def rates(change_at: int | None) -> list[float]:
        optimizer = two_groups(SGD, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        found = []
        for update in range(18):
            if update == change_at:
                rescale(optimizer, 8, 32, scheduler=scheduler)
            found.append(optimizer.param_groups[1]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    base, scaled = rates(None), rates(7)
    assert len(set(base)) > 5, "premise: the scheduler changes the rate"
    assert scaled[:7] == base[:7]
    assert scaled[7:] == pytest.approx([4 * rate for rate in base[7:]], rel=1e-9)


def test_a_scheduler_that_is_not_passed_is_refused() -> None:
    optimizer = two_groups(SGD)
    other = two_groups(SGD)
    scheduler = lr_scheduler.StepLR(optimizer, 5)
    before = state_of(optimizer)
    with pytest.raises(InputError, match="would undo the change"):
        rescale(optimizer, 8, 32)
    with pytest.raises(InputError, match="does not belong to this optimizer"):
        rescale(optimizer, 8, 32, scheduler=lr_scheduler.StepLR(other, 5))
    assert_same(before, state_of(optimizer))
    rescale(optimizer, 8, 32, scheduler=[scheduler])
    assert scheduler.base_lrs == [0.4, 2.0]


def test_a_known_noise_scale_selects_the_gain_rule() -> None:
    optimizer = two_groups(SGD)
    (first, _) = rescale(optimizer, 8, 32, noise=24.0)
    assert (first.rule, first.gain, first.ratio) == ("gain", 4 / 1.75, 3.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 4 / 1.75)
