"""Batches that grow or follow the noise, with the Accumulator, torch schedulers and loaders."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from superbatch.errors import InputError, OptimizerError
from superbatch.noise.meter import NoiseMeter
from superbatch.torch import Accumulator, windows
from superbatch.torch.tuning.adaptive import AdaptiveBatch, AdaScaleRate, controller
from superbatch.torch.tuning.growing import GrowBatch, rate_of
from superbatch.torch.tuning.stopping import update_until
from superbatch.tuning.adaptive import Controller
from superbatch.tuning.growing import grow_batch, grown_batches
from superbatch.tuning.scaling import gain


def halving(seen: float) -> float:
    return 0.5 ** (seen // 100)


def linear_model() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    return (
        model,
        lambda batch: (model(batch[0] if isinstance(batch, (tuple, list)) else batch)).square().mean(),
    )


def data(samples: int = 100) -> torch.Tensor:
    return torch.randn(samples, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_windows_grow_and_the_rate_follows() -> None:
    model, loss_fn = linear_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = grow_batch(halving, batch=12, microbatch=5, dataset=410, largest=40)
    grow = GrowBatch(optimizer, schedule)
    accumulate = Accumulator(model, optimizer, loss_fn, scheduler=grow)
    seen = 0
    for _ in range(3):
        for window in windows(data(410).split(5), grow, first_update=accumulate.updates):
            update = accumulate(window)
            asked = 0.1 * halving(seen) / 12
            assert update.samples is not None
            assert update.learning_rates[0] / update.samples == pytest.approx(asked, rel=1e-9), (
                "the temperature, rate / batch"
            )
            seen += update.samples
    assert seen == 3 * 410
    assert schedule(accumulate.updates - 1) == 8, "premise: it grew to its cap"
    assert schedule.batch_of(accumulate.updates - 1) < 40, "premise: and ended with a tail"


def test_a_restarted_run_continues_bit_for_bit() -> None:
    def start() -> tuple[Any, ...]:
        model, loss_fn = linear_model()
        optimizer = AdamW(model.parameters(), lr=0.01)
        schedule = grow_batch(halving, batch=10, microbatch=5, temperature="adam", largest=100)
        grow = GrowBatch(optimizer, schedule)
        return model, optimizer, grow, Accumulator(model, optimizer, loss_fn, scheduler=grow)

    def train(training: tuple[Any, ...], rows: torch.Tensor) -> None:
        *_, grow, accumulate = training
        for window in windows(rows.split(5), grow, first_update=accumulate.updates):
            accumulate(window)

    whole = start()
    rows = data(500)
    train(whole, rows)
    first = start()
    train(first, rows[: first[2]._schedule.samples(13)])
    saved = copy.deepcopy([each.state_dict() for each in first])
    second = start()
    for each, state in zip(second, saved, strict=True):
        each.load_state_dict(state)
    train(second, rows[first[2]._schedule.samples(13) :])
    assert whole[1].param_groups[0]["betas"] == second[1].param_groups[0]["betas"] != (0.9, 0.999)
    for one, other in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_adams_beta2_follows_the_batch_and_another_temperature_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Adam([weight], lr=0.01, betas=(0.9, 0.99))
    with pytest.raises(InputError, match='temperature="adam"'):
        GrowBatch(optimizer, grow_batch(halving, batch=10, microbatch=5))
    with pytest.raises(InputError, match='temperature="sgd"'):
        GrowBatch(SGD([weight], lr=0.1), grow_batch(halving, batch=10, microbatch=5, temperature="adam"))
    grow = GrowBatch(optimizer, grow_batch(halving, batch=10, microbatch=5, temperature="adam", largest=1000))
    for _ in range(10):
        grow.step()
    assert grow(10) == 8
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99**4)
    assert optimizer.param_groups[0]["lr"] == 0.01


def spread_of_adam(schedule: Any, samples: int) -> float:
    """Return the standard deviation of noisy particles on x^2 / 2 after Adam with a growing batch."""
    generator = torch.Generator().manual_seed(0)
    x = nn.Parameter(torch.randn(4000, dtype=torch.float64, generator=generator))
    optimizer = Adam([x], lr=0.05, betas=(0.0, 0.999), eps=1e-12)
    grow = GrowBatch(optimizer, schedule)
    for update in range(schedule.updates(samples)):
        noise = torch.randn(4000, dtype=torch.float64, generator=generator)
        x.grad = x.detach() + 20 / math.sqrt(schedule.batch_of(update)) * noise
        optimizer.step()
        grow.step()
    return float(x.detach().std())


def test_a_smaller_rate_and_a_squared_growth_of_the_batch_cool_adam_equally() -> None:
    def quarters(seen: float) -> float:
        return 1.0 if seen < 2400 else 0.25

    def adam(**options: Any) -> Any:
        return grow_batch(quarters, batch=4, microbatch=4, temperature="adam", **options)

    decayed, grown = adam(largest=4), adam()
    assert (decayed(700), decayed.rate(700)) == (1, 0.25)
    assert (grown(700), grown.rate(700)) == (16, 1.0)
    # A standard deviation over 4000 particles has the error 1 / 89. The noise is 2.5 to 10 times the signal.
    bound = 4 * math.sqrt(2) / 89 + 0.04
    theirs, ours = spread_of_adam(decayed, 9600), spread_of_adam(grown, 9600)
    assert abs(ours / theirs - 1) < bound
    warm = spread_of_adam(grow_batch(lambda seen: 1.0, batch=4, microbatch=4, temperature="adam"), 9600)
    assert warm > 1.3 * theirs, "premise: it cools"

    class LikeSgd(type(grown)):  # mutant: the batch B / f at the full rate
        def batch_of(self, update: int) -> int:
            return 4 if self.samples(update) < 2400 else 16

        def rate(self, update: int) -> float:
            return 1.0

    mutant = adam(largest=16)
    mutant.__class__ = LikeSgd
    assert spread_of_adam(mutant, 9600) / theirs - 1 > 2 * bound


def test_momentum_is_set_if_the_optimizer_has_one() -> None:
    weight = nn.Parameter(torch.zeros(2))
    schedule = grow_batch(halving, batch=10, microbatch=5, momentum=(0.9, 0.95))
    optimizer = SGD([weight], lr=0.1, momentum=0.9)
    assert (GrowBatch(optimizer, schedule)(0), optimizer.param_groups[0]["momentum"]) == (4, 0.95)
    with pytest.raises(InputError, match=r"changes momentum .* has none"):
        GrowBatch(torch.optim.Adagrad([weight]), schedule)


def test_batches_of_a_loader_grow() -> None:
    model, loss_fn = linear_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = grow_batch(halving, batch=10, microbatch=5, dataset=400, largest=40)
    grow = GrowBatch(optimizer, schedule)
    accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size=5, scheduler=grow)
    sizes: list[int | None] = []
    for _ in range(2):
        batches = grown_batches(range(400), schedule, first_update=accumulate.updates)
        loader = DataLoader(TensorDataset(data(400)), batch_sampler=list(batches))
        sizes += [accumulate(batch).samples for batch in loader]
    assert sizes == [schedule.batch_of(update) for update in range(len(sizes))]
    assert sizes[:16] == [10] * 10 + [20] * 5 + [40]


MAKERS: dict[str, Any] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            lr_scheduler.ExponentialLR(optimizer, 0.5),
        ],
        milestones=[3],
    ),
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    ),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
}


# Until torch 2.10, SequentialLR passes its schedulers a deprecated argument (pytorch/pytorch#149392).
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("name", MAKERS)
def test_reading_a_scheduler_does_not_change_it(name: str) -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = SGD([{"params": [weight]}], lr=0.5, momentum=0.9)
    scheduler = MAKERS[name](optimizer)
    before = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    factor = rate_of(scheduler, samples_per_step=10)
    read = [factor(10 * step + 9) for step in range(12)]
    after = (optimizer.state_dict(), scheduler.state_dict())
    assert repr(before) == repr(after)
    real = []
    for _ in range(12):
        real.append(optimizer.param_groups[0]["lr"] / optimizer.param_groups[0]["initial_lr"])
        optimizer.step()
        with contextlib.suppress(ValueError):  # raised by OneCycleLR at its end
            scheduler.step()
    assert len(set(real)) > 5, "premise: the rate changes"
    assert read == pytest.approx(real, rel=1e-12)


def test_schedulers_that_cannot_be_read_are_refused() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(3))], lr=0.5)
    with pytest.raises(InputError, match="depends on future losses"):
        rate_of(lr_scheduler.ReduceLROnPlateau(optimizer), samples_per_step=1)
    with pytest.raises(InputError, match="cannot be simulated"):
        rate_of("cosine", samples_per_step=1)  # pyright: ignore[reportArgumentType]
    stepped = lr_scheduler.StepLR(optimizer, 5)
    optimizer.step()
    stepped.step()
    with pytest.raises(InputError, match="has made 1 steps already"):
        rate_of(stepped, samples_per_step=1)
    groups = SGD([{"params": [nn.Parameter(torch.zeros(3))]} for _ in range(2)], lr=0.5)
    uneven = lr_scheduler.LambdaLR(groups, [lambda step: 1.0, lambda step: 1 / (1 + step)])
    factor = rate_of(uneven, samples_per_step=1)
    assert factor(0) == 1.0
    with pytest.raises(InputError, match="all groups have the same batch"):
        factor(1)


def noisy(scale: float, samples: int, *, d: int = 40) -> torch.Tensor:
    """Return samples x; the gradient of `sum(w x)` has |G|^2 = 1 and the noise scale `scale`."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, d, dtype=torch.float64, generator=generator) * math.sqrt(scale / d)
    x[:, 0] += 1.0
    return x


def test_the_controller_sets_the_windows_of_an_accumulator() -> None:
    weight = nn.Linear(40, 1, bias=False).double()
    optimizer = SGD(weight.parameters(), lr=1e-3)
    accumulate = Accumulator(
        weight, optimizer, lambda x: weight(x).mean(), check=False, observers=[NoiseMeter(beta=0.9, every=1)]
    )
    steps = controller(weight, lambda: accumulate.noise, microbatch=4, start=2, least=2, most=64)
    lengths = [
        len(window) for window in windows(noisy(64.0, 24_000).split(4), steps) if accumulate(window).made
    ]
    assert lengths[:9] == [2] * 8 + [lengths[8]], "constant until the noise is known"
    settled = sorted(lengths[60:-1])
    assert 14 <= settled[len(settled) // 2] <= 20, "64 samples are 16 micro-batches"


def test_the_learning_rate_follows_the_controller() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = SGD([weight], lr=0.1)
    lengths = {0: 4, 1: 8, 2: 2}
    steps = AdaptiveBatch(optimizer, lambda update: lengths[update], rule="linear")
    rates = []
    for update in range(3):
        steps(update)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.1, 0.2, 0.05]
    again = AdaptiveBatch(optimizer, lambda update: 4, rule="linear")
    again.load_state_dict(steps.state_dict())
    again(3)
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(InputError, match="Use AdaScaleRate"):
        AdaptiveBatch(optimizer, steps, rule="gain")


def test_adascale_sets_the_rate_of_an_accumulator() -> None:
    model, loss_fn = linear_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    rate = AdaScaleRate(optimizer, lambda tau: 0.5 ** (tau // 4), base_batch=10, batch=40, noise=lambda: 30.0)
    accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size=10, scheduler=rate)
    r = gain(4, 3.0)
    rates = [accumulate(data(40)).learning_rates[0] for _ in range(4)]
    assert rates == pytest.approx([0.1 * r * 0.5 ** (i * r // 4) for i in range(4)])
    assert rate.progress == pytest.approx(4 * r)
    again = AdaScaleRate(
        optimizer, lambda tau: 0.5 ** (tau // 4), base_batch=10, batch=40, noise=lambda: 30.0
    )
    again.load_state_dict(rate.state_dict())
    rate.step()
    expected = optimizer.param_groups[0]["lr"]
    again.step()
    assert optimizer.param_groups[0]["lr"] == expected
    adam = Adam([nn.Parameter(torch.zeros(2))], lr=0.1)
    AdaScaleRate(adam, lambda tau: 1.0, base_batch=10, batch=40, noise=lambda: 30.0)
    assert adam.param_groups[0]["lr"] == pytest.approx(0.1 * math.sqrt(r))


def test_stopping_inside_a_window_is_unbiased_as_a_sum() -> None:
    """`update_until` changes the weight by -lr * sum / planned. By Wald's identity, the sum is unbiased."""
    d = 5
    model = nn.Linear(d, 1, bias=False).double()
    optimizer = SGD(model.parameters(), lr=1.0)
    rows = iter(noisy(40.0, 8 * 16_000, d=d).split(8))
    differences, counts, means = [], [], []
    for _ in range(1500):
        before = model.weight.detach().clone()
        done = update_until(model, optimizer, lambda x: model(x).sum(), rows, planned=40.0, least=2, most=64)
        along = float((before - model.weight.detach())[0, 0]) * 40.0 / 8  # sum of micro-batch means, along G
        assert done.weight == 8 * done.microbatches == 40.0 * done.factor
        differences.append(along - done.microbatches)
        counts.append(done.microbatches)
        means.append(along / done.microbatches - 1)
    assert len(set(counts)) > 3, "premise: the length is random"

    def z(values: list[float]) -> float:
        found = torch.tensor(values)
        return float(found.mean() / (found.std() / math.sqrt(len(values))))

    assert abs(z(differences)) < 4
    assert z(means) > 6, "the mean over such a window is biased upwards"


def test_wrong_arguments_of_update_until() -> None:
    model = nn.Linear(3, 1)
    sgd = SGD(model.parameters(), lr=0.1)

    def stop(optimizer: Any = sgd, **options: Any) -> Any:
        given: dict[str, Any] = {"planned": 8.0} | options
        rows = given.pop("rows", torch.randn(8, 4, 3))
        return update_until(
            given.pop("model", model), optimizer, lambda x: model(x).sum(), iter(rows), **given
        )

    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=r"reduction='mean': .* a mean over it is biased.*Controller"):
        stop(reduction="mean")
    with pytest.raises(OptimizerError, match=r"Adam need not grow with the gradient"):
        stop(Adam(model.parameters()))
    with pytest.raises(InputError, match="planned=0"):
        stop(planned=0)
    with pytest.raises(InputError, match="has no micro-batches left"):
        stop(rows=[])
    with pytest.raises(ArithmeticError, match="no update was made"):
        stop(rows=[torch.full((4, 3), math.nan)])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_update_until_ends_with_the_data() -> None:
    model = nn.Linear(3, 1)
    done = update_until(
        model,
        SGD(model.parameters(), lr=0.1),
        lambda x: model(x).sum(),
        iter(torch.randn(3, 4, 3)),
        planned=12.0,
        target=1e-9,
    )
    assert (done.stopped, done.microbatches, done.factor) == (False, 3, 1.0)


def test_a_controller_without_noise_keeps_its_start() -> None:
    steps = controller(nn.Linear(2, 1), lambda: None, microbatch=8, start=4)
    assert isinstance(steps, Controller)
    assert [steps(update) for update in range(3)] == [4, 4, 4]


def test_gradients_that_share_memory_are_summed_separately() -> None:
    """Autograd gives both terms of ``a + b`` one tensor, and ``c.sum()`` an expanded element."""
    rows = torch.randn(4, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    terms = {name: nn.Parameter(torch.zeros(3, dtype=torch.float64)) for name in ("a", "b", "c")}

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x @ (terms["a"] + terms["b"]) - 1).square().sum() + len(x) * terms["c"].sum()

    expected = torch.autograd.grad(torch.stack([loss(x) for x in rows]).sum(), list(terms.values()))
    optimizer = SGD(terms.values(), lr=1.0)
    done = update_until(nn.ParameterDict(terms), optimizer, loss, iter(rows), planned=32, least=4)
    assert done.microbatches == 4
    for parameter, gradient in zip(terms.values(), expected, strict=True):
        assert gradient.abs().min() > 0, "premise"
        torch.testing.assert_close(parameter.detach(), -gradient / 32)


def test_a_micro_batch_without_weight_does_not_end_a_window() -> None:
    model = nn.Linear(3, 1)
    weights = iter([8.0, 0.0, 8.0])
    done = update_until(
        model,
        SGD(model.parameters(), lr=0.1),
        lambda x: model(x).sum(),
        iter(torch.randn(3, 8, 3)),
        planned=16.0,
        target=1e-9,
        weight=lambda _: next(weights),
    )
    assert (done.microbatches, done.weight) == (3, 16.0)
