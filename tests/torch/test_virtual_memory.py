"""The memory of a virtual batch: what is kept and where, how many samples at a time, what is not copied."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from superbatch.report.memory import Limit
from superbatch.torch import virtual_batch

MIB = 2**20


def net() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width_in, width in ((3, 8), (8, 8), (8, 8)):
        layers += [nn.Conv2d(width_in, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def images(samples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 3, 16, 16), torch.randint(0, 5, (samples,))


class Largest(TorchDispatchMode):
    """The most rows of images that any operation gives, if they are more than those of a micro-batch."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.most = rows, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else [result]:
            if type(item) is Tensor and item.dim() == 4 and item.shape[0] > self.rows:
                self.most = max(self.most, item.shape[0])
        return result


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def run(samples: int, size: Any, **options: Any) -> tuple[list[Tensor], Any]:
    model = net()
    x, y = images(samples)
    with virtual_batch(model, size, **options) as batch:
        F.cross_entropy(model(batch(x)), y).backward()
    return gradients(model), batch.report()


def test_nothing_of_the_whole_batch_is_worked_out_at_once() -> None:
    """Below the virtual tensors no operation sees more rows than a micro-batch has."""
    largest = Largest(4)
    model = net()
    x, y = images(32)
    with virtual_batch(model, 4) as batch:
        loss = F.cross_entropy(model(batch(x)), y)
        loss.backward()
        with largest:
            float(loss.detach())  # works out all that was recorded
    assert batch.report().run > 0, "premise"
    assert largest.most == 0, f"an operation on {largest.most} images"


def test_what_is_kept_is_the_inputs_of_the_batchnorms_and_little_else() -> None:
    _, report = run(32, 4)
    activation = 32 * 8 * 16 * 16 * 4
    # Three inputs of BatchNorm, and for a while the gradient of one output.
    assert 3 * activation <= report.kept_on_device <= 4.5 * activation
    assert [point.kept for point in report.points if point.operation == "batch_norm"] == [activation] * 3


def test_what_is_beyond_the_budget_is_kept_on_the_host() -> None:
    expected, on_device = run(32, 4)
    ours, split = run(32, 4, device_budget=MIB // 2)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert 0 < split.kept_on_device <= MIB // 2
    assert split.kept_on_device + split.kept_on_host >= on_device.kept_on_device
    _, host = run(32, 4, device_budget=0)
    assert host.kept_on_device == 0 and host.kept_on_host == on_device.kept_on_device


def test_nothing_is_kept_after_the_block() -> None:
    model = net()
    x, y = images(32)
    with virtual_batch(model, 4) as batch:
        loss = F.cross_entropy(model(batch(x)), y)
        loss.backward()
    recording = batch._recording
    assert recording is not None and recording.store.most_on_device > 0, "premise"
    del x, y
    gc.collect()
    assert recording.store.on_device == 0
    assert float(loss.detach()) > 0


def test_samples_that_do_not_meet_are_worked_out_in_one_sweep_and_nothing_is_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    x, y = torch.randn(20, 4), torch.randint(0, 3, (20,))
    with virtual_batch(model, 6) as batch:
        F.cross_entropy(model(batch(x)), y).backward()
    report = batch.report()
    assert (report.sweeps, report.repeated, report.kept_on_device, report.points) == (1, 0, 0, ())
    assert "samples do not meet" in str(report)


@pytest.mark.parametrize(("free", "smallest", "largest"), [(1, 32, 32), (3, 2, 31), (1000, 1, 1)])
def test_auto_takes_as_many_samples_as_there_is_memory_for(
    free: int, smallest: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = Limit(free * MIB, "a test")
    monkeypatch.setattr("superbatch.torch.virtual.recording.memory_limit", lambda device: limit)
    expected, _ = run(32, 8)
    ours, report = run(32, "auto")
    assert smallest <= report.microbatches <= largest
    for a, b in zip(ours, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_real_limit_in_this_process_is_read() -> None:
    _, report = run(32, "auto")
    assert 1 <= report.microbatches <= 32


# -- what is read later is as it was ------------------------------------------------------------------------


def relative(ours: Tensor, reference: Tensor) -> float:
    return float(torch.linalg.vector_norm(ours - reference) / torch.linalg.vector_norm(reference))


def exact(model: nn.Module, other: nn.Module) -> None:
    for ours, reference in zip(model.parameters(), other.parameters(), strict=True):
        assert ours.grad is not None and reference.grad is not None
        assert torch.linalg.vector_norm(reference.grad) > 0, "premise"
        error = torch.linalg.vector_norm(ours.grad - reference.grad) / torch.linalg.vector_norm(
            reference.grad
        )
        assert error < 1e-12 and torch.equal(ours, reference)


@pytest.mark.parametrize("through", ["data", "no_grad", "buffer"])
def test_a_tensor_that_is_written_after_its_use(through: str) -> None:
    """More elements than are copied when they are used."""

    def loss_of(layer: nn.Linear, table: Tensor, x: Any) -> Tensor:
        fixed = x @ layer.weight.detach().t() + x @ table
        with torch.no_grad():
            if through == "data":
                layer.weight.data.clamp_(-0.05, 0.05)
            elif through == "no_grad":
                layer.weight.mul_(0.5)
            else:
                table.zero_()
        return (layer(x) * fixed).square().mean()

    x = torch.randn(13, 80, dtype=torch.float64)
    layers, tables = [], []
    for _ in range(2):
        torch.manual_seed(3)
        layers.append(nn.Linear(80, 80).double())
        tables.append(torch.randn(80, 80, dtype=torch.float64))
    loss_of(layers[0], tables[0], x).backward()
    with virtual_batch(layers[1], 4) as batch:
        loss_of(layers[1], tables[1], batch(x)).backward()
    exact(layers[1], layers[0])
    assert torch.equal(*tables)


def test_the_batch_may_be_written_after_its_use() -> None:
    layer = nn.Linear(80, 3).double()
    x = torch.randn(60, 80, dtype=torch.float64)
    layer(x).square().mean().backward()
    reference = layer.weight.grad
    assert reference is not None
    layer.zero_grad()
    with virtual_batch(layer, 7) as batch:
        loss = layer(batch(x)).square().mean()
        x.zero_()
        loss.backward()
    assert layer.weight.grad is not None
    assert torch.linalg.vector_norm(layer.weight.grad - reference) < 1e-12 * torch.linalg.vector_norm(
        reference
    )


def test_a_generator_of_the_user_is_drawn_from_once() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 6).double()
    x = torch.randn(13, 4, dtype=torch.float64)

    def loss_of(x: Any, generator: torch.Generator) -> Tensor:
        hidden = layer(x)
        kept = torch.bernoulli(torch.full_like(hidden, 0.5), generator=generator)
        return (hidden * kept).square().mean()

    real = torch.Generator().manual_seed(3)
    loss_of(x, real).backward()
    reference = layer.weight.grad
    assert reference is not None
    layer.zero_grad()
    ours = torch.Generator().manual_seed(3)
    with virtual_batch(layer, 4) as batch:
        loss_of(batch(x), ours).backward()
    assert layer.weight.grad is not None
    assert torch.allclose(layer.weight.grad, reference, rtol=1e-12)
    assert torch.equal(real.get_state(), ours.get_state())


# -- a whole step in the block ------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [True, False])
def test_zeroing_clipping_and_the_update_may_stand_in_the_block(foreach: bool) -> None:
    torch.manual_seed(0)
    models = [
        nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
        for _ in range(2)
    ]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(13, 4, dtype=torch.float64)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, foreach=foreach) for m in models]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any) -> None:
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    for _ in range(3):
        step(models[0], optimizers[0], x)
        with virtual_batch(models[1], 4) as batch:
            step(models[1], optimizers[1], batch(x))
    for ours, reference in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.allclose(ours, reference, rtol=1e-11, atol=1e-13)
        assert type(ours.grad) is Tensor


# -- 16 bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_in_16_bits_is_as_near_to_the_truth_as_the_large_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(288, 4)]
    model = nn.Sequential(*layers).to(dtype)
    x, y = torch.randn(20, 3, 8, 8).to(dtype), torch.randint(0, 4, (20,))

    def outcome(kind: torch.dtype, size: int | None) -> list[Tensor]:
        other = copy.deepcopy(model).to(kind)
        if size is None:
            F.cross_entropy(other(x.to(kind)), y).backward()
        else:
            with virtual_batch(other, size) as batch:
                F.cross_entropy(other(batch(x.to(kind))), y).backward()
        return gradients(other)

    truth, real, ours = outcome(torch.float64, None), outcome(dtype, None), outcome(dtype, 6)
    for exact_one, large, small in zip(truth, real, ours, strict=True):
        assert small.dtype == dtype
        bound = max(relative(large.double(), exact_one), torch.finfo(dtype).eps)
        assert relative(small.double(), exact_one) <= 2 * bound
