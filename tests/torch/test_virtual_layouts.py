"""Operators whose virtual inputs come out of a view: the samples in another dimension than the first."""

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

# Where the samples are then; what has one dimension alone stays, unless it can be moved.
MOVES: dict[str, Move] = {
    "first": lambda x: x,
    "second": lambda x: x.movedim(0, 1).contiguous() if x.dim() > 1 else x,
    "second, a view": lambda x: x.movedim(0, 1) if x.dim() > 1 else x,
    "last": lambda x: x.movedim(0, -1).contiguous(),
    "before others, merged": lambda x: x.flatten(0, 1) if x.dim() > 1 else x,
    "behind others, merged": lambda x: x.transpose(0, 1).flatten(0, 1) if x.dim() > 1 else x,
    "behind one": lambda x: x[None],
}


def moved(case: OperatorCase, move: Move) -> OperatorCase:
    """Return the case with its virtual inputs moved before the function gets them."""

    def function(*inputs: Tensor) -> Any:
        return case.function(*(move(x) if i in case.virtual else x for i, x in enumerate(inputs)))

    return dataclasses.replace(case, function=function)


def _along(size: int, dim: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(size if index == dim else 1 for index in range(len(shape)))


def first_met_in_gradients(case: OperatorCase, samples: int, last: bool) -> OperatorCase:
    """Return the case with inputs that are no batch: the batch is what its outputs are multiplied by."""
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


def hold(case: OperatorCase, move: str, samples: int, **options: Any) -> bool:
    """Hold a case by micro-batches against whole tensors; False where torch does not take such inputs."""
    if samples < case.min_n:
        return False
    return held(moved(case, MOVES[move]), samples, **options)


def held(elsewhere: OperatorCase, samples: int, **options: Any) -> bool:
    """Hold a case as it is."""
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


# Of as many samples as inputs often have features, rules that look at sizes alone may take one for the other.
ALIKE = (3, 4)


@pytest.mark.parametrize("move", [move for move in MOVES if move != "first"])
def test_samples_in_another_dimension(move: str) -> None:
    """Every eighth operator, others for each move; `test_samples_in_each_dimension`, slow, takes them all."""
    first = list(MOVES).index(move)
    held = [hold(case, move, SAMPLES) for case in ALL_OPERATORS[first::8]]
    assert sum(held) > len(held) / 3, "torch takes too few of them"


def in_gradients_alone(case: OperatorCase) -> int:
    """How often a case was held whose inputs are whole while the gradients of its outputs are not."""
    ran = [
        held(first_met_in_gradients(case, samples, last), samples)
        for samples in (SAMPLES, *ALIKE)
        for last in (False, True)
        if samples >= case.min_n and not case.random
    ]
    return sum(ran)


def in_one_of_several(case: OperatorCase) -> int:
    """How often a case was held of whose batches one alone is virtual, the others whole."""
    ran = [
        held(dataclasses.replace(case, virtual=(index,)), SAMPLES)
        for index in case.virtual
        if len(case.virtual) > 1
    ]
    return sum(ran)


def test_samples_in_the_gradients_alone() -> None:
    """Every eighth operator; all of them in `test_samples_in_some_places_alone`, which is slow."""
    assert sum(in_gradients_alone(case) for case in ALL_OPERATORS[::8]) > 400


def test_samples_in_one_input_alone() -> None:
    assert sum(in_one_of_several(case) for case in ALL_OPERATORS[::2]) > 150


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL_OPERATORS, ids=str)
def test_samples_in_some_places_alone(case: OperatorCase) -> None:
    if not in_gradients_alone(case) + in_one_of_several(case):
        pytest.skip("it has one input and no gradients with as many rows")


@pytest.mark.parametrize("samples", ALIKE)
def test_as_many_samples_as_features(samples: int) -> None:
    """Every eighth operator; all of them in `test_samples_in_each_dimension`, which is slow."""
    cases = ALL_OPERATORS[samples::8]
    assert sum(hold(case, "first", samples) for case in cases) > 0.95 * len(cases) > 90


@pytest.mark.slow
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("case", ALL_OPERATORS, ids=str)
def test_samples_in_each_dimension(case: OperatorCase, move: str) -> None:
    held = [hold(case, move, samples, paranoid=samples == SAMPLES) for samples in (SAMPLES, *ALIKE)]
    if not any(held):
        pytest.skip("torch does not take such inputs")
