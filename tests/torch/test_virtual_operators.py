"""Every operator on virtual tensors against the same on whole ones: values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from superbatch.torch import virtual_batch
from superbatch.torch.virtual.log import OnGather
from tests.torch.coupled.operator_case import OperatorCase, call
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
    """Holds the inputs that are no batch, so that they get gradients as parameters do."""

    def __init__(self, inputs: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in inputs.items():
            self.register_parameter(name, nn.Parameter(value.detach(), value.requires_grad))


def on_virtual_tensors(
    case: OperatorCase, samples: int, microbatch: int, *, paranoid: bool = False, on_gather: OnGather = "ok"
) -> Found:
    inputs = case.inputs(samples)
    plain = Plain(
        {f"input_{i}": x for i, x in enumerate(inputs) if i not in case.virtual and x.requires_grad}
    )
    inputs = tuple(getattr(plain, f"input_{index}", x) for index, x in enumerate(inputs))
    with virtual_batch(plain, microbatch, rng="batch", paranoid=paranoid, on_gather=on_gather) as batch:
        given = [batch(x) if index in case.virtual else x for index, x in enumerate(inputs)]
        outputs, scalar = call(case, tuple(given))
        if scalar is not None:
            scalar.backward()
        values = [torch.as_tensor(out.detach().numpy()) for out in outputs]
    return values, [x.grad for x in inputs]


def assert_same(case: OperatorCase, ours: Found, whole: Found) -> None:
    where = [
        (f"{kind} {index}", a, b)
        for kind, found, expected in zip(("output", "gradient of input"), ours, whole, strict=True)
        for index, (a, b) in enumerate(zip(found, expected, strict=True))
    ]
    for what, a, b in where:
        assert (a is None) == (b is None), f"{what}: only one is there"
        if a is None or b is None:
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype), what
        if a.is_floating_point() or a.is_complex():
            size = float(torch.linalg.vector_norm(b)) or 1.0
            error = float(torch.linalg.vector_norm(a.resolve_conj() - b)) / size
            assert error <= 1e-12, f"{what}: relative error {error:.1e}"
        else:
            assert torch.equal(a, b), what


each_operator = pytest.mark.parametrize("case", ALL_OPERATORS, ids=str)


@each_operator
def test_an_operator_by_micro_batches_is_the_operator(case: OperatorCase) -> None:
    """Uneven micro-batches (3, 2, 2); for every third operator those of one sample and one of all too."""
    whole = on_whole_tensors(case, SAMPLES)
    for microbatch in (3, 1, SAMPLES) if ALL_OPERATORS.index(case) % 3 == 0 else (3,):
        assert_same(case, on_virtual_tensors(case, SAMPLES, microbatch), whole)


@pytest.mark.parametrize("case", [case for case in ALL_OPERATORS[::2] if case.min_n <= 1], ids=str)
def test_a_batch_of_one_sample(case: OperatorCase) -> None:
    assert_same(case, on_virtual_tensors(case, 1, 4), on_whole_tensors(case, 1))


@pytest.mark.parametrize("case", ALL_OPERATORS[::9], ids=str)
def test_an_operator_is_right_at_every_step(case: OperatorCase) -> None:
    assert_same(case, on_virtual_tensors(case, SAMPLES, 3, paranoid=True), on_whole_tensors(case, SAMPLES))


@pytest.mark.slow
@each_operator
def test_every_operator_is_right_at_every_step(case: OperatorCase) -> None:
    for samples, microbatch in ((SAMPLES, 3), (SAMPLES, 1), (max(5, case.min_n), 2), (case.min_n, 2)):
        found = on_virtual_tensors(case, samples, microbatch, paranoid=True)
        assert_same(case, found, on_whole_tensors(case, samples))
