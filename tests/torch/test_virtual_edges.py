"""Virtual batches in training programs: errors, optimizers, precision, threads, state after the block."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.errors import CoupledSamplesError, InputError, WindowError
from superbatch.torch import virtual_batch
from superbatch.torch.checks import introspection
from superbatch.torch.virtual.trace.tensor import VirtualTensor
from tests.torch.coupled import models

N = 14
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randint(0, 3, (N,), generator=torch.Generator().manual_seed(2))


def make(dropout: float = 0.0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Dropout(dropout), nn.Linear(8, 3)
        )
    return net.double()


def loss_of(model: Callable[[Any], Tensor], x: Any = X) -> Tensor:
    return F.cross_entropy(model(x), Y)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert found and any(bool(grad.any()) for grad in found), "premise: there are gradients"
    return found


def assert_close(found: Sequence[Any], expected: Sequence[Any], tolerance: float = 1e-12) -> None:
    largest = max(float(tensor.double().norm()) for tensor in expected)
    for a, b in zip(found, expected, strict=True):
        assert type(a) in (Tensor, nn.Parameter), "the tensor is still virtual"
        assert float((a.double() - b.double()).norm()) <= tolerance * largest


def real_gradients(model: nn.Module) -> list[Tensor]:
    loss_of(model).backward()
    return gradients(model)


def state(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


# -- random numbers -----------------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_masks_and_another_seed_others() -> None:
    found = []
    for seed in (1, 1, 2):
        model = make(dropout=0.5)
        torch.manual_seed(seed)
        with virtual_batch(model, 4) as batch:
            loss_of(model, batch(X)).backward()
        found.append(gradients(model))
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert not torch.equal(found[0][0], found[2][0])


def test_a_checkpoint_draws_the_same_masks_again() -> None:
    from torch.utils.checkpoint import checkpoint

    found = []
    for reentrant in (None, True, False):
        model, x = make(dropout=0.5), X.clone().requires_grad_()
        torch.manual_seed(3)
        with virtual_batch(model, 4) as batch:
            given: Any = batch(x)
            hidden: Any = (
                model(given) if reentrant is None else checkpoint(model, given, use_reentrant=reentrant)
            )
            F.cross_entropy(hidden, Y).backward()
        found.append(gradients(model))
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
def test_dropout_masks_keep_their_rate_and_are_reused_in_the_backward(rate: float) -> None:
    ones = torch.ones(512, 256, dtype=torch.float64, requires_grad=True)
    with virtual_batch(nn.Identity(), 64) as batch:
        kept: Any = F.dropout(batch(ones), rate)
        kept.sum().backward()
        mask = torch.as_tensor(kept.detach().numpy())
    assert ones.grad is not None and torch.equal(mask, ones.grad), "the backward has the mask of the forward"
    share = float((mask != 0).double().mean())
    deviation = (rate * (1 - rate) / mask.numel()) ** 0.5
    assert abs(share - (1 - rate)) < 5 * deviation
    assert torch.allclose(mask[mask != 0], torch.tensor(1 / (1 - rate), dtype=torch.float64))
    masks = (mask != 0).double().split(64)
    for index, later in enumerate(masks[1:]):
        # Two independent masks of rate p agree in a share (1 - p)^2 + p^2 of their elements.
        agree = float((later == masks[index]).double().mean())
        expected = rate**2 + (1 - rate) ** 2
        assert abs(agree - expected) < 5 * (expected * (1 - expected) / later.numel()) ** 0.5


def test_two_layers_of_dropout_draw_two_masks() -> None:
    with virtual_batch(nn.Identity(), 16) as batch:
        x = batch(torch.ones(64, 50))
        first, second = (torch.as_tensor(F.dropout(x, 0.5).numpy()) for _ in range(2))
    assert 0.4 < float((first == second).double().mean()) < 0.6


def test_normal_numbers_have_their_moments() -> None:
    with virtual_batch(nn.Identity(), 50) as batch:
        drawn = torch.as_tensor(torch.randn_like(batch(torch.zeros(400, 500))).numpy())
    assert abs(float(drawn.mean())) < 5 / drawn.numel() ** 0.5
    assert abs(float(drawn.var()) - 1) < 5 * (2 / drawn.numel()) ** 0.5
    assert float((drawn[:50] - drawn[50:100]).abs().min(0).values.max()) > 0.0


# -- exceptions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["after the backward", "in the forward", "in the backward"])
def test_an_exception_rolls_the_block_back(where: str) -> None:
    model = make(dropout=0.5)
    old = model[0].weight.grad = torch.ones_like(model[0].weight)
    before, random = state(model), torch.get_rng_state()

    def fail(*unused: Any) -> None:
        raise KeyError(where)

    hook: Any = None
    if where == "in the forward":
        hook = model[4].register_forward_hook(fail)
    elif where == "in the backward":
        hook = model[1].weight.register_hook(fail)
    with pytest.raises(KeyError, match=where), virtual_batch(model, 4) as batch:  # noqa: PT012 the block is what fails
        loss_of(model, batch(X)).backward()
        fail()
    if hook is not None:
        hook.remove()
    assert model[0].weight.grad is old and torch.equal(old, torch.ones_like(old))
    assert all(parameter.grad is None for parameter in list(model.parameters())[1:])
    assert all(torch.equal(a, b) for a, b in zip(state(model), before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    model[0].weight.grad, model[3].p = None, 0.0
    with virtual_batch(model, 4) as batch:
        loss_of(model, batch(X)).backward()
    assert_close(gradients(model), real_gradients(make()))


def test_another_number_of_samples_raises() -> None:
    with virtual_batch(make(), 4) as batch:
        batch(X)
        with pytest.raises(InputError, match=r"5 samples after 14 samples in the same block\. Use one block"):
            batch(X[:5])


def test_on_gather_warns_or_raises() -> None:
    model = make()
    with (
        pytest.warns(UserWarning, match=r"sort.*has no rule, so it gathers 112 bytes"),
        virtual_batch(model, 4, on_gather="warn") as batch,
    ):
        batch(X)[:, 0].sort().values.sum()
    with (
        pytest.raises(CoupledSamplesError, match=r"sort.*whole batch.*on_gather"),
        virtual_batch(model, 4, on_gather="error") as batch,
    ):
        batch(X)[:, 0].sort()


def test_after_the_block_the_loss_is_readable_and_outputs_raise() -> None:
    model = make()
    with virtual_batch(model, 4) as batch:
        outputs = model(batch(X))
        loss = F.cross_entropy(outputs, Y)
        loss.backward()
    expected = loss_of(make()).item()
    assert loss.item() == pytest.approx(expected, rel=1e-14)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-14)
    assert f"{loss:.3f}" == f"{expected:.3f}"
    assert f"{expected:.4f}" in repr(loss)
    assert float(loss.detach() * 2) == pytest.approx(2 * expected, rel=1e-14)
    with pytest.raises(
        WindowError, match=r"not materialized before its block ended\. Read it inside the block"
    ):
        outputs.sum()


# -- training loops -----------------------------------------------------------------------------------------


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-2)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_the_whole_update_may_be_in_the_block(optimizer: Callable[[nn.Module], Any]) -> None:
    ours, plain = make(), make()
    updates = [(model, optimizer(model)) for model in (ours, plain)]
    for _ in range(3):
        norms = []
        for model, by in updates:
            by.zero_grad()
            with virtual_batch(model, 4) as batch:
                loss_of(model, batch(X) if model is ours else X).backward()
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
                by.step()
        assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-12)
    assert_close(state(ours), state(plain))


def test_optimizer_state_created_in_a_block_works_outside(tmp_path: Path) -> None:
    ours, plain = make(), make()
    first, second = sgd(ours), sgd(plain)
    with virtual_batch(ours, 4) as batch:
        loss_of(ours, batch(X)).backward()
        first.step()
    loss_of(plain).backward()
    second.step()
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    for kept, expected in zip(saved["state"].values(), second.state_dict()["state"].values(), strict=True):
        assert_close([kept["momentum_buffer"]], [expected["momentum_buffer"]])
    for _ in range(2):
        for model, by in ((ours, first), (plain, second)):
            by.zero_grad()
            loss_of(model).backward()
            by.step()
    assert_close(state(ours), state(plain))


def test_several_updates_in_one_block() -> None:
    ours, plain = make(), make()
    first, second = sgd(ours), sgd(plain)
    with virtual_batch(ours, 4) as batch:
        x = batch(X)
        for _ in range(3):
            first.zero_grad()
            loss_of(ours, x).backward()
            first.step()
    for _ in range(3):
        second.zero_grad()
        loss_of(plain).backward()
        second.step()
    assert_close(state(ours), state(plain))


def test_gradients_accumulate_in_the_existing_grad_tensors() -> None:
    ours, plain = make(), make()
    for model in (ours, plain):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    there = [parameter.grad for parameter in ours.parameters()]
    for _ in range(2):
        with virtual_batch(ours, 4) as batch:
            loss_of(ours, batch(X)).backward()
        loss_of(plain).backward()
    assert all(parameter.grad is grad for parameter, grad in zip(ours.parameters(), there, strict=True))
    assert_close(gradients(ours), gradients(plain))


def test_frozen_and_tied_parameters() -> None:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net: Any = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6)).double()
        net[3].weight = net[0].weight
        net[1].requires_grad_(requires_grad=False)
        return net

    ours, plain = build(), build()
    with virtual_batch(ours, 4) as batch:
        ours(batch(X)).square().mean().backward()
    plain(X).square().mean().backward()
    assert [p.grad is None for p in ours.parameters()] == [p.grad is None for p in plain.parameters()]
    assert_close(gradients(ours), gradients(plain))


def test_hooks_run_once_and_may_change_gradients() -> None:
    def run(model: Any, x: Any) -> tuple[list[Tensor], list[str]]:
        seen: list[str] = []

        def full(module: Any, inputs: Any, outputs: Any) -> None:
            seen.append(f"backward {tuple(outputs[0].shape)}")

        model[0].weight.register_hook(lambda grad: seen.append(f"grad {tuple(grad.shape)}") or grad * 3)
        model[2].register_full_backward_hook(full)
        model[1].register_forward_hook(lambda module, inputs, output: output * 2)
        model[4].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
        loss_of(model, x).backward()
        return gradients(model), seen

    ours, plain = make(), make()
    with virtual_batch(ours, 4) as batch:
        _, seen = run(ours, batch(X))
    expected, seen_plain = run(plain, X)
    assert seen == seen_plain
    assert_close(gradients(ours), expected)


def test_parameters_of_the_loss_get_real_gradients_too() -> None:
    ours, plain = make(), make()
    scales = [nn.Parameter(torch.full((3,), 0.7, dtype=torch.float64)) for _ in range(2)]
    for _ in range(2):
        with virtual_batch(ours, 4) as batch:
            F.cross_entropy(ours(batch(X)) * scales[0].exp(), Y).backward()
        F.cross_entropy(plain(X) * scales[1].exp(), Y).backward()
    assert_close([*gradients(ours), scales[0].grad], [*gradients(plain), scales[1].grad])


def test_nested_blocks_with_the_same_and_with_another_model() -> None:
    ours, plain, other = make(), make(), make()
    with virtual_batch(ours, 4) as batch:
        outer = loss_of(ours, batch(X))
        with virtual_batch(ours, 3) as inner:
            F.cross_entropy(ours(inner(X[:9])), Y[:9]).backward()
        with virtual_batch(other, 5) as inner:
            loss_of(other, inner(X)).backward()
        outer.backward()
    expected = loss_of(plain)
    F.cross_entropy(plain(X[:9]), Y[:9]).backward()
    expected.backward()
    assert_close(gradients(ours), gradients(plain))
    assert_close(state(ours), state(plain))
    assert_close(gradients(other), real_gradients(make()))


def test_batch_may_be_called_several_times() -> None:
    ours = make()
    with virtual_batch(ours, 4) as batch:
        F.cross_entropy(ours(batch({"x": X})["x"]), batch(Y)).backward()
    assert_close(gradients(ours), real_gradients(make()))


def test_a_mean_of_integers_over_samples_raises_as_in_torch() -> None:
    with pytest.raises(RuntimeError, match="mean\\(\\): could not infer output dtype"):
        X.long().mean(0)
    with virtual_batch(nn.Linear(6, 1), 4) as batch:
        x = batch(X)
        with pytest.raises(RuntimeError, match="mean\\(\\): could not infer output dtype"):
            x.long().mean(0)
        assert torch.equal(
            torch.as_tensor(x.long().mean(0, dtype=X.dtype).numpy()), X.long().mean(0, dtype=X.dtype)
        )


def test_a_foreach_operator_with_one_result_returns_a_list() -> None:
    model = make()
    real, found = ([] for _ in range(2))
    for results, wrap in ((real, None), (found, 4)):
        model.zero_grad()
        if wrap is None:
            torch.cat(torch.ops.aten._foreach_mul([model(X)], 2.0)).square().mean().backward()
        else:
            with virtual_batch(model, wrap) as batch:
                torch.cat(torch.ops.aten._foreach_mul([model(batch(X))], 2.0)).square().mean().backward()
        results += [gradient.clone() for gradient in gradients(model)]
    assert all(
        (a - b).norm() <= 1e-12 * max(g.norm() for g in real) for a, b in zip(found, real, strict=True)
    )


class CreatesLayer(nn.Module):
    """Model that creates a layer in its first forward and stores statistics in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if not hasattr(self, "norm"):
            self.norm = nn.BatchNorm1d(h.shape[1], dtype=torch.float64)
        self.norm.register_buffer("center", h.detach().mean(0))
        self.norm.scale = h.detach().std()
        return self.norm(h)


def test_a_layer_created_in_the_forward_has_real_tensors_after_the_block() -> None:
    torch.manual_seed(0)
    model = CreatesLayer()
    with virtual_batch(model, 4) as batch:
        model(batch(X)).sum().backward()
    h = model.first(X).detach()
    center, scale = model.norm.center, model.norm.scale
    assert type(center) is Tensor and type(scale) is Tensor
    assert torch.allclose(center, h.mean(0), rtol=1e-12) and torch.allclose(scale, h.std(), rtol=1e-12)


def test_a_forward_without_a_backward_updates_the_buffers() -> None:
    ours, plain = make(), make()
    with virtual_batch(ours, 4) as batch:
        ours(batch(X))
    plain(X)
    assert_close(state(ours), state(plain))


def test_no_grad() -> None:
    ours = make()
    with virtual_batch(ours, 4) as batch, torch.no_grad():
        outputs = ours(batch(X))
        found = torch.as_tensor(outputs.numpy())
    assert_close([found], [make()(X).detach()])


def test_a_parameter_written_after_its_use() -> None:
    """Outputs from before the write keep their values."""
    model = make()
    with virtual_batch(model, 4) as batch:
        outputs = model(batch(X))
        with torch.no_grad():
            model[4].bias.add_(1.0)
            model[0].weight.mul_(2.0)
        found = torch.as_tensor(outputs.detach().numpy())
    assert_close([found], [make()(X).detach()])


def test_a_compiled_model_runs_eagerly() -> None:
    ours = make()
    compiled = torch.compile(ours, backend="eager")
    introspection._warn_of_eager_run.cache_clear()
    warned = pytest.warns(UserWarning, match="A compiled model runs eagerly")
    with warned, virtual_batch(ours, 4) as batch:
        loss_of(compiled, batch(X)).backward()
    assert_close(gradients(ours), real_gradients(make()))


def test_blocks_in_threads() -> None:
    found: list[Any] = []

    def train(model: nn.Module) -> None:
        try:
            for _ in range(5):
                model.zero_grad()
                with virtual_batch(model, 4) as batch:
                    loss_of(model, batch(X)).backward()
            found.append(gradients(model))
        except Exception as error:  # noqa: BLE001 the test raises errors of threads
            found.append(error)

    threads = [threading.Thread(target=train, args=(make(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = real_gradients(make())
    for result in found:
        assert isinstance(result, list), result
        assert_close(result, expected)


# -- state after the block ----------------------------------------------------------------------------------


class StoresActivations(nn.Module):
    """Model that stores activations and statistics in buffers and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("queue", torch.zeros(N, 3, dtype=torch.float64), persistent=False)
        self.norm: Any = None
        self.hidden: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * self.hidden.detach().mean(0)
        self.queue = self.hidden.detach()
        self.norm = self.hidden.detach().norm()
        return self.hidden


def test_buffers_are_real_after_the_block() -> None:
    ours, plain = StoresActivations(), StoresActivations()
    plain.load_state_dict(ours.state_dict())
    keys = list(ours.state_dict())
    with virtual_batch(ours, 4) as batch:
        loss_of(ours, batch(X)).backward()
    loss_of(plain).backward()
    assert list(ours.state_dict()) == keys
    assert_close([ours.mean, ours.queue, ours.norm], [plain.mean, plain.queue, plain.norm])
    assert isinstance(ours.hidden, VirtualTensor), "an activation of all samples is not gathered"
    with pytest.raises(WindowError, match="was not materialized before its block ended"):
        ours.hidden.sum()
    assert_close([ours(X).detach()], [plain(X).detach()])


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("updates", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_nothing_leaks(updates: int, budget: int | None) -> None:
    model = make(dropout=0.1)
    optimizer = sgd(model)

    def update() -> None:
        optimizer.zero_grad()
        with virtual_batch(model, 4, device_budget=budget) as batch:
            loss_of(model, batch(X)).backward()
        optimizer.step()

    def tensors() -> int:
        return sum(issubclass(type(item), Tensor) for item in gc.get_objects())

    for _ in range(5):
        update()
    gc.collect()
    before = tensors()
    gc.disable()
    try:
        for _ in range(updates):
            update()
        assert tensors() <= before, "tensors are freed without the garbage collector"
    finally:
        gc.enable()


# -- precision ----------------------------------------------------------------------------------------------


def test_autocast_differs_only_by_rounding() -> None:
    found = []
    for virtual in (True, False):
        model = make().float()
        with torch.autocast("cpu", torch.bfloat16):
            if virtual:
                with virtual_batch(model, 4) as batch:
                    loss_of(model, batch(X.float())).backward()
            else:
                loss_of(model, X.float()).backward()
        found.append(gradients(model))
    for ours, real in zip(*found, strict=True):
        assert ours.dtype == real.dtype
    assert_close(found[0], found[1], 2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("inside", [True, False])
def test_a_gradient_scaler(inside: bool) -> None:
    found = []
    for virtual in (True, False):
        model = make().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(2):
            optimizer.zero_grad()
            with virtual_batch(model, 4) as batch:
                with torch.autocast("cpu", torch.float16):
                    loss = loss_of(model, batch(X.float()) if virtual else X.float())
                scaler.scale(loss).backward()
                if inside:
                    scaler.step(optimizer)
            if not inside:
                scaler.step(optimizer)
            scaler.update()
        found.append([parameter.detach() for parameter in model.parameters()])
        assert scaler.get_scale() == 1024.0
    assert_close(found[0], found[1], 2 * torch.finfo(torch.float16).eps)


def test_a_deep_network_equals_the_real_batch_after_six_updates() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(6, N, 3, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (6, N), generator=generator)
    nets: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(models.resnet20(width=4).double())
    by = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in nets]
    for update in range(6):
        with virtual_batch(nets[0], 4) as batch:
            F.cross_entropy(nets[0](batch(x[update])), y[update]).backward()
        F.cross_entropy(nets[1](x[update]), y[update]).backward()
        for optimizer in by:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(state(nets[0]), state(nets[1]))


def test_float32_is_as_accurate_as_the_real_batch() -> None:
    exact = real_gradients(make())
    plain, ours = make().float(), make().float()
    loss_of(plain, X.float()).backward()
    with virtual_batch(ours, 4) as batch:
        loss_of(ours, batch(X.float())).backward()

    def error(found: list[Tensor]) -> float:
        wrong = sum(float((a.double() - b).norm()) ** 2 for a, b in zip(found, exact, strict=True))
        return (wrong / sum(float(b.norm()) ** 2 for b in exact)) ** 0.5

    assert error(gradients(ours)) <= 2 * error(gradients(plain)) + torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours = kind(6, 8, batch_first=True, num_layers=2, bidirectional=True).to(dtype)
    plain = kind(6, 8, batch_first=True, num_layers=2, bidirectional=True).to(dtype)
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(N, 5, 6, dtype=dtype)
    with virtual_batch(ours, 4) as batch:
        ours(batch(x))[0].square().mean().backward()
    plain(x)[0].square().mean().backward()
    assert_close(gradients(ours), gradients(plain), 50 * torch.finfo(dtype).eps)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("nested", [True, False])
def test_a_transformer_in_evaluation(nested: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).double().eval()
    x = torch.randn(N, 5, 8, dtype=torch.float64)
    mask = torch.arange(5)[None] >= torch.randint(2, 6, (N, 1))
    with torch.no_grad(), virtual_batch(model, 4) as batch:
        found = torch.as_tensor(model(batch(x), src_key_padding_mask=batch(mask)).numpy())
    with torch.no_grad():
        assert_close([found], [model(x, src_key_padding_mask=mask)])
