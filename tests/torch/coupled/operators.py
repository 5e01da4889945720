"""All operator cases, by group and by name."""

from __future__ import annotations

from tests.torch.coupled.operator_case import OperatorCase
from tests.torch.coupled.operator_zoo import (
    algebra,
    attention,
    indexing,
    layers,
    losses,
    pointwise,
    products,
    reductions,
    shapes,
)

OPERATOR_GROUPS: dict[str, list[OperatorCase]] = {
    "pointwise": pointwise.OPERATORS,
    "reductions": reductions.OPERATORS,
    "shapes": shapes.OPERATORS,
    "indexing": indexing.OPERATORS,
    "products": products.OPERATORS,
    "layers": layers.OPERATORS,
    "attention": attention.OPERATORS,
    "losses": losses.OPERATORS,
    "algebra": algebra.OPERATORS,
}

ALL_OPERATORS = [case for group in OPERATOR_GROUPS.values() for case in group]
OPERATORS: dict[str, OperatorCase] = {case.name: case for case in ALL_OPERATORS}
assert len(OPERATORS) == len(ALL_OPERATORS), "two operator cases have the same name"
