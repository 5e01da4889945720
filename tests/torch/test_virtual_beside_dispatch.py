"""Accesses to tensors that bypass the dispatcher: `.data =`, raw memory, and reads of buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.dlpack import to_dlpack  # pyright: ignore[reportPrivateImportUsage]

from superbatch.errors import WindowError
from superbatch.torch import virtual_batch

N = 11
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Batch = Callable[[Tensor], Tensor]
Program = Callable[[Any, Batch], "Tensor | None"]  # (model, batch) -> values read


def make() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.SiLU(), nn.Linear(5, 3)).double()


def assert_equals_the_real_batch(program: Program) -> None:
    real = make()
    read = program(real, lambda x: x)
    assert any(p.grad is not None and p.grad.norm() > 0.01 for p in real.parameters()), "premise"
    for size in (1, 3, N):
        ours = make()
        with virtual_batch(ours, size) as batch:
            found = program(ours, batch)
        for (name, p), q in zip(ours.named_parameters(), real.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14, msg=f"{name}, {size}")
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14, msg=f".grad of {name}, {size}")
        for (name, a), b in zip(ours.named_buffers(), real.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14, msg=f"{name}, {size}")
        if read is not None and found is not None:
            torch.testing.assert_close(torch.as_tensor(found), read, rtol=1e-12, atol=1e-14)


# -- assignment to .data ------------------------------------------------------------------------------------


def assign_weights(model: Any, batch: Batch) -> None:
    first = model(batch(X))
    for p in model.parameters():
        p.data = p.data * 0.5 + 0.1
    (first + model(batch(X))).square().mean().backward()


def target_network(model: Any, batch: Batch) -> None:
    """BYOL: a target network follows the model through `.data`."""
    target = copy.deepcopy(model)
    for p in target.parameters():
        p.data = p.data + 0.3
    with torch.no_grad():
        wanted = target(batch(X))
        for p, q in zip(target.parameters(), model.parameters(), strict=True):
            p.data = 0.5 * p.data + 0.5 * q.data
    (1 - F.cosine_similarity(model(batch(X)), wanted)).mean().backward()


def assign_from_vector(model: Any, batch: Batch) -> None:
    out = model(batch(X))
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.7, model.parameters())
    (out * out.detach().roll(1, 1)).sum().backward()


def write_after_assignment(model: Any, batch: Batch) -> None:
    out = model(batch(X))
    model[1].bias.data = model[1].bias.data + 1
    with torch.no_grad():
        model[1].bias.mul_(2)
    (out + model(batch(X))).square().mean().backward()


def assign_buffer(model: Any, batch: Batch) -> None:
    out = model(batch(X))
    model[1].running_mean.data = torch.ones(5, dtype=torch.float64)
    out.square().mean().backward()


def adversarial(model: Any, batch: Batch) -> None:
    """FGSM: update the perturbation through `.data`."""
    x = batch(X)
    noise = torch.zeros_like(x).requires_grad_()
    model(x + noise).square().mean().backward()
    model.zero_grad()
    assert noise.grad is not None
    noise.data = (noise.data + 0.1 * noise.grad.sign()).clamp(-0.05, 0.05)
    model(x + noise).square().mean().backward()


def assign_real_to_virtual(model: Any, batch: Batch) -> None:
    hidden = model[:3](batch(X))
    shift = hidden.detach()
    shift.data = torch.ones(N, 5, dtype=torch.float64)
    model[3](hidden + shift).square().mean().backward()


def assign_gradients(model: Any, batch: Batch) -> None:
    model(batch(X)).square().mean().backward()
    for p in model.parameters():
        p.grad.data = p.grad.data * 3


@pytest.mark.parametrize(
    "program",
    [
        assign_weights,
        target_network,
        assign_from_vector,
        write_after_assignment,
        assign_buffer,
        adversarial,
        assign_real_to_virtual,
        assign_gradients,
    ],
)
def test_an_assignment_to_data_takes_effect(program: Program) -> None:
    assert_equals_the_real_batch(program)


def test_data_of_another_shape_raises() -> None:
    model = make()
    with (
        virtual_batch(model, 3) as batch,
        pytest.raises(WindowError, match=r"virtual tensor of shape \(11, 6\).* tensor of shape \(2, 2\)"),
    ):
        batch(X).data = torch.ones(2, 2, dtype=torch.float64)


def assign_sgd_step(model: Any, _: Tensor) -> None:
    for p in model.parameters():
        p.data = p.data - 0.1 * p.grad


def assign_running_mean(model: Any, out: Tensor) -> None:
    model[1].running_mean.data = out.detach().mean() * torch.ones(5, dtype=torch.float64)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("write", [assign_sgd_step, assign_running_mean])
def test_assigning_a_virtual_tensor_to_real_data_raises_and_rolls_back(
    write: Callable[[Any, Tensor], None], used: bool
) -> None:
    """Without the error, the null pointer of the virtual tensor would crash the process."""
    model, real = make(), make()
    text = r"\.data of a real tensor of shape .* set to a virtual tensor.*real\.copy_\(numbers\)"

    def block() -> None:
        with virtual_batch(model, 3) as batch:
            out = model(batch(X))
            out.square().mean().backward()
            write(model, out)
            if used:
                model(batch(X))

    with pytest.raises(WindowError, match=text):
        block()
    for ours, before in zip(model.state_dict().values(), real.state_dict().values(), strict=True):
        assert torch.equal(ours, before)
    assert all(p.grad is None for p in model.parameters())
    with virtual_batch(model, 3) as batch:
        model(batch(X)).square().mean().backward()
    real(X).square().mean().backward()
    torch.testing.assert_close(model[0].weight.grad, real[0].weight.grad, rtol=1e-12, atol=1e-14)


# -- memory -------------------------------------------------------------------------------------------------


def test_dlpack_exports_the_values() -> None:
    model = make().eval()
    with virtual_batch(model, 3) as batch, torch.no_grad():
        out = model(batch(X))
        by_numpy, by_torch = np.from_dlpack(out), torch.from_dlpack(out)
    numbers = torch.from_numpy(np.array(by_numpy))
    torch.testing.assert_close(numbers, model(X).detach(), rtol=1e-12, atol=1e-14)
    assert torch.equal(by_torch, numbers)


@pytest.mark.parametrize(
    ("ask", "error", "text"),
    [
        (lambda t: t.data_ptr(), WindowError, r"^data_ptr\(\) was called on a virtual tensor.*no memory"),
        (lambda t: t.share_memory_(), WindowError, r"^share_memory_\(\) was called.*Read its numbers"),
        (lambda t: t.apply_(abs), WindowError, r"^apply_\(\) was called.*Read its numbers"),
        (to_dlpack, RuntimeError, "Cannot access data pointer"),
    ],
)
def test_access_to_raw_memory_raises(ask: Any, error: type[Exception], text: str) -> None:
    model = make()
    with virtual_batch(model, 3) as batch, pytest.raises(error, match=text):
        ask(model(batch(X)).detach())


# -- reads of values and buffers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda out: f"{out.square().mean():.3f}",
        lambda out: out.mean(0).tolist(),
        lambda out: out.argmax(1).numpy(),
        lambda out: np.asarray(out.detach()),
        lambda out: copy.deepcopy(out.detach()),
        lambda out: out.sum().item(),
    ],
)
def test_values_can_be_read_between_forward_and_backward(read: Callable[[Tensor], Any]) -> None:
    """A read updates running statistics, which must not invalidate the graph."""

    def program(model: Any, batch: Batch) -> None:
        out = model(batch(X))
        read(out)
        out.square().mean().backward()

    assert_equals_the_real_batch(program)


def read_by_stack(norm: Any) -> Tensor:
    return torch.stack([norm.running_mean, norm.running_var])


def read_by_foreach(norm: Any) -> Tensor:
    average = [torch.zeros(5, dtype=torch.float64)]
    torch._foreach_lerp_(average, [norm.running_mean], 0.5)  # pyright: ignore[reportPrivateImportUsage]
    return average[0]


def read_by_deepcopy(norm: Any) -> Tensor:
    return copy.deepcopy(norm).running_mean


def read_by_keyword(norm: Any) -> Tensor:
    return torch.add(input=torch.ones(5, dtype=torch.float64), other=norm.running_mean)


@pytest.mark.parametrize(
    "read",
    [read_by_stack, read_by_foreach, read_by_deepcopy, read_by_keyword, lambda norm: norm.running_mean * 1],
)
def test_running_statistics_are_current_when_read(read: Callable[[Any], Tensor]) -> None:
    def program(model: Any, batch: Batch) -> Tensor:
        out = model(batch(X))
        found = read(model[1])
        out.square().mean().backward()
        assert found.norm() > 0.01, "premise"
        return found

    assert_equals_the_real_batch(program)


def test_a_view_of_a_buffer_from_before_the_forward_sees_its_writes() -> None:
    def program(model: Any, batch: Batch) -> Tensor:
        some = model[1].running_mean[:2]
        out = model(batch(X))
        found = some.clone()
        out.square().mean().backward()
        return found

    assert_equals_the_real_batch(program)


def test_a_lazy_batch_norm_gets_its_shape_in_the_block() -> None:
    def lazy() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d()).double()

    real, ours = lazy(), lazy()
    torch.manual_seed(1)
    real(X).pow(3).mean().backward()
    torch.manual_seed(1)
    with virtual_batch(ours, 3) as batch:
        ours(batch(X)).pow(3).mean().backward()
    torch.testing.assert_close(ours[0].weight.grad, real[0].weight.grad, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(ours[1].running_mean, real[1].running_mean)


def test_the_conjugate_of_a_single_row_is_kept() -> None:
    def program(model: Any, batch: Batch) -> None:
        out = model(batch(X))
        (torch.complex(out, out + 1) @ torch.complex(out, out * 2).mH).abs().mean().backward()

    assert_equals_the_real_batch(program)
