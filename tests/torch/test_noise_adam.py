"""Noise under Adam's preconditioner, against the formula on gradients computed by hand in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam
from torch.optim.optimizer import Optimizer

from superbatch.errors import InputError
from superbatch.noise.meter import Estimate, NoiseMeter, estimate, power_name
from superbatch.noise.sums import add_sums
from superbatch.torch import Accumulator, Window
from superbatch.torch.masters import MasterWeights, fp32_masters
from superbatch.torch.window.participants.noise import adam
from tests.torch.helpers import mlp, mse, rows
from tests.torch.test_noise import PARTS, SIZES, Tied, assert_nothing_left

TOLERANCE = 1e-12


class Recorder(NoiseMeter):
    """Meter that records the estimates of each window beside the plain noise."""

    def __init__(self, **options: Any) -> None:
        super().__init__(every=1, preconditioned=True, **options)
        self.extra: list[dict[str, Estimate]] = [{}]

    def add(self, estimates: dict[str, Estimate], *, samples: float) -> None:  # type: ignore[override]
        self.extra.append({})
        super().add(estimates, samples=samples)

    def add_beside(self, name: str, one: Estimate, *, samples: float) -> None:
        if math.isfinite(one.signal):
            self.extra[-1][name] = one
        super().add_beside(name, one, samples=samples)


def denominators(model: nn.Module, optimizer: Optimizer, *, amsgrad: bool = False) -> list[Tensor]:
    """``sqrt(v_hat) + eps`` by the formula, from the current state."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            moment = state["max_exp_avg_sq" if amsgrad else "exp_avg_sq"]
            v_hat = moment / (1 - group["betas"][1] ** float(state["step"]))
            found.append((v_hat.sqrt() + group["eps"]).clone())
    assert len(found) == len(list(model.parameters()))
    return found


def by_hand(
    model: nn.Module, losses: Sequence[Callable[[], Tensor]], weights: Sequence[float], d: Sequence[Tensor]
) -> dict[str, Estimate]:
    """Noise from one `torch.autograd.grad` per micro-batch, without coordinates that have no moment."""
    used = [each > 1e-8 * (1 + 1e-9) for each in d]
    mean = sum(float(x[u].sum()) for x, u in zip(d, used, strict=True)) / sum(int(u.sum()) for u in used)
    shares = [weight / sum(weights) for weight in weights]
    gradients = [torch.autograd.grad(loss(), list(model.parameters())) for loss in losses]
    batch = [sum(w * g for w, g in zip(shares, each, strict=True)) for each in zip(*gradients, strict=True)]

    def square(gradient: Sequence[Any], q: int) -> float:
        return sum(
            float((g[u].square() * (mean / x[u]) ** q).sum())
            for g, x, u in zip(gradient, d, used, strict=True)
        )

    q2 = sum(w * w for w in shares)
    return {
        power_name(q): estimate(
            sum(w * w * square(g, q) for w, g in zip(shares, gradients, strict=True)), square(batch, q), q2
        )
        for q in (1, 2)
    }


def assert_close(
    ours: dict[str, Estimate], theirs: dict[str, Estimate], tolerance: float = TOLERANCE
) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        size = abs(expected.signal) + abs(expected.variance)
        assert abs(expected.variance) > 1e-3 * size > 0, "premise: micro-batches differ"
        assert abs(ours[name].signal - expected.signal) <= tolerance * size, (name, ours, theirs)
        assert abs(ours[name].variance - expected.variance) <= tolerance * size, (name, ours, theirs)


def check(
    make: Callable[[nn.Module], Optimizer], *, tolerance: float = TOLERANCE, **options: Any
) -> tuple[nn.Module, Recorder]:
    """Train two windows; the second is measured with the moments of the first."""
    model = mlp()
    optimizer, meter = make(model), Recorder()
    accumulate = Accumulator(model, optimizer, lambda p: mse(model, p), observers=[meter], **options)
    assert accumulate(Window(PARTS)).made
    assert meter.extra == [{}, {}], "there are no second moments yet"
    amsgrad = bool(optimizer.param_groups[0].get("amsgrad"))
    d = denominators(model, optimizer, amsgrad=amsgrad)
    expected = by_hand(model, [lambda p=p: mse(model, p) for p in PARTS], SIZES, d)
    assert accumulate(Window(PARTS)).made
    assert any(
        not torch.allclose(x, y)
        for x, y in zip(d, denominators(model, optimizer, amsgrad=amsgrad), strict=True)
    ), "premise: the update changes the moments"
    # A window adds these estimates after its plain noise.
    assert_close(meter.extra[-1], expected, tolerance)
    assert_nothing_left(model)
    return model, meter


def two_groups(model: nn.Module) -> Optimizer:
    assert isinstance(model, nn.Sequential)
    groups = [
        {"params": list(model[0].parameters()), "eps": 1e-8},
        {"params": list(model[2].parameters()), "eps": 1e-3, "betas": (0.9, 0.9)},
    ]
    return Adam(groups, lr=0.01)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: Adam(model.parameters(), lr=0.01, betas=(0.9, 0.95)),
        lambda model: AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
        lambda model: NAdam(model.parameters(), lr=0.01),
        lambda model: Adam(model.parameters(), lr=0.01, amsgrad=True, betas=(0.9, 0.5)),
        two_groups,
    ],
)
def test_the_metric_uses_the_moments_before_the_window(make: Callable[[nn.Module], Optimizer]) -> None:
    check(make)


def test_noise_is_measured_before_clipping_and_unscaled() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # type: ignore[attr-defined]
    adam_of: Callable[[nn.Module], Optimizer] = lambda model: Adam(model.parameters(), lr=0.01)  # noqa: E731
    check(adam_of, max_grad_norm=1e-2)
    check(adam_of, scaler=scaler, check=False)


def test_a_mutant_with_moments_of_the_windows_own_gradient_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mutant's metric is that after the update, which the window's own gradient biases."""
    right = adam._inverse_of

    def updated(entry: Any) -> Any:
        found = right(entry)
        return None if found is None else 1 / ((1 / found).square() * 1.01 + 1e-4).sqrt()

    with monkeypatch.context() as patch:
        patch.setattr(adam, "_inverse_of", updated)
        with pytest.raises(AssertionError):
            check(lambda model: Adam(model.parameters(), lr=0.01))
    check(lambda model: Adam(model.parameters(), lr=0.01))


def test_coordinates_without_a_moment_are_ignored() -> None:
    """An embedding row that is used for the first time would dominate with 1 / eps^2."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 1)).double()
    optimizer, meter = Adam(model.parameters(), lr=0.01), Recorder()

    def loss(ids: Tensor) -> Tensor:
        return (model(ids)[..., 0] - ids).square().mean()

    accumulate = Accumulator(model, optimizer, loss, observers=[meter], check=False)
    accumulate(Window([torch.tensor([[0, 1]]), torch.tensor([[1, 2]])]))
    d = denominators(model, optimizer)
    assert bool((d[0][3:] == 1e-8).all()), "premise: three rows have no moment"
    microbatches = [torch.tensor([[0, 4]]), torch.tensor([[5, 2], [1, 1]])]
    expected = by_hand(model, [lambda p=p: loss(p) for p in microbatches], (1, 2), d)
    accumulate(Window(microbatches))
    assert_close(meter.extra[-1], expected)


def test_tied_weights_and_partial_gradients() -> None:
    model, microbatches = Tied("reentrant"), [torch.arange(i, i + 6).view(2, 3) % 7 for i in range(3)]
    twin = Tied("not reentrant")

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    optimizer, meter = Adam(model.parameters(), lr=0.01), Recorder()
    accumulate = Accumulator(model, optimizer, lambda ids: loss(model, ids), observers=[meter])
    accumulate(Window(microbatches))
    assert meter.windows == 0, "premise: the first window only detects partial gradients"
    twin.load_state_dict(model.state_dict())
    expected = by_hand(
        twin, [lambda p=p: loss(twin, p) for p in microbatches], (2, 2, 2), denominators(model, optimizer)
    )
    accumulate(Window(microbatches))
    assert_close(meter.extra[-1], expected)


def test_masters_and_low_precision() -> None:
    model = mlp(torch.bfloat16)
    microbatches = [tuple(leaf.bfloat16() for leaf in microbatch) for microbatch in PARTS]
    copies = fp32_masters(model)
    optimizer, meter = Adam(copies.values(), lr=0.01), Recorder()
    accumulate = Accumulator(
        model,
        MasterWeights(optimizer, copies),
        lambda p: mse(model, p),
        observers=[meter],
        gradient_sum=torch.float32,
        check=False,
    )
    accumulate(Window(microbatches))
    d = denominators(model, optimizer)
    expected = by_hand(model, [lambda p=p: mse(model, p) for p in microbatches], SIZES, d)
    accumulate(Window(microbatches))
    assert_close(meter.extra[-1], expected, 1e-2)  # the gradients computed by hand are summed in bfloat16


def test_an_optimizer_without_second_moments_has_no_models() -> None:
    model = mlp()
    meter = Recorder()
    accumulate = Accumulator(
        model, SGD(model.parameters(), lr=0.01), lambda p: mse(model, p), observers=[meter]
    )
    for _ in range(3):
        accumulate(Window(PARTS))
    assert meter.windows == 3 and meter.estimate().models == ()


def trained(updates: int, *, preconditioned: bool, state: Any = None) -> tuple[Any, list[Tensor], Any]:
    model = mlp()
    optimizer = Adam(model.parameters(), lr=0.01)
    meter = NoiseMeter(every=1, preconditioned=preconditioned)
    accumulate = Accumulator(model, optimizer, lambda p: mse(model, p), microbatch_size=3, observers=[meter])
    if state is not None:
        for each, saved in zip((model, optimizer, accumulate), state, strict=True):
            each.load_state_dict(copy.deepcopy(saved))
    for batch in rows(9, 24)[accumulate.updates : updates]:
        accumulate(batch)
    states = [each.state_dict() for each in (model, optimizer, accumulate)]
    return accumulate.noise, [p.detach().clone() for p in model.parameters()], states


def test_the_report_the_intervals_and_the_saved_state() -> None:
    noise, parameters, _ = trained(20, preconditioned=True)
    assert [each.power for each in noise.models] == [0, 1, 2]
    assert [each.windows for each in noise.models] == [20, 19, 19]
    plain = noise.models[0]
    assert (plain.batch_size, plain.low, plain.high) == (noise.batch_size, noise.low, noise.high)
    assert all(each.variance > 0 for each in noise.models)
    ratios = {each.variance / each.signal for each in noise.models}
    assert len(ratios) == 3, "the models differ"
    without, same, _ = trained(20, preconditioned=False)
    assert without.models == ()
    assert all(torch.equal(a, b) for a, b in zip(parameters, same, strict=True)), "no update is changed"
    half = trained(10, preconditioned=True)[2]
    again, *_ = trained(20, preconditioned=True, state=half)
    assert again == noise


def test_each_power_is_right_for_its_curvature() -> None:
    """tr(H P S P) / (G' P H P G) has power 0 (the plain noise) if PHP = 1, 1 if H = 1/P, 2 if H = 1."""
    generator = torch.Generator().manual_seed(0)
    s, g2, d = (torch.rand(50, generator=generator, dtype=torch.float64) + 0.1 for _ in range(3))
    p = 1 / d

    def true(h: Tensor) -> float:
        return float((h * p * p * s).sum() / (g2 * p * p * h).sum())

    def of_power(q: int) -> float:
        return float((p**q * s).sum() / (p**q * g2).sum())

    for q, h in ((0, d * d), (1, d), (2, torch.ones_like(d))):
        assert of_power(q) == pytest.approx(true(h), rel=1e-12)
    # Noise-dominated Adam on a noisy quadratic with S = H: v follows S, so that P = S^-1/2 and PHP = 1.
    d = s.sqrt()
    p = 1 / d
    assert of_power(0) == pytest.approx(true(s), rel=1e-12)
    steep = torch.logspace(-3, 0, 50, dtype=torch.float64)
    s, g2, p = steep, steep, steep.rsqrt()
    assert of_power(0) < of_power(1) < of_power(2) or of_power(0) == pytest.approx(1.0)
    g2 = steep**2  # a gradient in the steep directions
    values = [of_power(q) for q in (0, 1, 2)]
    assert values[0] == pytest.approx(true(s), rel=1e-12)
    assert values[0] < values[1] < values[2], "powers 1 and 2 overestimate"


def test_only_a_metric_without_the_windows_own_gradient_is_unbiased() -> None:
    """4000 windows of four draws each at q = 2. A signal of zero is zero under any metric."""
    generator = torch.Generator().manual_seed(1)
    s, kept = torch.tensor([2.0, 0.5, 4.0]), torch.tensor([1.0, 0.4, 2.0])

    def z(g: Tensor, *, own: bool) -> tuple[float, float]:
        draws = g + s.sqrt() * torch.randn(4000, 4, 3, generator=generator)
        batch = draws.mean(1)
        d2 = 0.5 * kept.square() + 0.5 * batch.square() if own else kept.square().expand(4000, 3)
        a2, b2 = (draws.square() / d2.unsqueeze(1)).sum((1, 2)) / 16, (batch.square() / d2).sum(1)
        found = [estimate(float(a), float(b), 0.25) for a, b in zip(a2, b2, strict=True)]
        right = (float((g / kept).square().sum()), float((s / 4 / kept.square()).sum()))
        scores = []
        for column, true in zip(zip(*found, strict=True), right, strict=True):
            values = torch.tensor(column)
            scores.append((float(values.mean()) - true) / (float(values.std()) / math.sqrt(len(values))))
        return scores[0], scores[1]

    assert max(map(abs, z(torch.tensor([1.0, 0.2, -0.5]), own=False))) < 4
    assert max(map(abs, z(torch.zeros(3), own=False))) < 4
    assert z(torch.zeros(3), own=True)[0] < -8, "a negative signal: the metric is large where the gradient is"


def test_other_backends_refuse_these_options() -> None:
    for option in ({"preconditioned": True}, {"proxy": True}):
        with pytest.raises(InputError, match=r"works only with superbatch\.torch\. Leave these options out"):
            add_sums(NoiseMeter(**option), 2.5, 4.0, 0.5, samples=20.0)
