"""Per-sample streams in a backward whose thread lacks the context variables of the forward.

On an accelerator autograd runs the backward in its own threads: modes are passed on, context variables are
not. An empty context in the same thread has the same effect.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from superbatch.errors import InputError
from superbatch.torch.rng import sample_layout
from superbatch.torch.rng.sample_layout import samples_along
from superbatch.torch.rng.sample_rng import sample_stream

SAMPLES, CHANNELS = 8, 3


def _in_empty_context(function: Callable[[], Any]) -> Any:
    return Context().run(function)


def _noisy(x: Tensor, weight: Tensor) -> Tensor:
    """Dropout on (time, batch, channels), where the sample dimension is not clear for every size."""
    return F.dropout(x.transpose(0, 1) @ weight, 0.5).square().mean((0, 2))


def _around(x: Tensor, weight: Tensor) -> Tensor:
    with samples_along(1):
        out = checkpoint(_noisy, x, weight, use_reentrant=False)
    assert isinstance(out, Tensor)
    return out


def _within(x: Tensor, weight: Tensor) -> Tensor:
    def noisy(x: Tensor, weight: Tensor) -> Tensor:
        with samples_along(1):
            return _noisy(x, weight)

    out = checkpoint(noisy, x, weight, use_reentrant=False)
    assert isinstance(out, Tensor)
    return out


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    with samples_along(1):
        return _noisy(x, weight)


def _gradient(loss: Callable[[Tensor, Tensor], Tensor], split: list[int], times: list[int]) -> Tensor:
    torch.manual_seed(0)
    weight = torch.randn(CHANNELS, 2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(SAMPLES, max(times), CHANNELS, dtype=torch.float64)
    calls: dict[int, Any] = {}
    first = 0
    for size, length in zip(split, times, strict=True):
        with sample_stream(5, first, size, calls=calls):
            value = loss(x[first : first + size, :length], weight).sum()
            _in_empty_context(value.backward)
        first += size
    assert first == SAMPLES and weight.grad is not None and weight.grad.norm() > 0
    return weight.grad


@pytest.mark.parametrize("loss", [_around, _within], ids=["around", "within"])
@pytest.mark.parametrize("split", [[8], [4, 4], [4, 3, 1]], ids=str)
def test_a_recomputed_call_has_the_sample_dimension_of_the_forward(loss: Any, split: list[int]) -> None:
    times = [12] * len(split)
    assert torch.allclose(_gradient(loss, split, times), _gradient(_plain, [8], [12]), rtol=1e-12)


@pytest.mark.parametrize("loss", [_around, _within], ids=["around", "within"])
def test_with_other_lengths_in_each_microbatch(loss: Any) -> None:
    """By chance the lengths grow with the number of samples: (16, 4) and (12, 3)."""
    split, times = [4, 3, 1], [16, 12, 16]
    assert torch.allclose(_gradient(loss, split, times), _gradient(_plain, split, times), rtol=1e-12)


class _NoiseInBackward(torch.autograd.Function):
    """Identity that multiplies its gradient by noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * torch.rand_like(grads[0])


def _drawn(split: list[int], *, empty: bool) -> Tensor:
    x = torch.randn(12, SAMPLES, 2, dtype=torch.float64)  # time first
    found, first, calls = [], 0, {}
    for size in split:
        mb = x[:, first : first + size].clone().requires_grad_()
        with sample_stream(5, first, size, calls=calls), samples_along(1):
            value = _NoiseInBackward.apply(mb).sum()
            _in_empty_context(value.backward) if empty else value.backward()
        assert mb.grad is not None
        found.append(mb.grad)
        first += size
    return torch.cat(found, 1)


def test_draws_in_the_backward_use_the_declared_dimension() -> None:
    unsplit = _drawn([8], empty=False)
    assert len(unsplit.unique()) > 12 * SAMPLES
    assert torch.equal(_drawn([4, 4], empty=True), unsplit)


def test_mutant_that_reads_only_the_context_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def axis(self: Any, key: int, op: str, shape: Any, samples: int, before: Any) -> Any:
        declared = sample_layout._declared.get()
        return sample_layout.sample_axis(op, shape, samples, before, declared)

    monkeypatch.setattr(sample_layout.Reading, "axis", axis)
    with pytest.raises(InputError, match=r"More than one dimension of .* could run"):
        test_a_recomputed_call_has_the_sample_dimension_of_the_forward(_around, [4, 4])
    with pytest.raises(InputError, match=r"More than one dimension of .* could run"):
        _drawn([4, 4], empty=True)
