"""Operators whose virtual inputs come out of a view: the samples in another dimension than the first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from tests.torch.coupled.operator_case import OperatorCase
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


def hold(case: OperatorCase, move: str, samples: int, **options: Any) -> bool:
    """Hold a case by micro-batches against whole tensors; False where torch does not take such inputs."""
    if samples < case.min_n:
        return False
    elsewhere = moved(case, MOVES[move])
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
    return True


# Of as many samples as inputs often have features, rules that look at sizes alone may take one for the other.
ALIKE = (3, 4)


@pytest.mark.parametrize("move", [move for move in MOVES if move != "first"])
def test_samples_in_another_dimension(move: str) -> None:
    held = [hold(case, move, SAMPLES) for case in ALL_OPERATORS[::4]]
    assert sum(held) > len(held) / 3, "torch takes too few of them"


@pytest.mark.parametrize("samples", ALIKE)
def test_as_many_samples_as_features(samples: int) -> None:
    assert sum(hold(case, "first", samples) for case in ALL_OPERATORS[::4]) > 100


@pytest.mark.slow
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("case", ALL_OPERATORS, ids=str)
def test_samples_in_each_dimension(case: OperatorCase, move: str) -> None:
    held = [hold(case, move, samples, paranoid=samples == SAMPLES) for samples in (SAMPLES, *ALIKE)]
    if not any(held):
        pytest.skip("torch does not take such inputs")
