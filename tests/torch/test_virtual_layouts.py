"""Operators on virtual inputs whose samples are in another dimension than the first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.torch.coupled.operator_case import N, OperatorCase, real
from tests.torch.coupled.operators import ALL_OPERATORS
from tests.torch.test_virtual_operators import SAMPLES, assert_same, on_virtual_tensors, on_whole_tensors

Move = Callable[[Tensor], Tensor]

# Dimension of the samples after the move. Most moves leave one-dimensional tensors unchanged.
MOVES: dict[str, Move] = {
    "first": lambda x: x,
    "second": lambda x: x.movedim(0, 1).contiguous() if x.dim() > 1 else x,
    "second, a view": lambda x: x.movedim(0, 1) if x.dim() > 1 else x,
    "last": lambda x: x.movedim(0, -1).contiguous(),
    "merged, samples first": lambda x: x.flatten(0, 1) if x.dim() > 1 else x,
    "merged, samples last": lambda x: x.transpose(0, 1).flatten(0, 1) if x.dim() > 1 else x,
    "after a dimension of size 1": lambda x: x[None],
}


def moved(case: OperatorCase, move: Move) -> OperatorCase:
    """Return the case with its virtual inputs moved before the function gets them."""

    def function(*inputs: Tensor) -> Any:
        return case.function(*(move(x) if i in case.virtual else x for i, x in enumerate(inputs)))

    return dataclasses.replace(case, function=function)


def _along(size: int, dim: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(size if index == dim else 1 for index in range(len(shape)))


def virtual_in_gradients_only(case: OperatorCase, samples: int, last: bool) -> OperatorCase:
    """Return the case with real inputs, and with outputs multiplied by a virtual batch."""
    weigher = len(case.specs)

    def function(*inputs: Tensor) -> Any:
        *given, weights = inputs
        found = case.function(*given)
        outputs = []
        for out in [found] if isinstance(found, Tensor) else found:
            dims = [dim for dim, size in enumerate(out.shape) if size == samples]
            if dims and out.requires_grad:
                out = out * weights.view(_along(samples, dims[-1 if last else 0], out.shape))
                outputs.append(out)
        return outputs

    return dataclasses.replace(
        case, function=function, specs=(*case.specs, real(N)), virtual=(weigher,), min_n=case.min_n
    )


def compare_moved(case: OperatorCase, move: str, samples: int, **options: Any) -> bool:
    """Compare a moved case with full tensors; return False if torch rejects such inputs."""
    if samples < case.min_n:
        return False
    return compare(moved(case, MOVES[move]), samples, **options)


def compare(elsewhere: OperatorCase, samples: int, **options: Any) -> bool:
    """Compare a case with full tensors; return False if torch rejects such inputs."""
    try:
        whole = on_whole_tensors(elsewhere, samples)
    except (
        RuntimeError,
        ValueError,
        TypeError,
        IndexError,
        AssertionError,
        NotImplementedError,
        UserWarning,
    ):
        return False
    found = on_virtual_tensors(elsewhere, samples, 3 if samples > 4 else 2, **options)
    assert_same(elsewhere, found, whole, 1e-10)  # some sums nearly cancel
    return bool(whole[0])


# As many samples as features: a rule that compares only sizes would confuse them.
ALIKE = (3, 4)


@pytest.mark.parametrize("move", [move for move in MOVES if move != "first"])
def test_samples_in_another_dimension(move: str) -> None:
    """Every eighth operator per move; the slow `test_samples_in_each_dimension` has them all."""
    first = list(MOVES).index(move)
    compared = [compare_moved(case, move, SAMPLES) for case in ALL_OPERATORS[first::8]]
    assert sum(compared) > len(compared) / 3, "torch rejects too many cases"


def compare_virtual_gradients(case: OperatorCase) -> int:
    """Count comparisons of a case with real inputs and virtual gradients of outputs."""
    ran = [
        compare(virtual_in_gradients_only(case, samples, last), samples)
        for samples in (SAMPLES, *ALIKE)
        for last in (False, True)
        if samples >= case.min_n and not case.random
    ]
    return sum(ran)


def compare_one_virtual_input(case: OperatorCase) -> int:
    """Count comparisons of a case with one virtual batch and real other batches."""
    ran = [
        compare(dataclasses.replace(case, virtual=(index,)), SAMPLES)
        for index in case.virtual
        if len(case.virtual) > 1
    ]
    return sum(ran)


def test_virtual_gradients_of_real_inputs() -> None:
    """Every eighth operator; the slow `test_virtual_gradients_or_one_virtual_input` has them all."""
    assert sum(compare_virtual_gradients(case) for case in ALL_OPERATORS[::8]) > 400


def test_one_virtual_input() -> None:
    assert sum(compare_one_virtual_input(case) for case in ALL_OPERATORS[::2]) > 150


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL_OPERATORS, ids=str)
def test_virtual_gradients_or_one_virtual_input(case: OperatorCase) -> None:
    if not compare_virtual_gradients(case) + compare_one_virtual_input(case):
        pytest.skip("one input, and no gradient with as many rows")


@pytest.mark.parametrize("samples", ALIKE)
def test_as_many_samples_as_features(samples: int) -> None:
    """Every eighth operator; the slow `test_samples_in_each_dimension` has them all."""
    cases = ALL_OPERATORS[samples::8]
    assert sum(compare_moved(case, "first", samples) for case in cases) > 0.95 * len(cases) > 90


@pytest.mark.slow
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("case", ALL_OPERATORS, ids=str)
def test_samples_in_each_dimension(case: OperatorCase, move: str) -> None:
    compared = [
        compare_moved(case, move, samples, paranoid=samples == SAMPLES) for samples in (SAMPLES, *ALIKE)
    ]
    if not any(compared):
        pytest.skip("torch rejects such inputs")
