"""Low precision: autocast, gradient scaler, float32 sums of narrow gradients, masters, momentum, memory."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import InputError, OptimizerError
from superbatch.torch import Accumulator, count_tokens
from superbatch.torch.masters import MasterWeights, fp32_masters
from superbatch.torch.memory.meter import peak_bytes
from superbatch.torch.options import ClipValue
from tests.torch.helpers import (
    assert_same_parameters,
    large_batch,
    mlp,
    mse,
    rows,
    sgd,
    start_of,
    tiny_lm,
    token_mean,
    tokens,
    train_both,
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


# -- autocast and the gradient scaler ------------------------------------------------------------------------


@pytest.mark.parametrize("outside", [False, True])
def test_autocast_in_bfloat16(outside: bool) -> None:
    """The forward rounds to three digits; the weighting of micro-batches adds no error beyond that."""
    reference, model = mlp(F32), mlp(F32)
    start, batches = start_of(reference), rows(10, 3, F32)
    seen_dtypes = set()

    def loss(network: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            out = network(batch[0])
            seen_dtypes.add(out.dtype)
            return nn.functional.mse_loss(out.float(), batch[1])

    large_batch(sgd(reference.parameters()), lambda b: loss(reference, b), batches)
    accumulate = Accumulator(model, sgd(model.parameters()), lambda mb: loss(model, mb), microbatch_size=4)
    for batch in batches:
        with torch.autocast("cpu", dtype=BF16, enabled=outside):
            accumulate(batch)
    # The first-window check decides cases of rounding in float64, which autocast does not convert.
    assert BF16 in seen_dtypes <= {BF16, torch.float64}, "premise: the forward is in bfloat16"
    assert_same_parameters(reference, model, 3e-3, start=start)


@pytest.mark.parametrize("scale", [8.0, 1024.0])
@pytest.mark.parametrize("clip", [{}, {"max_grad_norm": 0.3}, {"clip": ClipValue(0.02)}])
def test_a_scaler_changes_no_update(scale: float, clip: dict[str, Any]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    batches = rows(10, 5, F32)
    both = train_both(lambda: mlp(F32), mse, batches, microbatch_size=4, scaler=scaler, **clip)
    assert min(both.seen.norms) > 0.3
    both.check()
    assert scaler.get_scale() == 4 * scale, "premise: the scale grew twice in five updates"


def test_a_disabled_scaler_has_no_effect() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    train_both(mlp, mse, rows(10), microbatch_size=4, scaler=scaler, max_grad_norm=0.3).check()


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_overflow_skips_update_and_scheduler_and_the_next_window_is_exact(bad: int) -> None:
    reference, model = mlp(F32), mlp(F32)
    start, batches = start_of(reference), rows(10, 4, F32)
    theirs, ours = sgd(reference.parameters()), sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(ours, 0.5)
    large_batch(
        theirs, lambda b: mse(reference, b), batches[:1] + batches[2:],
        scheduler=torch.optim.lr_scheduler.ExponentialLR(theirs, 0.5),
    )  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    overflow = {"now": False, "microbatch": 0}

    def loss_fn(microbatch: Any) -> Tensor:
        loss = mse(model, microbatch)
        if overflow["now"]:
            overflow["microbatch"] += 1
            if overflow["microbatch"] == bad + 1:
                # The loss is finite, but its scaled gradient is not, as with fp16 activations.
                loss = loss + (next(model.parameters()).sum() * 1e38) * 1e-38 * 1e38 * 0.5
        return loss

    accumulate = Accumulator(
        model, ours, loss_fn, microbatch_size=4, scaler=scaler, scheduler=scheduler, check=False
    )
    accumulate(batches[0])
    before = copy.deepcopy(
        (model.state_dict(), ours.state_dict()["state"], scheduler.state_dict()["last_epoch"])
    )
    overflow["now"] = True
    update = accumulate(batches[1])
    overflow["now"] = False
    assert overflow["microbatch"] == 3
    assert not update.made and "overflow" in str(update.skipped)
    after = (model.state_dict(), ours.state_dict()["state"], scheduler.state_dict()["last_epoch"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert scaler.get_scale() == 32.0
    assert accumulate.updates == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    for batch in batches[2:]:
        assert accumulate(batch).made
    assert_same_parameters(reference, model, 1e-6, start=start)


def test_float16_parameters_with_masters_and_a_scaler() -> None:
    """Losses are scaled so that fp16 gradients do not vanish; the masters get them unscaled."""
    model = mlp(F16)
    start = start_of(model)
    masters = fp32_masters(model)
    batch = rows(12, 1, F16)[0]
    tiny = 2.0**-14
    expected = copy.deepcopy(model).double()
    loss = mse(expected, [part.double() for part in batch]) * tiny
    truth = torch.autograd.grad(loss, list(expected.parameters()))
    accumulate = Accumulator(
        model,
        MasterWeights(torch.optim.SGD(masters.values(), lr=1.0), masters),
        lambda mb: mse(model, mb).float() * tiny,
        microbatch_size=4,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**14),
    )
    assert accumulate(batch).made
    for (name, parameter), gradient in zip(model.named_parameters(), truth, strict=True):
        moved = start[name].double() - masters[parameter].detach().double()
        assert float((moved - gradient).norm() / gradient.norm()) < 5e-3, name
        assert float(gradient.abs().max()) < 1e-4, "premise: fp16 alone would round these away"


# -- sums of many narrow gradients ------------------------------------------------------------------------


class ManyCoordinates(nn.Module):
    """Twenty thousand coordinates, each with its own gradient in every micro-batch."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(20_000, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(1).mean()


def narrow_sum(dtype: torch.dtype, *, same_sign: bool, k: int = 256, **options: Any) -> float:
    """Relative error of the summed gradient of k micro-batches of one sample."""
    torch.manual_seed(0)
    model = ManyCoordinates(dtype)
    x = (torch.randn(k, 20_000).abs() if same_sign else torch.randn(k, 20_000) + 1).to(dtype)
    seen: list[Tensor] = []
    # With float32 masters the optimizer gets the sum before any rounding to the parameter's dtype.
    masters = fp32_masters(model)
    optimizer = torch.optim.SGD(masters.values(), lr=1.0)
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(m.grad.clone() for m in masters.values() if m.grad is not None)
    )
    accumulate = Accumulator(
        model, MasterWeights(optimizer, masters), model, microbatch_size=1, check=False, **options
    )
    assert accumulate(x).microbatches == k
    truth = x.double().mean(0)
    return float((seen[0].double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("same_sign", [True, False])
def test_256_narrow_gradients_summed_in_float32(dtype: torch.dtype, same_sign: bool) -> None:
    """science.md section 8 gives 1e-8 for sums of exact gradients, as here."""
    assert narrow_sum(dtype, same_sign=same_sign, gradient_sum=F32) < 1e-6
    # Premise: in their own dtype the same sum is wrong in the third digit (bf16) or the fourth (fp16).
    assert narrow_sum(dtype, same_sign=same_sign, gradient_sum=None) > (5e-3 if dtype == BF16 else 5e-4)


def test_a_sum_in_bfloat16_stops_growing() -> None:
    """Stagnation: the bfloat16 sum of 1024 equal gradients reaches only a quarter of their sum."""

    def total(dtype: torch.dtype | None) -> float:
        model = nn.Linear(4, 1, bias=False).bfloat16()
        nn.init.zeros_(model.weight)
        accumulate = Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=1.0), lambda mb: model(mb).sum(),
            microbatch_size=1, reduction="sum", gradient_sum=dtype, check=False,
        )  # fmt: skip
        accumulate(torch.ones(1024, 4, dtype=BF16))
        return -float(model.weight.detach()[0, 0])

    assert total(F32) == 1.0
    assert total(None) <= 0.5


def many(model: nn.Module, samples: int, **options: Any) -> Accumulator:
    accumulate = Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda mb: mse(model, mb), microbatch_size=1,
        check=False, **options,
    )  # fmt: skip
    accumulate(rows(samples, 1, next(model.parameters()).dtype)[0])
    return accumulate


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_default_sums_more_than_16_narrow_gradients_in_float32_and_warns_once(
    dtype: torch.dtype,
) -> None:
    models = [mlp(dtype) for _ in range(3)]
    with pytest.warns(UserWarning, match="17 micro-batches.*float32.*gradient_sum") as caught:
        accumulate = many(models[0], 17)
    accumulate(rows(20, 1, dtype)[0])  # warnings are errors: there is no second one
    assert len(caught) == 1
    many(models[1], 17, gradient_sum=F32)(rows(20, 1, dtype)[0])
    many(models[2], 16)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_wide_parameters_need_no_buffers_and_no_warning() -> None:
    many(mlp(F32), 40)
    many(mlp(), 40, gradient_sum=F32)


def test_float32_buffers_round_once_for_bfloat16_parameters() -> None:
    """The optimizer of bfloat16 parameters gets the float32 sum, rounded once."""
    model = mlp(BF16)
    batch = rows(64, 1, BF16)[0]
    exact = copy.deepcopy(model).double()
    per_sample = [
        torch.autograd.grad(mse(model, pair), list(model.parameters()))
        for pair in zip(*(part.split(1) for part in batch), strict=True)
    ]
    expected = [
        torch.stack(gradients).float().sum(0).div(64).to(BF16) for gradients in zip(*per_sample, strict=True)
    ]
    seen: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
    )
    Accumulator(model, optimizer, lambda mb: mse(model, mb), microbatch_size=1, gradient_sum=F32)(batch)
    truth = torch.autograd.grad(mse(exact, [part.double() for part in batch]), list(exact.parameters()))
    for ours, theirs, exactly in zip(seen, expected, truth, strict=True):
        assert ours.dtype == BF16 and theirs.norm() > 0
        # The factor 1/64 is a power of two: only the order of float32 additions may change a rounding.
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-3
        assert float((ours.double() - exactly).norm() / exactly.norm()) < 2e-2


# -- float32 masters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatch_size", [1, 4])
def test_masters_match_copies_kept_by_hand(microbatch_size: int) -> None:
    model: Any = mlp(BF16)
    model[2].bias.requires_grad = False
    hand = copy.deepcopy(model)
    start = start_of(hand)
    copies = [p.detach().float().requires_grad_() for p in hand.parameters() if p.requires_grad]
    trained = [p for p in hand.parameters() if p.requires_grad]
    by_hand = torch.optim.AdamW(copies, lr=0.02)
    masters = fp32_masters(model)
    assert len(masters) == 3
    accumulate = Accumulator(
        model,
        MasterWeights(torch.optim.AdamW(masters.values(), lr=0.02), masters),
        lambda mb: mse(model, mb),
        microbatch_size=microbatch_size,
    )
    for x, y in rows(8, 4, BF16):
        for copied in copies:
            copied.grad = torch.zeros_like(copied)
        for first in range(0, 8, microbatch_size):
            part = slice(first, first + microbatch_size)
            gradients = torch.autograd.grad(mse(hand, (x[part], y[part])), trained)
            for copied, gradient in zip(copies, gradients, strict=True):
                assert copied.grad is not None
                copied.grad += gradient.float() * (microbatch_size / 8)
        by_hand.step()
        with torch.no_grad():
            for parameter, copied in zip(trained, copies, strict=True):
                parameter.copy_(copied)
        assert accumulate((x, y)).made
    for master, copied in zip(masters.values(), copies, strict=True):
        assert master.dtype == F32
        torch.testing.assert_close(master, copied, rtol=1e-6, atol=1e-7)
    assert_same_parameters(hand, model, 1e-2, start=start, still=["2.bias"])
    assert all(torch.equal(parameter, master.to(BF16)) for parameter, master in masters.items())
    assert all(p.grad is None and m.grad is None for p, m in masters.items())


def test_masters_of_wide_parameters_are_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 6).bfloat16(), nn.Linear(6, 3))
    masters = fp32_masters(model)
    wide = list(model[1].parameters())
    assert all(masters[parameter] is parameter for parameter in wide)
    start = start_of(model)

    def loss_fn(microbatch: Any) -> Tensor:
        return mse(model[1], (torch.tanh(model[0](microbatch[0].bfloat16())).float(), microbatch[1]))

    optimizer = torch.optim.SGD(masters.values(), lr=0.1)
    assert Accumulator(model, MasterWeights(optimizer, masters), loss_fn, microbatch_size=4)(
        rows(10, 1, F32)[0]
    ).made
    assert all(not torch.equal(start[name], value) for name, value in model.named_parameters())


# -- into the momentum buffer --------------------------------------------------------------------------------

MOMENTUM: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "weight decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, weight_decay=0.3),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, maximize=True),
    "groups": lambda p: torch.optim.SGD(
        [{"params": p[:1], "lr": 0.2, "weight_decay": 0.2}, {"params": p[1:], "momentum": 0.5}],
        lr=0.1,
        momentum=0.9,
    ),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
}


@pytest.mark.parametrize("dtype", [torch.float64, F32])
@pytest.mark.parametrize("name", MOMENTUM)
def test_accumulating_into_momentum_is_exact(name: str, dtype: torch.dtype) -> None:
    both = train_both(
        lambda: mlp(dtype),
        mse,
        rows(11, 5, dtype),
        MOMENTUM[name],
        microbatch_size=4,
        gradient_sum="momentum",
        scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8),
    )
    both.check()
    assert all(update.grad_norm is None for update in both.updates)


def test_into_momentum_and_into_grad_leave_the_same_optimizer_state() -> None:
    """A run may switch between the two: the buffers are SGD's own."""
    reference, model = mlp(), mlp()
    start, batches = start_of(reference), rows(11, 4)
    theirs, ours = sgd(reference.parameters()), sgd(model.parameters())
    large_batch(theirs, lambda b: mse(reference, b), batches)
    turns: list[Literal["grad", "momentum"]] = ["momentum", "grad", "momentum", "grad"]
    for into, batch in zip(turns, batches, strict=True):
        Accumulator(
            model,
            ours,
            lambda mb: mse(model, mb),
            microbatch_size=3,
            gradient_sum="momentum" if into == "momentum" else "auto",
        )(batch)
    assert_same_parameters(reference, model, 1e-12, start=start)
    one, two = theirs.state_dict()["state"], ours.state_dict()["state"]
    assert one.keys() == two.keys() and len(one) == 4
    torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-14)


def test_into_momentum_with_a_sum_tokens_and_an_unused_parameter() -> None:
    def make() -> nn.Module:
        model = tiny_lm()
        model.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        return model

    batches = [tokens([7, 1, 2, 0, 0, 5], seed=seed) for seed in range(3)]
    train_both(
        make,
        token_mean,
        batches,
        microbatch_size=2,
        weight=count_tokens("labels"),
        gradient_sum="momentum",
    ).check(still=["unused"])


def test_a_parameter_used_only_at_times_keeps_its_momentum() -> None:
    """Like SGD, a window does not change a parameter without a gradient, or its momentum."""
    batches = [(x, y, torch.full((10,), n in (0, 3))) for n, (x, y) in enumerate(rows(10, 5))]

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.extra = mlp(), nn.Parameter(torch.ones(3, dtype=torch.float64))

    def loss(model: Any, batch: Any) -> Tensor:
        x, y, use = batch
        out = model.net(x)
        return nn.functional.mse_loss(out * model.extra if bool(use.any()) else out, y)

    train_both(Partly, loss, batches, microbatch_size=4, gradient_sum="momentum").check()


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "Nesterov"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1), "dampening"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "no momentum buffer"),
        (lambda p: torch.optim.Adam(p, lr=0.1), "Adam"),
    ],
)
def test_into_momentum_is_refused_where_it_is_not_exact(optimizer: Any, reason: str) -> None:
    model = mlp()
    with pytest.raises(OptimizerError, match=reason):
        Accumulator(model, optimizer(model.parameters()), lambda mb: mse(model, mb), gradient_sum="momentum")


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 1.0},
        {"clip": ClipValue(1.0)},
        {"scaler": torch.amp.GradScaler("cpu")},
        {"weight": "returned"},
        {"nonfinite": "skip_microbatch"},
    ],
)
def test_into_momentum_is_refused_with_options_that_need_the_gradient(options: dict[str, Any]) -> None:
    model = mlp()
    with pytest.raises(InputError, match='gradient_sum="momentum" does not work with ' + next(iter(options))):
        Accumulator(
            model, sgd(model.parameters()), lambda mb: mse(model, mb), gradient_sum="momentum", **options
        )


# -- memory -----------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Model with float32 parameters of 5.5 MB in several tensors, and activations of over 16 kB a sample."""

    def __init__(self, dtype: torch.dtype = F32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False, dtype=dtype) for _ in range(5))
        self.grow = nn.Linear(256, 4096, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.grow(x).square().mean()


def by_hand(
    model: Wide, optimizer: torch.optim.Optimizer, batch: Tensor, size: int, clip: float | None
) -> None:
    """Best hand-written loop: views of the batch, no references kept, gradients freed at once."""
    for microbatch in batch.split(size):
        (model(microbatch) * (len(microbatch) / len(batch))).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("clip", [None, 0.001])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_peak_memory_is_that_of_the_best_loop(name: str, clip: float | None) -> None:
    def make() -> tuple[Wide, torch.optim.Optimizer]:
        model = Wide()
        return model, {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[name](model.parameters(), lr=0.01)

    batch = torch.randn(33, 256)
    model, optimizer = make()
    by_hand(model, optimizer, batch, 3, clip)  # the first update makes the optimizer's state
    best = peak_bytes(lambda: by_hand(model, optimizer, batch, 3, clip))
    model, optimizer = make()
    accumulate = Accumulator(model, optimizer, model, microbatch_size=3, max_grad_norm=clip)
    accumulate(batch)
    gc.collect()
    ours = peak_bytes(lambda: accumulate(batch))
    parameters = sum(p.nbytes for p in model.parameters())
    assert best > parameters, "premise: gradients and activations are counted"
    # The margin is for scalars: a loss and a factor per micro-batch.
    assert ours <= best + 1024, f"{ours / best:.4f} of the hand-written loop"


def test_memory_does_not_grow_with_the_number_of_microbatches() -> None:
    model = Wide()
    accumulate = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.01), model, microbatch_size=2)
    few, lots = torch.randn(4, 256), torch.randn(80, 256)
    accumulate(few)
    accumulate(lots)
    assert peak_bytes(lambda: accumulate(lots)) <= peak_bytes(lambda: accumulate(few)) + 1024


def test_float32_buffers_hold_four_bytes_per_parameter_and_no_narrow_gradient_beside_them() -> None:
    model = Wide(BF16)
    numbers = sum(p.numel() for p in model.parameters())
    largest = max(p.numel() for p in model.parameters())
    batch = torch.randn(20, 256, dtype=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    accumulate = Accumulator(model, optimizer, model, microbatch_size=1, gradient_sum=F32, check=False)
    with accumulate.window(batch) as window:
        for microbatch in window:
            window.backward(model(microbatch))
            assert all(p.grad is None for p in model.parameters()), "the narrow gradient is freed at once"
    peak = peak_bytes(lambda: accumulate(batch))
    # Buffers, the rounded gradients at the end of the window, and one gradient of the backward.
    assert 4 * numbers < peak <= 4 * numbers + 2 * numbers + 8 * largest


def test_into_momentum_each_backward_frees_its_gradients() -> None:
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    accumulate = Accumulator(model, optimizer, model, microbatch_size=4, gradient_sum="momentum")
    batch = torch.randn(16, 256)
    accumulate(batch)
    with accumulate.window(batch) as window:
        for microbatch in window:
            window.backward(model(microbatch))
            assert all(p.grad is None for p in model.parameters())
    total = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    # On the CPU the copy for a rollback counts, too; on a GPU it is on the host.
    assert peak_bytes(lambda: accumulate(batch)) <= total + 2 * largest


def graphs() -> int:
    # Compare types: `isinstance` would import lazy modules.
    return sum(type(o) is Tensor and o.grad_fn is not None for o in gc.get_objects())


def test_an_update_keeps_no_graph_alive() -> None:
    model = mlp()
    accumulate = Accumulator(model, sgd(model.parameters()), lambda mb: mse(model, mb), microbatch_size=2)
    batch = rows(64, 1)[0]
    accumulate(batch)
    gc.collect()
    before = graphs()
    update = accumulate(batch)
    gc.collect()
    assert graphs() <= before
    assert not [value for value in vars(update).values() if isinstance(value, Tensor)]


def test_a_scaler_with_an_optimizer_that_got_no_gradient() -> None:
    """GradScaler refuses such an optimizer, so it is left out and the other one steps."""
    one, two = mlp(F32), mlp(F32)
    batch = rows(10, 1, F32)[0]
    reference, start = mlp(F32), start_of(one)
    large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), [batch])
    accumulate = Accumulator(
        [one, two],
        [sgd(one.parameters()), sgd(two.parameters())],
        lambda mb: mse(one, mb),
        microbatch_size=4,
        scaler=torch.amp.GradScaler("cpu", init_scale=8.0),
    )
    assert accumulate(batch).made
    assert_same_parameters(reference, one, 1e-6, start=start)
    assert all(torch.equal(start[name], value) for name, value in two.named_parameters())
