"""The proxy of normalisation layers, against gradients of single samples taken by hand in float64."""

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
    """Keeps what each window said of the proxy."""

    def __init__(self, **options: Any) -> None:
        super().__init__(every=1, proxy=True, **options)
        self.said: list[tuple[Estimate, float]] = []

    def add_beside(self, name: str, one: Estimate, *, samples: float) -> None:
        if name == PROXY:
            self.said.append((one, samples))
        super().add_beside(name, one, samples=samples)


class Net(nn.Module):
    """Positions, two kinds of normalisation, a layer that is used twice, and tied scales."""

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
        for part in (self.body, self.norm):  # a layer in both, so that its gradient comes in parts
            x = part(x) if self.how == "plain" else checkpoint(part, x, use_reentrant=self.how == "reentrant")
        return self.last(self.wide(x)).mean(1)


def mse(model: nn.Module, part: Sequence[Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(part[0]), part[1])


def norm_parameters(model: nn.Module) -> list[Tensor]:
    found = {
        id(p): p for m in model.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm) for p in m.parameters()
    }
    return list(found.values())


def cut(batch: tuple[Tensor, ...], *sizes: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(leaf.split(list(sizes)) for leaf in batch), strict=True))


BATCH = rows(9, 1)[0]


def by_hand(
    model: nn.Module,
    parts: Sequence[Any],
    shares: Sequence[float],
    loss: Callable[..., Tensor] = mse,
) -> tuple[Estimate, float]:
    """One `torch.autograd.grad` per sample; `shares` are those of micro-batches in the loss."""
    own, a2, batch, q = norm_parameters(model), 0.0, [0.0] * 99, 0.0
    for part, share in zip(parts, shares, strict=True):
        count = len(part[0])
        for index in range(count):
            one = tuple(leaf[index : index + 1] for leaf in part)
            gradients = torch.autograd.grad(loss(model, one), own)
            s = share / sum(shares) / count
            a2 += s * s * sum(float(g.square().sum()) for g in gradients)
            q += s * s
            batch = [b + s * g for b, g in zip(batch, gradients, strict=False)]
    b2 = sum(float(g.square().sum()) for g in batch if isinstance(g, Tensor))
    assert b2 > 0, "premise: there is a gradient"
    return estimate(a2, b2, q), 1 / q


def assert_says(
    said: tuple[Estimate, float], expected: tuple[Estimate, float], tolerance: float = TOLERANCE
) -> None:
    assert said[1] == pytest.approx(expected[1], rel=tolerance)
    size = abs(expected[0].signal) + abs(expected[0].variance)
    assert abs(expected[0].variance) > 1e-3 * size, "premise: samples differ"
    for ours, theirs in zip(said[0], expected[0], strict=True):
        assert abs(ours - theirs) <= tolerance * size, (said, expected)


def assert_nothing_left(model: nn.Module) -> None:
    assert all(p._backward_hooks is None and p.grad is None for p in model.parameters())
    assert all(not module._forward_hooks and not module._backward_hooks for module in model.modules())


def measured(
    model: nn.Module, parts: Sequence[Any], loss: Callable[..., Tensor] = mse, **options: Any
) -> Recorder:
    meter = Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accumulate = Accumulator(model, optimizer, lambda p: loss(model, p), observers=[meter], **options)
    assert accumulate(Window(list(parts))).made
    assert_nothing_left(model)
    return meter


@pytest.mark.parametrize("sizes", [(9,), (5, 1, 3), (3, 3, 3)])
def test_windows_of_one_and_of_unequal_micro_batches(sizes: tuple[int, ...]) -> None:
    model = Net()
    meter = measured(model, cut(BATCH, *sizes))
    assert_says(meter.said[0], by_hand(model, cut(BATCH, *sizes), sizes))
    assert meter.windows == (0 if len(sizes) == 1 else 1), "one micro-batch still says nothing of the whole"
    sums = measured(
        model, cut(BATCH, *sizes), lambda m, p: (m(p[0]) - p[1]).square().mean(1).sum(), reduction="sum"
    )
    assert_says(sums.said[0], by_hand(model, cut(BATCH, *sizes), sizes))


def test_micro_batches_with_weights_of_their_own() -> None:
    model, parts = Net(), cut(BATCH, 5, 1, 3)
    weights = {5: 2.0, 1: 1.0, 3: 4.0}
    meter = measured(model, parts, weight=lambda p: weights[len(p[0])], check=False)
    assert_says(meter.said[0], by_hand(model, parts, (2.0, 1.0, 4.0)))


@pytest.mark.parametrize("how", ["not reentrant", "reentrant"])
def test_checkpoints(how: str) -> None:
    model, twin, parts = Net(how), Net("not reentrant"), cut(BATCH, 5, 4)
    meter = Recorder()
    accumulate = Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.0), lambda p: mse(model, p), observers=[meter]
    )
    accumulate(Window(parts))
    if how == "reentrant":
        assert not meter.said, "its gradients come in parts: the first window only finds out"
        assert "came in several parts" in (meter.estimate().proxy.reason or "")  # type: ignore[union-attr]
        accumulate(Window(parts))
    assert_says(meter.said[0], by_hand(twin, parts, (5, 4)))
    assert_nothing_left(model)


def test_a_scaler_clipping_two_losses_and_what_the_users_forward_asks_for() -> None:
    model, parts = Net(), cut(BATCH, 9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # type: ignore[attr-defined]
    meter = measured(model, parts, scaler=scaler, max_grad_norm=1e-3, check=False)
    assert_says(meter.said[0], by_hand(model, parts, (9,)))

    def with_penalty(model: nn.Module, part: Any) -> Tensor:
        value = mse(model, part)
        torch.autograd.grad(value, list(model.parameters()), retain_graph=True)  # calls all hooks once more
        return value

    assert_says(measured(model, parts, with_penalty, check=False).said[0], by_hand(model, parts, (9,)))
    meter = Recorder()
    accumulate = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), observers=[meter])
    for _ in range(2):  # the first window finds out that gradients come in parts
        with accumulate.window(Window(parts)) as window:
            for part in window:
                window.backward(mse(model, part))
                window.backward(model(part[0]).square().mean())
    both = by_hand(model, parts, (9,), lambda m, p: mse(m, p) + m(p[0]).square().mean())
    assert_says(meter.said[-1], both)


def test_float32_buffers_of_a_bfloat16_model() -> None:
    model = Net().bfloat16()
    parts = [tuple(leaf.bfloat16() for leaf in part) for part in cut(BATCH, 5, 4)]
    meter = measured(model, parts, gradient_sum=torch.float32, check=False)
    assert_says(meter.said[0], by_hand(model, parts, (5, 4)), 0.05)


def test_it_is_unbiased() -> None:
    """Windows of one micro-batch, drawn with replacement: the mean over 1500 is that of the population."""
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
        ([one.signal for one, _ in meter.said], float(mean @ mean)),
        ([one.variance * samples for one, samples in meter.said], trace),
    ):
        found = torch.tensor(values)
        assert len(found) == 1500
        assert abs(float(found.mean()) - right) < 4 * float(found.std()) / math.sqrt(1500)
    proxy = meter.estimate().proxy
    assert proxy is not None and proxy.factor is None and proxy.calibrated is None
    assert meter.estimate().batch_size is None, "the proxy is never passed for the noise scale itself"


def test_the_factor_is_known_once_there_are_windows_of_several() -> None:
    model = Net()
    meter = Recorder(beta=0.95)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accumulate = Accumulator(model, optimizer, lambda p: mse(model, p), observers=[meter])
    torch.manual_seed(1)
    target = 3 + torch.randn(60, 3).double()
    for number in range(60):
        batch = (torch.randn(64, 4).double(), target[number].expand(64, 3) + torch.randn(64, 3))
        accumulate(Window(cut(batch, 64) if number < 20 else cut(batch, 32, 32)))
        proxy = meter.estimate().proxy
        assert proxy is not None and proxy.windows == number + 1
        assert (proxy.factor is None) == (meter.estimate().batch_size is None)
    noise = meter.estimate()
    assert noise.proxy is not None and noise.proxy.factor is not None and noise.batch_size is not None
    assert noise.windows == 40
    expected = noise.batch_size / noise.proxy.factor
    assert noise.proxy.batch_size == pytest.approx(expected, rel=0.3), "of nearly the same windows"
    assert noise.proxy.calibrated == pytest.approx(expected * noise.proxy.factor, rel=0.3)


class Flat(nn.Module):
    """Sees samples and positions as one dimension, which cannot be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(2), nn.Linear(2, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x.reshape(-1, 2)).reshape(len(x), 2, 2)).mean(1)


class Elsewhere(nn.Module):
    """Uses a scale outside of its layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x) + x * self.norm.weight)


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Flat(), "not the first dimension"), (Elsewhere(), "not the sum over its samples")],
)
def test_what_cannot_be_told_is_left_out_and_said(model: nn.Module, reason: str) -> None:
    meter = measured(model, cut(BATCH, 5, 4))
    assert not meter.said and meter.windows == 1, "the noise itself is measured all the same"
    proxy = meter.estimate().proxy
    assert proxy is not None and proxy.batch_size is None
    assert reason in (proxy.reason or "")


def test_in_a_window_of_one_only_the_layers_are_looked_at() -> None:
    model = Net()
    own = {id(p) for p in norm_parameters(model)}
    accumulate = Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), observers=[NoiseMeter(every=1, proxy=True)]
    )
    for sizes, hooked in (((9,), own), ((5, 4), {id(p) for p in model.parameters()})):
        with accumulate.window(Window(cut(BATCH, *sizes))) as window:
            for part in window:
                assert {id(p) for p in model.parameters() if p._backward_hooks} == hooked
                window.backward(mse(model, part))


def test_memory_that_runs_out_in_a_window_of_one() -> None:
    """It is cut in two, of which only the layers were looked at: the whole is not made of nothing."""
    model, failed = Net(), []

    def loss(model: nn.Module, part: Any) -> Tensor:
        if not failed:
            failed.append(1)
            raise RuntimeError(TEXT)
        return mse(model, part)

    with pytest.warns(UserWarning, match="memory ran out"):
        meter = measured(model, cut(BATCH, 9), loss, check=False)
    assert failed, "premise: memory ran out"
    assert_says(meter.said[0], by_hand(model, cut(BATCH, 5, 4), (5, 4)))
    assert meter.windows == 0
    assert meter.estimate().proxy.factor is None  # type: ignore[union-attr]


def test_one_sample_says_nothing() -> None:
    meter = measured(Net(), cut(tuple(leaf[:1] for leaf in BATCH), 1), check=False)
    assert not meter.said
    assert "one sample has nearly all the weight" in (meter.estimate().proxy.reason or "")  # type: ignore[union-attr]


def test_models_without_such_layers_are_refused_and_it_is_off_by_default() -> None:
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
    with accumulate.window(Window(cut(BATCH, 5, 4))) as window:
        for part in window:
            assert all(not module._forward_hooks for module in net.modules())
            window.backward(mse(net, part))
    assert accumulate.noise is not None and accumulate.noise.proxy is None


def test_hooks_go_with_a_window_that_fails() -> None:
    model = Net()
    accumulate = Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), observers=[NoiseMeter(every=1, proxy=True)]
    )
    with pytest.raises(ZeroDivisionError), accumulate.window(Window(cut(BATCH, 9))) as window:  # noqa: PT012
        for part in window:
            assert any(module._forward_hooks for module in model.modules()), "premise: hooks are on inside"
            mse(model, part)
            raise ZeroDivisionError
    assert_nothing_left(model)


def test_no_update_changes_and_a_saved_window_goes_on_bit_for_bit() -> None:
    batches = [cut(batch, 5, 4) if n % 2 else cut(batch, 9) for n, batch in enumerate(rows(9, 14))]

    def new(*, proxy: bool = True) -> tuple[nn.Module, torch.optim.Optimizer, Accumulator]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        meter = NoiseMeter(every=1, proxy=proxy)
        return (
            model,
            optimizer,
            Accumulator(model, optimizer, lambda p: mse(model, p), observers=[meter], check=False),
        )

    model, _, whole = new()
    plain_model, _, plain = new(proxy=False)
    for parts in batches:
        whole(Window(parts))
        plain(Window(parts))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain_model.parameters(), strict=True))
    model, optimizer, accumulate = new()
    for parts in batches[:9]:
        accumulate(Window(parts))
    file = io.BytesIO()
    with accumulate.window(Window(batches[9])) as window:
        for index, part in enumerate(window):
            window.backward(mse(model, part))
            if index == 0:
                torch.save([each.state_dict() for each in (model, optimizer, accumulate)], file)
    file.seek(0)
    again = new()
    for each, saved in zip(again, torch.load(file), strict=True):
        each.load_state_dict(copy.deepcopy(saved))
    for parts in batches[9:]:
        again[2](Window(parts))
    assert again[2].noise == whole.noise
    assert whole.noise is not None and whole.noise.proxy is not None and whole.noise.proxy.windows == 14


def test_mutants_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong ways to take the samples' gradients, and a test above that each must fail."""
    over = seen_samples._over

    def check() -> None:
        test_windows_of_one_and_of_unequal_micro_batches((9,))
        test_a_scaler_clipping_two_losses_and_what_the_users_forward_asks_for()

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
