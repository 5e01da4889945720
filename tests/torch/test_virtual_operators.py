"""Every operator on virtual tensors gives the values and gradients of full tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.torch import virtual_batch
from tests.torch.coupled import data
from tests.torch.coupled.operator_case import N, OperatorCase, call, ints, operator, real
from tests.torch.coupled.operators import ALL_OPERATORS

SAMPLES = 7
Found = tuple[list[Tensor], list[Tensor | None]]


def on_whole_tensors(case: OperatorCase, samples: int) -> Found:
    inputs = case.inputs(samples)
    outputs, scalar = call(case, inputs)
    if scalar is not None:
        scalar.backward()
    return [out.detach() for out in outputs], [x.grad for x in inputs]


class Plain(nn.Module):
    """Module whose parameters are the real inputs, so that they get gradients."""

    def __init__(self, inputs: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in inputs.items():
            self.register_parameter(name, nn.Parameter(value.detach(), value.requires_grad))


def on_virtual_tensors(case: OperatorCase, samples: int, microbatch: int, **options: Any) -> Found:
    inputs = case.inputs(samples)
    plain = Plain(
        {f"input_{i}": x for i, x in enumerate(inputs) if i not in case.virtual and x.requires_grad}
    )
    inputs = tuple(getattr(plain, f"input_{index}", x) for index, x in enumerate(inputs))
    with virtual_batch(plain, microbatch, rng="batch", **options) as batch:
        given = [batch(x) if index in case.virtual else x for index, x in enumerate(inputs)]
        outputs, scalar = call(case, tuple(given))
        if scalar is not None:
            scalar.backward()
        values = [torch.as_tensor(out.detach().numpy()) for out in outputs]
    return values, [x.grad for x in inputs]


def assert_same(case: OperatorCase, ours: Found, whole: Found, tolerance: float = 1e-12) -> None:
    where = [
        (f"{kind} {index}", a, b)
        for kind, found, expected in zip(("output", "gradient of input"), ours, whole, strict=True)
        for index, (a, b) in enumerate(zip(found, expected, strict=True))
    ]
    for what, a, b in where:
        assert (a is None) == (b is None), f"{what}: only one exists"
        if a is None or b is None:
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype), what
        if a.is_floating_point() or a.is_complex():
            size = float(torch.linalg.vector_norm(b)) or 1.0
            error = float(torch.linalg.vector_norm(a.resolve_conj() - b)) / size
            assert error <= tolerance, f"{what}: relative error {error:.1e}"
        else:
            assert torch.equal(a, b), what


def _multiple_of_four(n: int, seed: int) -> Tensor:
    return data.normal(n - n % 4 if n > 4 else n, 3, 4, seed=seed)


def _write_halves(x: Tensor) -> Tensor:
    y = x.clone()
    y[1::2] = y[: len(y) // 2] * 2
    y[-1] = 5.0
    y[2:4, 1:] += 1
    return y * x


def _ragged_ctc(x: Tensor, y: Tensor, targets: Tensor, steps: Tensor) -> Tensor:
    return F.ctc_loss(x.permute(1, 0, 2).log_softmax(2), y, steps, targets, zero_infinity=True)


each_operator = pytest.mark.parametrize("case", ALL_OPERATORS, ids=str)


@each_operator
@pytest.mark.sampled(2)
def test_an_operator_on_micro_batches_equals_the_operator(case: OperatorCase) -> None:
    """Micro-batches of 3, 2 and 2; for every third operator, also of one sample and of all."""
    whole = on_whole_tensors(case, SAMPLES)
    for microbatch in (3, 1, SAMPLES) if ALL_OPERATORS.index(case) % 3 == 0 else (3,):
        assert_same(case, on_virtual_tensors(case, SAMPLES, microbatch), whole)
    assert_same(case, on_virtual_tensors(case, SAMPLES, 3, device_budget=0), whole)


@pytest.mark.parametrize("case", [case for case in ALL_OPERATORS[::2] if case.min_n <= 1], ids=str)
@pytest.mark.sampled(2)
def test_a_batch_of_one_sample(case: OperatorCase) -> None:
    for budget in (None, 0):
        assert_same(case, on_virtual_tensors(case, 1, 4, device_budget=budget), on_whole_tensors(case, 1))


@pytest.mark.parametrize("case", ALL_OPERATORS[::9], ids=str)
def test_some_operators_in_paranoid_mode(case: OperatorCase) -> None:
    assert_same(case, on_virtual_tensors(case, SAMPLES, 3, paranoid=True), on_whole_tensors(case, SAMPLES))


@pytest.mark.slow
@each_operator
def test_every_operator_in_paranoid_mode(case: OperatorCase) -> None:
    for samples, microbatch in ((SAMPLES, 3), (SAMPLES, 1), (max(5, case.min_n), 2)):
        found = on_virtual_tensors(case, samples, microbatch, paranoid=True)
        assert_same(case, found, on_whole_tensors(case, samples))
    # BatchNorm of two samples has a gradient near zero.
    found = on_virtual_tensors(case, case.min_n, 2, paranoid=True)
    assert_same(case, found, on_whole_tensors(case, case.min_n), 1e-10)


MORE = [
    operator(
        "embedding by frequency",
        lambda i, w: F.embedding(i, w, scale_grad_by_freq=True),
        ints(5, N, 3),
        real(5, 2),
    ),
    operator("planes shuffled as channels", lambda x: F.pixel_shuffle(x, 2) * 1.5, _multiple_of_four),
    operator("channels shuffled of planes", lambda x: F.channel_shuffle(x, 3), _multiple_of_four),
    operator("powers in place", lambda x: x.abs().pow_(1.5).pow_(torch.full((4,), 2.0)), real(N, 4)),
    operator("whole powers in place", lambda x: x.clone().float_power_(2), real(N, 4)),
    operator(
        "addmm of plain rows",
        lambda a, x, w: torch.addmm(a, x, w),
        real(N, 2),
        real(N, 3),
        real(3, 2),
        plain=(0,),
    ),
    operator(
        "addmm of a row as wide as the batch",
        lambda x, w: torch.addmm(x.new_ones(7), x, w),
        real(N, 3),
        real(3, 7),
    ),
    operator(
        "labels in place",
        lambda x, y: x.clone().index_put_((torch.arange(len(x)), y), x[:, 0]),
        real(N, 3),
        ints(3, N),
    ),
    operator(
        "added to labels",
        lambda x, y: x.index_put((torch.arange(len(x)), y), x[:, 0], accumulate=True),
        real(N, 3),
        ints(3, N),
    ),
    operator("a table of tables", lambda t, i, j: t[i, j], real(3, 4, 2), ints(3, N), ints(4, N), plain=(0,)),
    operator("a strided half written", _write_halves, real(N, 3)),
    operator("frexp", lambda x: torch.frexp(x.detach()), real(N, 3)),
    operator(
        "negative indices",
        lambda x: (x[:, [-1, 0]], x[torch.arange(len(x)), -x.detach()[:, 0].gt(0).long()]),
        real(N, 3),
    ),
    operator("means of halves", lambda x: torch.var_mean(x.half(), 0), real(N, 3)),
    operator(
        "ctc of ragged targets",
        _ragged_ctc,
        real(N, 8, 5),
        ints(5, N, 3, low=1),
        ints(4, N, low=1),
        ints(9, N, low=6),
    ),
]


@pytest.mark.parametrize("case", MORE, ids=str)
def test_rare_operators(case: OperatorCase) -> None:
    for samples, microbatch in (
        ((8, 3), (8, 1), (7, 3)) if case.specs[0] is not _multiple_of_four else ((8, 3), (4, 1))
    ):
        whole = on_whole_tensors(case, samples)
        tolerance = 1e-12 if case.name != "means of halves" else 2e-3
        assert_same(case, on_virtual_tensors(case, samples, microbatch, paranoid=True), whole, tolerance)
        assert_same(case, on_virtual_tensors(case, samples, microbatch), whole, tolerance)


def test_one_sample_broadcast_by_an_addition() -> None:
    case = operator(
        "repeated", lambda x, table: (x + table) * x.expand(5, -1), real(N, 4), real(5, 4), plain=(1,)
    )
    assert_same(case, on_virtual_tensors(case, 1, 2), on_whole_tensors(case, 1))
