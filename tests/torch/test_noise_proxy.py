"""Noise proxy of normalisation layers, against per-sample gradients computed by hand in float64."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from superbatch.errors import InputError
from superbatch.noise.meter import PROXY, Estimate, NoiseMeter, estimate
from superbatch.torch import Accumulator, Window
from superbatch.torch.window.participants.noise import samples as seen_samples
from superbatch.torch.window.participants.noise.samples import SampleGradientNorms
from tests.torch.helpers import rows
from tests.torch.test_noise import TEXT

TOLERANCE = 1e-12


class Recorder(NoiseMeter):
    """Meter that records the proxy's estimate of each window."""

    def __init__(self, **options: Any) -> None:
        super().__init__(every=1, proxy=True, **options)
        self.seen: list[tuple[Estimate, float]] = []

    def add_beside(self, name: str, one: Estimate, *, samples: float) -> None:
        if name == PROXY:
            self.seen.append((one, samples))
        super().add_beside(name, one, samples=samples)


class Net(nn.Module):
    """Model with positions, two kinds of normalisation, a layer used twice, and tied scales."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.inner, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm, self.rms, self.wide = nn.LayerNorm(6), nn.RMSNorm(6), nn.LayerNorm([2, 6], bias=False)
        self.tied = nn.LayerNorm(6)
        self.tied.weight = self.rms.weight
        for module in (self.norm, self.rms, self.wide):
            nn.init.normal_(module.weight, 1.0, 0.3)
        self.how = how
        self.double()

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.inner(self.norm(x)))) + self.rms(x) + self.tied(input=x)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([self.first(x), self.first(x.flip(-1))], 1)  # (samples, positions, features)
        for step in (self.body, self.norm):  # self.norm is in both: it gets two partial gradients
            x = step(x) if self.how == "plain" else checkpoint(step, x, use_reentrant=self.how == "reentrant")
        return self.last(self.wide(x)).mean(1)


def mse(model: nn.Module, mb: Sequence[Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(mb[0]), mb[1])


def norm_parameters(model: nn.Module) -> list[Tensor]:
    found = {
        id(p): p for m in model.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm) for p in m.parameters()
    }
    return list(found.values())


def split(batch: tuple[Tensor, ...], *sizes: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(leaf.split(list(sizes)) for leaf in batch), strict=True))


BATCH = rows(9, 1)[0]


def by_hand(
    model: nn.Module,
    microbatches: Sequence[Any],
    shares: Sequence[float],
    loss: Callable[..., Tensor] = mse,
) -> tuple[Estimate, float]:
    """Proxy from one `torch.autograd.grad` per sample, with the `shares` of micro-batches in the loss."""
    own, a2, batch, q = norm_parameters(model), 0.0, [0.0] * 99, 0.0
    for mb, share in zip(microbatches, shares, strict=True):
        count = len(mb[0])
        for index in range(count):
            one = tuple(leaf[index : index + 1] for leaf in mb)
            gradients = torch.autograd.grad(loss(model, one), own)
            s = share / sum(shares) / count
            a2 += s * s * sum(float(g.square().sum()) for g in gradients)
            q += s * s
            batch = [b + s * g for b, g in zip(batch, gradients, strict=False)]
    b2 = sum(float(g.square().sum()) for g in batch if isinstance(g, Tensor))
    assert b2 > 0, "premise: there is a gradient"
    return estimate(a2, b2, q), 1 / q


def assert_near(
    seen: tuple[Estimate, float], expected: tuple[Estimate, float], tolerance: float = TOLERANCE
) -> None:
    assert seen[1] == pytest.approx(expected[1], rel=tolerance)
    size = abs(expected[0].signal) + abs(expected[0].variance)
    assert abs(expected[0].variance) > 1e-3 * size, "premise: samples differ"
    for ours, theirs in zip(seen[0], expected[0], strict=True):
        assert abs(ours - theirs) <= tolerance * size, (seen, expected)


def assert_nothing_left(model: nn.Module) -> None:
    assert all(p._backward_hooks is None and p.grad is None for p in model.parameters())
    assert all(not module._forward_hooks and not module._backward_hooks for module in model.modules())


def measured(
    model: nn.Module, microbatches: Sequence[Any], loss: Callable[..., Tensor] = mse, **options: Any
) -> Recorder:
    meter = Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accumulate = Accumulator(model, optimizer, lambda p: loss(model, p), observers=[meter], **options)
    assert accumulate(Window(list(microbatches))).made
    assert_nothing_left(model)
    return meter


@pytest.mark.parametrize("sizes", [(9,), (5, 1, 3), (3, 3, 3)])
def test_windows_of_one_and_of_unequal_micro_batches(sizes: tuple[int, ...]) -> None:
    model = Net()
    meter = measured(model, split(BATCH, *sizes))
    assert_near(meter.seen[0], by_hand(model, split(BATCH, *sizes), sizes))
    assert meter.windows == (0 if len(sizes) == 1 else 1), "one micro-batch gives no noise scale"
    sums = measured(
        model, split(BATCH, *sizes), lambda m, p: (m(p[0]) - p[1]).square().mean(1).sum(), reduction="sum"
    )
    assert_near(sums.seen[0], by_hand(model, split(BATCH, *sizes), sizes))


def test_micro_batches_with_weights() -> None:
    model, microbatches = Net(), split(BATCH, 5, 1, 3)
    weights = {5: 2.0, 1: 1.0, 3: 4.0}
    meter = measured(model, microbatches, weight=lambda p: weights[len(p[0])], check=False)
    assert_near(meter.seen[0], by_hand(model, microbatches, (2.0, 1.0, 4.0)))


@pytest.mark.parametrize("how", ["not reentrant", "reentrant"])
def test_checkpoints(how: str) -> None:
    model, twin, microbatches = Net(how), Net("not reentrant"), split(BATCH, 5, 4)
    meter = Recorder()
    accumulate = Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.0), lambda p: mse(model, p), observers=[meter]
    )
    accumulate(Window(microbatches))
    if how == "reentrant":
        assert not meter.seen, "the first window only detects partial gradients"
        assert "came in several parts" in (meter.estimate().proxy.reason or "")  # type: ignore[union-attr]
        accumulate(Window(microbatches))
    assert_near(meter.seen[0], by_hand(twin, microbatches, (5, 4)))
    assert_nothing_left(model)


def test_a_scaler_clipping_two_losses_and_gradients_in_the_forward() -> None:
    model, microbatches = Net(), split(BATCH, 9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # type: ignore[attr-defined]
    meter = measured(model, microbatches, scaler=scaler, max_grad_norm=1e-3, check=False)
    assert_near(meter.seen[0], by_hand(model, microbatches, (9,)))

    def with_penalty(model: nn.Module, mb: Any) -> Tensor:
        value = mse(model, mb)
        torch.autograd.grad(value, list(model.parameters()), retain_graph=True)  # calls all hooks once more
        return value

    assert_near(
        measured(model, microbatches, with_penalty, check=False).seen[0], by_hand(model, microbatches, (9,))
    )
    meter = Recorder()
    accumulate = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), observers=[meter])
    for _ in range(2):  # the first window only detects partial gradients
        with accumulate.window(Window(microbatches)) as window:
            for mb in window:
                window.backward(mse(model, mb))
                window.backward(model(mb[0]).square().mean())
    both = by_hand(model, microbatches, (9,), lambda m, p: mse(m, p) + m(p[0]).square().mean())
    assert_near(meter.seen[-1], both)


def test_float32_buffers_of_a_bfloat16_model() -> None:
    model = Net().bfloat16()
    microbatches = [tuple(leaf.bfloat16() for leaf in mb) for mb in split(BATCH, 5, 4)]
    meter = measured(model, microbatches, gradient_sum=torch.float32, check=False)
    assert_near(meter.seen[0], by_hand(model, microbatches, (5, 4)), 0.05)


def test_the_proxy_is_unbiased() -> None:
    """The mean over 1500 windows of one micro-batch, drawn with replacement, is that of the population."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)).double()
    x, y = torch.randn(12, 3).double(), torch.randn(12, 1).double()
    own = norm_parameters(model)
    each = [torch.cat(torch.autograd.grad(mse(model, (x[i : i + 1], y[i : i + 1])), own)) for i in range(12)]
    mean = torch.stack(each).mean(0)
    trace = float((torch.stack(each) - mean).square().sum(1).mean())
    meter = Recorder()
    accumulate = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        lambda p: mse(model, p),
        observers=[meter],
        check=False,
    )
    for _ in range(1500):
        chosen = torch.randint(12, (5,))
        accumulate(Window([(x[chosen], y[chosen])]))
    for values, right in (
        ([one.signal for one, _ in meter.seen], float(mean @ mean)),
        ([one.variance * samples for one, samples in meter.seen], trace),
    ):
        found = torch.tensor(values)
        assert len(found) == 1500
        assert abs(float(found.mean()) - right) < 4 * float(found.std()) / math.sqrt(1500)
    proxy = meter.estimate().proxy
    assert proxy is not None and proxy.factor is None and proxy.calibrated is None
    assert meter.estimate().batch_size is None, "the proxy is never reported as the noise scale"


def test_the_factor_is_known_after_windows_of_several_micro_batches() -> None:
    model = Net()
    meter = Recorder(beta=0.95)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accumulate = Accumulator(model, optimizer, lambda p: mse(model, p), observers=[meter])
    torch.manual_seed(1)
    target = 3 + torch.randn(60, 3).double()
    for number in range(60):
        batch = (torch.randn(64, 4).double(), target[number].expand(64, 3) + torch.randn(64, 3))
        accumulate(Window(split(batch, 64) if number < 20 else split(batch, 32, 32)))
        proxy = meter.estimate().proxy
        assert proxy is not None and proxy.windows == number + 1
        assert (proxy.factor is None) == (meter.estimate().batch_size is None)
    noise = meter.estimate()
    assert noise.proxy is not None and noise.proxy.factor is not None and noise.batch_size is not None
    assert noise.windows == 40
    expected = noise.batch_size / noise.proxy.factor
    assert noise.proxy.batch_size == pytest.approx(expected, rel=0.3), "from nearly the same windows"
    assert noise.proxy.calibrated == pytest.approx(expected * noise.proxy.factor, rel=0.3)


class Flat(nn.Module):
    """Model that flattens samples and positions into one dimension, where they cannot be separated."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(2), nn.Linear(2, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x.reshape(-1, 2)).reshape(len(x), 2, 2)).mean(1)


class ScaleUsedTwice(nn.Module):
    """Model that uses a scale in its layer and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x) + x * self.norm.weight)


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Flat(), "not the first dimension"), (ScaleUsedTwice(), "not the sum over its samples")],
)
def test_layers_whose_samples_cannot_be_separated_are_left_out_with_a_reason(
    model: nn.Module, reason: str
) -> None:
    meter = measured(model, split(BATCH, 5, 4))
    assert not meter.seen and meter.windows == 1, "the noise itself is still measured"
    proxy = meter.estimate().proxy
    assert proxy is not None and proxy.batch_size is None
    assert reason in (proxy.reason or "")


def test_a_window_of_one_micro_batch_hooks_only_normalisation_layers() -> None:
    model = Net()
    own = {id(p) for p in norm_parameters(model)}
    accumulate = Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), observers=[NoiseMeter(every=1, proxy=True)]
    )
    for sizes, hooked in (((9,), own), ((5, 4), {id(p) for p in model.parameters()})):
        with accumulate.window(Window(split(BATCH, *sizes))) as window:
            for mb in window:
                assert {id(p) for p in model.parameters() if p._backward_hooks} == hooked
                window.backward(mse(model, mb))


def test_out_of_memory_in_a_window_of_one_micro_batch() -> None:
    """The micro-batch is halved, but only normalisation layers have hooks: no noise scale is measured."""
    model, failed = Net(), []

    def loss(model: nn.Module, mb: Any) -> Tensor:
        if not failed:
            failed.append(1)
            raise RuntimeError(TEXT)
        return mse(model, mb)

    with pytest.warns(UserWarning, match="memory ran out"):
        meter = measured(model, split(BATCH, 9), loss, check=False)
    assert failed, "premise: memory ran out"
    assert_near(meter.seen[0], by_hand(model, split(BATCH, 5, 4), (5, 4)))
    assert meter.windows == 0
    assert meter.estimate().proxy.factor is None  # type: ignore[union-attr]


def test_one_sample_gives_no_estimate() -> None:
    meter = measured(Net(), split(tuple(leaf[:1] for leaf in BATCH), 1), check=False)
    assert not meter.seen
    assert "one sample has nearly all the weight" in (meter.estimate().proxy.reason or "")  # type: ignore[union-attr]


def test_models_without_normalisation_are_refused_and_the_proxy_is_off_by_default() -> None:
    model = nn.Linear(4, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"needs a trained LayerNorm or RMSNorm, but the models have none"):
        Accumulator(model, sgd, observers=[NoiseMeter(proxy=True)])
    for parameter in (frozen := nn.LayerNorm(4)).parameters():
        parameter.requires_grad = False
    both = nn.Sequential(frozen, model)
    with pytest.raises(InputError, match="a trained LayerNorm"):
        Accumulator(both, sgd, observers=[NoiseMeter(proxy=True)])
    net = Net()
    accumulate = Accumulator(net, torch.optim.SGD(net.parameters(), lr=0.1), observers=[NoiseMeter()])
    with accumulate.window(Window(split(BATCH, 5, 4))) as window:
        for mb in window:
            assert all(not module._forward_hooks for module in net.modules())
            window.backward(mse(net, mb))
    assert accumulate.noise is not None and accumulate.noise.proxy is None


def test_a_window_that_fails_removes_its_hooks() -> None:
    model = Net()
    accumulate = Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), observers=[NoiseMeter(every=1, proxy=True)]
    )
    with pytest.raises(ZeroDivisionError), accumulate.window(Window(split(BATCH, 9))) as window:  # noqa: PT012
        for mb in window:
            assert any(module._forward_hooks for module in model.modules()), "premise: hooks are active"
            mse(model, mb)
            raise ZeroDivisionError
    assert_nothing_left(model)


def test_the_proxy_changes_no_update_and_a_saved_window_is_resumed_bit_for_bit() -> None:
    batches = [split(batch, 5, 4) if n % 2 else split(batch, 9) for n, batch in enumerate(rows(9, 14))]

    def new(*, proxy: bool = True) -> tuple[nn.Module, torch.optim.Optimizer, Accumulator]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        meter = NoiseMeter(every=1, proxy=proxy)
        return (
            model,
            optimizer,
            Accumulator(model, optimizer, lambda p: mse(model, p), observers=[meter], check=False),
        )

    model, _, uninterrupted = new()
    plain_model, _, plain = new(proxy=False)
    for microbatches in batches:
        uninterrupted(Window(microbatches))
        plain(Window(microbatches))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain_model.parameters(), strict=True))
    model, optimizer, accumulate = new()
    for microbatches in batches[:9]:
        accumulate(Window(microbatches))
    file = io.BytesIO()
    with accumulate.window(Window(batches[9])) as window:
        for index, mb in enumerate(window):
            window.backward(mse(model, mb))
            if index == 0:
                torch.save([each.state_dict() for each in (model, optimizer, accumulate)], file)
    file.seek(0)
    again = new()
    for each, saved in zip(again, torch.load(file), strict=True):
        each.load_state_dict(copy.deepcopy(saved))
    for microbatches in batches[9:]:
        again[2](Window(microbatches))
    assert again[2].noise == uninterrupted.noise
    assert (
        uninterrupted.noise is not None
        and uninterrupted.noise.proxy is not None
        and uninterrupted.noise.proxy.windows == 14
    )


def test_mutants_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wrong way to compute per-sample gradients fails a test above."""
    over = seen_samples._over

    def check() -> None:
        test_windows_of_one_and_of_unequal_micro_batches((9,))
        test_a_scaler_clipping_two_losses_and_gradients_in_the_forward()

    check()
    for where, name, mutant in (
        (seen_samples, "_over", lambda tensor, positions: over(tensor, positions) * 1.001),
        (seen_samples, "_over", lambda tensor, positions: tensor.flatten(0, len(positions))),
        (SampleGradientNorms, "record_gradient", lambda self, parameter, gradient: None),
        (SampleGradientNorms, "begin_backward", lambda self: None),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, mutant)
            with pytest.raises((AssertionError, IndexError)):
                check()
