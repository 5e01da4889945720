"""Windows on a stand-in accelerator on the CPU: reads to the host, precision, shared memory, kernels."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from superbatch import NoiseMeter
from superbatch.torch import Accumulator, sample_weights, verify
from superbatch.torch.options import ClipValue, FrozenBatchNorm, GhostBatchNorm, PerSampleRandom
from superbatch.torch.rng.sample_rng import sample_stream
from superbatch.torch.window.norm import finite_norm
from superbatch.torch.window.participants.buffers import BufferKeeper
from tests.torch.accelerator_stand_in import DEVICE, READS, Elsewhere, elsewhere, stand_in


@pytest.fixture
def device() -> Iterator[None]:
    with stand_in():
        yield


@pytest.fixture
def no_float64() -> Iterator[None]:
    with stand_in(float64=False):
        yield


def _net(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(4) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(3, 4), middle, nn.Linear(4, 1))


def _loss(model: nn.Module) -> Any:
    return lambda mb: (model(mb[0]) - mb[1]).square().mean()


def _data(samples: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 3), torch.randn(samples, 1)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


def _assert_same(model: nn.Module, reference: nn.Module, start: nn.Module) -> None:
    pairs = zip(model.parameters(), reference.parameters(), start.parameters(), strict=True)
    for moved, right, before in pairs:
        assert isinstance(moved.data, Elsewhere)
        assert (right - before).norm() > 1e-3, "premise: the update changes it"
        assert (moved.data.held - right).norm() <= 1e-5 * (right - before).norm()


def _by_hand(reference: nn.Module, data: Any, updates: int) -> None:
    optimizer = _sgd(reference)
    for _ in range(updates):
        optimizer.zero_grad()
        _loss(reference)(data).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()


# -- reads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_window_reads_twice_for_any_number_of_microbatches(size: int, device: None) -> None:
    model, data = elsewhere(_net()), _data()
    accumulate = Accumulator(model, _sgd(model), _loss(model), microbatch_size=size, max_grad_norm=1.0)
    accumulate(data)  # the first window checks the loss
    for _ in range(2):
        READS.clear()
        assert accumulate(data).made
        assert len(READS) <= 2, READS
    reference = _net()
    _by_hand(reference, data, 3)
    _assert_same(model, reference, _net())


def test_every_read_is_counted(device: None) -> None:
    """A loop that reads each loss adds one read per micro-batch."""
    model, data = elsewhere(_net()), _data(6)
    accumulator = Accumulator(model, _sgd(model), microbatch_size=2, check=False)
    READS.clear()
    with accumulator.window(data) as window:
        for microbatch in window:
            loss = _loss(model)(microbatch)
            window.backward(loss)
            float(loss.detach())
    assert len(READS) == 2 + 3


@pytest.mark.parametrize(
    ("options", "norm", "reads"),
    [
        ({}, False, 2),
        ({"nonfinite": "skip_update"}, False, 2),
        ({"observers": [NoiseMeter()]}, False, 2),
        ({"participants": [PerSampleRandom()]}, False, 2),
        ({"clip": ClipValue(0.1)}, False, 2),
        ({"participants": [FrozenBatchNorm()]}, True, 2),
        ({"participants": [GhostBatchNorm()]}, True, 2),
        (
            {"nonfinite": "skip_microbatch"},
            False,
            2 + 6,
        ),  # each micro-batch is accepted or dropped by its own read
    ],
    ids=lambda value: str(value).partition(" object at ")[0],
)
def test_reads_of_a_window_of_six(options: Any, norm: bool, reads: int, device: None) -> None:
    model, data = elsewhere(_net(norm=norm)), _data(12)
    accumulate = Accumulator(
        model, _sgd(model), _loss(model), microbatch_size=2, max_grad_norm=1.0, check=False, **options
    )
    accumulate(data)
    READS.clear()
    assert accumulate(data).made
    assert len(READS) <= reads, READS


def test_a_nonfinite_microbatch_is_dropped(device: None) -> None:
    model, data = elsewhere(_net()), _data(12)

    def loss_fn(mb: Any) -> Tensor:
        loss = _loss(model)([Elsewhere(item) for item in mb])
        return loss * float("inf") if bool((mb[0] == data[0][2]).any()) else loss

    accumulate = Accumulator(
        model, _sgd(model), loss_fn, microbatch_size=2, check=False, nonfinite="skip_microbatch", device=None
    )
    assert accumulate(data).dropped == (1,)


# -- float64 -----------------------------------------------------------------------------------------------


def test_the_stand_in_has_no_float64(no_float64: None) -> None:
    with pytest.raises(TypeError, match="float64"):
        Elsewhere(torch.ones(2)).double()
    assert torch.equal(Elsewhere(torch.ones(2)).cpu().double(), torch.ones(2).double())


def test_windows_without_float64(no_float64: None) -> None:
    model, data = elsewhere(_net()), _data()
    accumulate = Accumulator(model, _sgd(model), _loss(model), microbatch_size=2, max_grad_norm=1.0)
    for _ in range(2):
        assert accumulate(data).made
    reference = _net()
    _by_hand(reference, data, 2)
    _assert_same(model, reference, _net())


def test_pooled_statistics_without_float64(no_float64: None) -> None:
    model, data = elsewhere(_net(norm=True)), _data(8)
    plain = _net(norm=True)
    for one in (model, plain):
        Accumulator(one, _sgd(one), _loss(one), microbatch_size=4, participants=[GhostBatchNorm()])(data)
    pooled, right = model[1].running_mean, plain[1].running_mean  # pyright: ignore[reportIndexIssue]
    assert right.norm() > 0
    assert torch.allclose(pooled.held, right, rtol=1e-5, atol=1e-7)


def test_sample_weights_without_float64(no_float64: None) -> None:
    assert sample_weights("w")({"w": Elsewhere(torch.tensor([0.5, 2.0]))}) == 2.5


def test_a_norm_that_overflows_float32_without_float64(no_float64: None) -> None:
    norm, finite = finite_norm([Elsewhere(torch.full((4,), 3e30))])
    assert finite
    assert norm == pytest.approx(6e30, rel=1e-6)


def test_verify_without_float64(no_float64: None) -> None:
    model = elsewhere(_net())
    report = verify(model, _loss(model), _data(6), microbatch_size=2, dtype="own")
    assert report.exact


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.empty_like(x).geometric_(0.4),
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: torch.multinomial(x.softmax(-1), 2),
        lambda x: torch.multinomial(x.softmax(-1), 3, replacement=True),
    ],
    ids=["geometric", "bernoulli", "multinomial", "with replacement"],
)
def test_streams_draw_the_same_numbers_without_float64(draw: Any, no_float64: None) -> None:
    x = torch.linspace(-1, 1, 20).reshape(4, 5)
    with sample_stream(3, 0, 4):
        right = draw(x)
    with sample_stream(3, 0, 4):
        drawn = draw(Elsewhere(x))
    assert drawn.device == DEVICE
    assert len(set(right.flatten().tolist())) > 1
    assert torch.equal(drawn.held, right)


# -- memory that a replayed graph overwrites ---------------------------------------------------------------


class _Replayed(torch.autograd.Function):
    """Computes ``(x @ w).square().mean()`` always into the same memory, as a replayed graph does."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x)
        ctx.gradient = gradient
        with torch.no_grad():
            loss.copy_((x @ weight).square().mean())
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weight, x = ctx.saved_tensors
        ctx.gradient.copy_(grads[0] * 2 / x.shape[0] * x.T @ (x @ weight))
        return ctx.gradient.detach(), None, None, None


def _replayed(where: Any, updates: int = 2) -> tuple[list[float], list[float], Tensor, Tensor]:
    torch.manual_seed(0)
    start, x = torch.randn(3), torch.randn(6, 3)
    module = nn.Module()
    module.weight = nn.Parameter(where(start.clone()))
    loss, gradient = where(torch.zeros(())), where(torch.zeros(3))
    accumulate = Accumulator(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1, foreach=False),
        lambda mb: _Replayed.apply(module.weight, where(mb), loss, gradient),
        microbatch_size=2,
        check=False,
        device=None,
    )
    losses = [accumulate(x).loss for _ in range(updates)]
    right, expected = start.clone().requires_grad_(), []
    for _ in range(updates):
        value = (x @ right).square().mean()
        (grad,) = torch.autograd.grad(value, right)
        assert grad.norm() > 0
        right = (right - 0.1 * grad).detach().requires_grad_()
        expected.append(float(value.detach()))
    return losses, expected, module.weight.detach(), right.detach()


def test_gradients_that_a_replayed_graph_overwrites() -> None:
    losses, expected, weight, right = _replayed(lambda x: x)
    assert torch.allclose(weight, right, rtol=1e-5)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_losses_that_a_replayed_graph_overwrites(device: None) -> None:
    losses, expected, *_ = _replayed(lambda x: x if isinstance(x, Elsewhere) else Elsewhere(x), updates=1)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_mutant_without_copies_of_graph_memory(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "superbatch.torch.window.participants.gradient_sum.in_shared_memory", lambda gradient: False
    )
    *_, weight, right = _replayed(lambda x: x)
    assert not torch.allclose(weight, right, rtol=1e-2)
    monkeypatch.setattr("superbatch.torch.loss.losses.Losses.read", lambda self, index, loss: loss.detach())
    losses, expected, *_ = _replayed(lambda x: x if isinstance(x, Elsewhere) else Elsewhere(x), updates=1)
    assert losses != pytest.approx(expected, rel=1e-2)


def test_cpu_gradients_are_not_copied_with_compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only CUDA gradients can be in the memory of a replayed graph."""
    import sys
    from types import ModuleType

    from superbatch.torch.window.participants.gradient_sum import in_shared_memory

    gradient = torch.ones(2)
    assert not in_shared_memory(gradient)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", ModuleType("stand-in"))
    assert not in_shared_memory(gradient), "a CPU tensor is not in a CUDA graph"


# -- kernels of the norm -----------------------------------------------------------------------------------


class _Calls(TorchDispatchMode):
    """Record of the called operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norms_take_one_call_for_each_device_and_dtype(dtype: torch.dtype, device: None) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(5, 3).to(dtype) for _ in range(20)]
    exact = float(torch.cat([g.double().flatten() for g in gradients]).norm())
    for given in (gradients, [Elsewhere(g) for g in gradients]):
        with _Calls() as calls:
            norm, finite = finite_norm(given)
        assert finite
        assert norm == pytest.approx(exact, rel=1e-5), "computed in float32 for every dtype"
        assert calls.names.count("_foreach_norm") <= 1
        assert calls.names.count("linalg_vector_norm") <= 1


def test_norms_over_several_devices_and_dtypes(device: None) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(7), torch.randn(7).bfloat16(), torch.randn(300)]
    exact = float(torch.cat([part.double() for part in parts]).norm())
    mixed = [parts[0], Elsewhere(parts[1]), Elsewhere(parts[2])]
    READS.clear()
    norm, finite = finite_norm(mixed)
    assert finite and norm == pytest.approx(exact, rel=1e-5)
    assert len(READS) <= 2
    bad = Elsewhere(torch.tensor([1.0, float("nan")]))
    assert finite_norm([*mixed, bad])[1] is False
    assert finite_norm([torch.tensor([float("inf")]), *mixed[1:]])[1] is False


# -- number of kernels -------------------------------------------------------------------------------------


def test_buffers_are_copied_by_few_kernels(device: None) -> None:
    model = elsewhere(nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(20)]))
    before = [buffer.clone() for buffer in model.buffers()]
    keeper = BufferKeeper([model])
    with _Calls() as calls:
        keeper.begin()
    assert calls.names.count("clone") == 0
    assert calls.names.count("_foreach_copy_") == 2, "one for floats, one for num_batches_tracked"
    for buffer in model.buffers():
        buffer.add_(3)
    assert keeper.changed()
    keeper.restore()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_gradients_are_added_by_one_call(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]).to(dtype)
    reference = copy.deepcopy(model)
    x = torch.randn(12, 4).to(dtype)
    accumulate = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, foreach=False),
        lambda mb: model(mb).float().square().mean(),
        microbatch_size=2,
        check=False,
        nonfinite="skip_microbatch",
        gradient_sum=torch.float32,
    )
    with _Calls() as calls:
        update = accumulate(x)
    assert calls.names.count("_foreach_add_") == 5, "one per micro-batch except the first"
    reference = reference.double()
    reference(x.double()).square().mean().backward()
    exact = float(torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None]).norm())
    assert update.grad_norm == pytest.approx(exact, rel=1e-5 if dtype == torch.float32 else 3e-2)
