"""The factor w / W of a loss in bfloat16 or float16 is not rounded to that dtype."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.noise.meter import NoiseMeter
from superbatch.torch import Accumulator, Window
from superbatch.torch.window.participants.parameter_gradients import ParameterGradientSum
from tests.torch.helpers import sgd

Batch = tuple[Tensor, Tensor]


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1).to(dtype)


def loss_in(dtype: torch.dtype) -> Any:
    """Return a loss that is linear in the weights, so that its own gradient is not rounded."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, kept = batch
        assert isinstance(model, nn.Linear)
        per_sample = (x * model.weight).sum(1) + model.bias
        return ((per_sample * kept).sum() / kept.sum()).to(dtype)

    return loss


def batch_of(samples: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(1, 4, (samples, 4), generator=generator).float() * 2.0**-3
    return x, torch.ones(samples)


def gradient_of(model: nn.Module, dtype: torch.dtype, window: Any, weight: Any = None, **options: Any) -> Any:
    seen: list[Tensor] = []

    class Reader(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.extend(p.grad.clone() for group in self.param_groups for p in group["params"])
            return super().step(closure)

    loss = loss_in(dtype)
    optimizer = Reader(model.parameters(), lr=0.1)
    options.setdefault("check", False)
    accumulate = Accumulator(
        model, optimizer, lambda mb: loss(model, mb), weight=weight, gradient_sum=None, **options
    )
    update = accumulate(window)
    assert update.made
    return seen, update, accumulate


def cut(batch: Batch, *sizes: int) -> list[Batch]:
    return list(zip(batch[0].split(list(sizes)), batch[1].split(list(sizes)), strict=True))


def error(found: list[Tensor], batch: Batch) -> float:
    wanted = batch[0].double().mean(0)
    assert wanted.norm() > 0.1
    return float((found[0].double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (1, 2, 4), (4, 2, 1), (1, 1, 1, 1, 1)])
def test_the_factor_is_that_of_float32(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    batch = batch_of(sum(sizes))
    found, *_ = gradient_of(model_of(), dtype, Window(cut(batch, *sizes)))
    # Micro-batches have 1, 2 or 4 samples, so their own means are exact, and only the factor is rounded.
    assert error(found, batch) < 3e-7


def test_three_thirds_in_bfloat16_are_one() -> None:
    """In bfloat16, 1/3 is 0.3340, and three of them add up to 1.00195."""
    assert 3 * float(torch.tensor(1 / 3, dtype=torch.bfloat16)) == 1.001953125
    found, *_ = gradient_of(model_of(), torch.bfloat16, Window(cut(batch_of(12), 4, 4, 4)))
    assert float(found[1]) == pytest.approx(1.0, abs=2e-7)


def test_mutant_that_rounds_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParameterGradientSum, "backward_rounded", ParameterGradientSum.backward)
    with pytest.raises(AssertionError):
        test_three_thirds_in_bfloat16_are_one()


def test_losses_of_several_dtypes_in_one_window() -> None:
    batch, model = batch_of(7), model_of()
    kinds = iter([torch.bfloat16, torch.float32, torch.float16, torch.float32])
    optimizer = sgd(model.parameters())
    accumulator = Accumulator(model, optimizer)
    found: list[Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: found.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
    )
    with accumulator.window(Window(cut(batch, 1, 2, 2, 2))) as window:
        for microbatch in window:
            window.backward(loss_in(next(kinds))(model, microbatch))
    assert error(found, batch) < 3e-7


def test_the_factor_with_a_scaler() -> None:
    batch = batch_of(12)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found, update, _ = gradient_of(model_of(), torch.float16, Window(cut(batch, 4, 4, 4)), scaler=scaler)
    assert error(found, batch) < 3e-7
    assert update.grad_norm is not None


def test_a_window_in_flight_is_resumed_bit_for_bit() -> None:
    batch, loss = batch_of(7), loss_in(torch.bfloat16)
    state: Any = None
    results = []
    for saved in (False, True):
        model = model_of()
        accumulator = Accumulator(model, sgd(model.parameters()))
        left = pytest.raises(ZeroDivisionError) if saved else contextlib.nullcontext()
        with left, accumulator.window(Window(cut(batch, 1, 2, 4))) as window:
            for number, microbatch in enumerate(window):
                window.backward(loss(model, microbatch))
                if saved and number == 1:
                    state = copy.deepcopy(accumulator.state_dict())
                    raise ZeroDivisionError
        if saved:
            accumulator = Accumulator(model, sgd(model.parameters()))
            accumulator.load_state_dict(state)
            with accumulator.window(Window(cut(batch, 1, 2, 4))) as window:
                for microbatch in window:
                    window.backward(loss(model, microbatch))
        assert window.update is not None
        assert window.update.made
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_the_noise_is_that_of_a_loss_in_float32() -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        meter = NoiseMeter(every=1)
        _, _, accumulate = gradient_of(
            model_of(), dtype, Window(cut(batch_of(7), 1, 2, 4)), observers=[meter]
        )
        found.append(accumulate.noise)
    assert found[0].windows == found[1].windows == 1
    wanted, got = found[0].groups[0], found[1].groups[0]
    assert (got.signal, got.variance) == pytest.approx((wanted.signal, wanted.variance), rel=1e-4)
