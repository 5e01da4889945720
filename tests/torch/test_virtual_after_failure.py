"""State after a failed `virtual_batch` block, errors of wrong use, and the report."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.errors import InputError, WindowError
from superbatch.torch import virtual_batch

N = 11
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randint(0, 3, (N,), generator=torch.Generator().manual_seed(2))


class Failure(Exception):
    pass


def make() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("before", [None, 5.0])
def test_gradients_of_leaves_outside_the_model_are_rolled_back(before: float | None, read: bool) -> None:
    """A temperature and inputs with gradients: a retry after a failure counts them once."""
    model, temperature = make(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    x = X.clone().requires_grad_()
    if before is not None:
        temperature.grad, x.grad = torch.full_like(temperature, before), torch.full_like(x, before)
    gradients = temperature.grad, x.grad

    def block(*, fails: bool) -> None:
        with virtual_batch(model, 3) as batch:
            loss = F.cross_entropy(model(batch(x)) * temperature, batch(Y))
            loss.backward()
            if read:
                loss.item()
            if fails:
                raise Failure

    with pytest.raises(Failure):
        block(fails=True)
    assert temperature.grad is gradients[0] and x.grad is gradients[1]
    if before is not None:
        assert temperature.grad is not None and x.grad is not None
        assert float(temperature.grad) == before and bool((x.grad == before).all())
    block(fails=False)
    assert temperature.grad is not None and x.grad is not None
    assert before is None or (temperature.grad is gradients[0] and x.grad is gradients[1])

    real, other = make(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    again = X.clone().requires_grad_()
    F.cross_entropy(real(again) * other, Y).backward()
    assert other.grad is not None and again.grad is not None
    torch.testing.assert_close(temperature.grad - (before or 0), other.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(x.grad - (before or 0), again.grad, rtol=1e-12, atol=1e-14)


def zero_each(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def zero_foreach(model: nn.Module) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    torch._foreach_zero_(gradients)  # pyright: ignore[reportPrivateImportUsage]


@pytest.mark.parametrize("zero", [zero_each, zero_foreach])
def test_gradients_zeroed_before_the_batch_are_rolled_back(zero: Any) -> None:
    model = make()
    F.cross_entropy(model(X), Y).backward()
    before = [(p.grad, p.grad.clone()) for p in model.parameters()]

    def block(*, fails: bool) -> None:
        with virtual_batch(model, 3) as batch:
            zero(model)
            F.cross_entropy(2 * model(batch(X)), batch(Y)).backward()
            if fails:
                raise Failure

    with pytest.raises(Failure):
        block(fails=True)
    for p, (tensor, numbers) in zip(model.parameters(), before, strict=True):
        assert p.grad is tensor and torch.equal(tensor, numbers)
    block(fails=False)
    real = make()
    F.cross_entropy(2 * real(X), Y).backward()
    for p, q in zip(model.parameters(), real.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("used", [False, True])
def test_calling_batch_after_the_block_raises(used: bool) -> None:
    """Without the error, the model would run on the whole batch at once."""
    model = make()
    with virtual_batch(model, 3) as batch:
        if used:
            model(batch(X)).sum().backward()
    with pytest.raises(
        WindowError, match=r"^batch\(\) was called after its .* block\. .* inside the block\.$"
    ):
        batch(X)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "gpu"}, r"device='gpu'.*Expected one of cpu"),
        ({"device": 3.5}, r"device=3\.5 is not available: .*Pass a device that torch has"),
        ({"device": "meta"}, r"device='meta'.*computes shapes only"),
        ({"device_budget": -1}, r"device_budget=-1.*Pass an int of at least 0"),
        ({"device_budget": True}, r"device_budget=True is not a number of bytes"),
        ({"paranoid": 1}, r"paranoid=1.*Pass True or False"),
        ({"compile": "yes"}, r"compile='yes'.*Pass True or False"),
        ({"group": "x"}, r"group='x' is not a process group"),
        ({"rng": "full"}, r"rng='full'.*microbatch, batch"),
        ({"on_gather": "maybe"}, r"on_gather='maybe'.*ok, warn, error"),
    ],
)
def test_the_error_names_the_wrong_argument(options: Any, text: str) -> None:
    with pytest.raises(InputError, match=text), virtual_batch(make(), 3, **options):
        pass


def test_an_unavailable_device_raises() -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA is available")
    with (
        pytest.raises(InputError, match=r"device='cuda' is not available.*Pass a device"),
        virtual_batch(make(), 3, device="cuda"),
    ):
        pass


def test_models_in_a_generator_raise() -> None:
    with (
        pytest.raises(InputError, match=r"not an nn\.Module or a list of modules\. .*or a list of them"),
        virtual_batch((m for m in [make()]), 3),  # type: ignore[arg-type]
    ):
        pass


def test_the_report_says_when_nothing_was_computed() -> None:
    model, text = make(), "samples: nothing was computed in micro-batches"
    with virtual_batch(model, 3) as batch:
        assert str(batch.report()) == f"0 {text}"
        loss = F.cross_entropy(model(batch(X)), batch(Y))
        assert str(batch.report()) == f"11 {text}"
        loss.backward()
    assert str(batch.report()).startswith(
        "11 samples in 4 micro-batches, 3 sweeps; samples are coupled at\n  1: batch_norm"
    )
    assert "  and at 1 operator of the backward\n" in str(batch.report())
    with virtual_batch(model, N) as batch:
        pass
    F.cross_entropy(model(X), Y)
    assert "nothing was computed" in str(batch.report()), "the batch was not used"


def test_the_report_names_operators_that_gather_the_batch() -> None:
    """A histogram gathers the batch, but couples no samples."""
    model = nn.Linear(6, 3).double()
    with virtual_batch(model, 3) as batch:
        out = model(batch(X))
        bins: Tensor = torch.histc(out.detach(), 4)
        out.square().sum().backward()
        assert bins.sum() == N * 3
    report = batch.report()
    assert report.points == ()
    assert [(p.operation, p.kind, p.gathered) for p in report.unknown] == [
        ("aten.histc.default", "unknown", N * 3 * 8)
    ]
    expected = (
        "no coupled samples\non the whole batch, but without effect on samples\n  (no module): aten.histc"
    )
    assert expected in str(report)


def test_a_warning_of_a_gathered_batch_points_at_the_program() -> None:
    model = nn.Linear(6, 3).double()
    with (
        virtual_batch(model, 3, on_gather="warn") as batch,
        pytest.warns(UserWarning, match=r"aten\.histc") as found,
    ):
        torch.histc(model(batch(X)).detach(), 4)
    assert [warning.filename for warning in found] == [__file__]


def test_a_failed_block_restores_the_state_named_in_its_docstring() -> None:
    model = make()
    model.teacher = nn.Linear(6, 3).double().requires_grad_(requires_grad=False)
    model.center, kept = torch.zeros(1), model.teacher.weight.clone()
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    buffers = [buffer.clone() for buffer in model.buffers()]
    with pytest.raises(Failure), virtual_batch(model, 3) as batch:  # noqa: PT012
        F.cross_entropy(model[:3](F.dropout(batch(X))), batch(Y)).backward()
        _ = random.random(), np.random.rand()
        with torch.no_grad():
            model.teacher.weight.add_(1)
        model.center = torch.ones(1)
        assert random.getstate() != states[1] and str(np.random.get_state()) != states[2]
        raise Failure
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]
    assert all(map(torch.equal, buffers, model.buffers()))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(model.teacher.weight, kept + 1) and float(model.center) == 1, (
        "writes of the block remain"
    )
