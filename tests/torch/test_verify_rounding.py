"""Rounding tolerance of `verify` without a float64 reference."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.torch import verify
from superbatch.torch.checks.probing import rounding


class _CoarseProduct(torch.autograd.Function):
    """Matrix product whose rounding depends on the number and order of rows, as in kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        place = torch.arange(len(x), dtype=x.dtype)[:, None]
        # Like TF32, this rounds float32 only.
        wobble = 1 + 3e-4 * (x.dtype == torch.float32) * torch.sin(12.9898 * place + len(x))
        return grads[0] @ weight.T, (x * wobble).T @ grads[0]


class _Model(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 2))
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        out: Any = _CoarseProduct.apply(self.drop(x), self.weight)
        return out


def _verified(model: nn.Module, wrong: float = 0.0) -> Any:
    torch.manual_seed(1)

    def loss_fn(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        return loss * (1 + wrong) if len(x) == 12 else loss

    return verify(model, loss_fn, torch.randn(12, 4), microbatch_size=4, dtype="own")


def test_the_tolerance_is_measured_on_the_large_batch() -> None:
    report = _verified(_Model())
    (comparison,) = report.comparisons
    assert comparison.largest > 1e-5, "premise: kernels differ by more than float32 rounds"
    assert comparison.tolerance < 1e-2
    assert report.exact


def test_an_error_above_the_measured_tolerance_is_found() -> None:
    assert not _verified(_Model(), wrong=0.05).exact


def test_mutant_without_a_measured_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["superbatch.torch.checks.probing.report"]
    monkeypatch.setattr(module, "measured_floor", lambda setting, reference: 0.0)
    assert not _verified(_Model()).exact


def test_random_numbers_do_not_raise_the_tolerance() -> None:
    """Dropout masks depend on the order of samples; this must not raise the tolerance."""
    report = _verified(_Model(0.5))
    (comparison,) = report.comparisons
    assert comparison.tolerance < 5e-3
    assert not report.exact


def test_a_plain_float32_model_keeps_the_default_tolerance() -> None:
    model = nn.Linear(4, 2)
    report = verify(
        model, lambda x: model(x).square().mean(), torch.randn(12, 4), microbatch_size=4, dtype="own"
    )
    assert report.exact
    assert report.comparisons[0].tolerance == 1e-5


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_has_its_own_tolerance(dtype: torch.dtype) -> None:
    tolerance, most = rounding.rounding_of(dtype, nn.Linear(1, 1))
    assert torch.finfo(dtype).eps <= tolerance < most < 1


def test_tf32_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, linear = nn.Conv2d(1, 1, 1), nn.Linear(1, 1)
    assert torch.backends.cudnn.allow_tf32, "premise: torch's default"
    usual = rounding.ROUNDING[torch.float32]
    assert rounding.rounding_of(torch.float32, conv) == usual, "on the CPU there is no TF32"
    monkeypatch.setattr(rounding, "accelerators", lambda models: [torch.device("cuda", 0)])
    assert rounding.rounding_of(torch.float32, conv)[0] > 2**-11
    assert rounding.rounding_of(torch.float32, linear) == usual
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert rounding.rounding_of(torch.float32, conv) == usual
