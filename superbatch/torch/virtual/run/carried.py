"""Rows that the last micro-batch carries from sweep to sweep, so that none is recomputed.

A result that a later sweep reads is recomputed there, micro-batch by micro-batch, because those of all
micro-batches would not fit. Those of one do: the last one of a sweep is the first one of the next, and in
between holds what autograd would hold of it. With one micro-batch nothing is done twice; with four, a quarter
less.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..ir.layout import Part
from ..ir.values import Node, Value
from .plan import Plan

FEW = 16  # micro-batches; of more, one that is not recomputed is no gain
MUCH = 0.1  # of the operations that are no views and not light are done again


class CarriedRows:
    """The rows that one micro-batch carries from sweep to sweep.

    Args:
        plan: which is about to run.

    Attributes:
        first: the sweep in which each operation runs for the first time, and for this micro-batch the only
            one.
        until: the last sweep that reads a result which is computed in an earlier one.
        rows: what is carried now.
    """

    def __init__(self, plan: Plan) -> None:
        self.first: dict[Node, int] = {}
        for number in sorted(plan.sweeps):
            for node in plan.sweeps[number]:
                self.first.setdefault(node, number)
        self.until: dict[Value, int] = {}
        self.rows: dict[Value, Tensor] = {}
        for node, number in self.first.items():
            for value, layout in node.operands:
                made = None if value.layout is None or layout is None or value.there else value.node
                if made is not None and value not in plan.kept and self.first[made] < number:
                    self.until[value] = max(number, self.until.get(value, 0))

    def take(self, value: Value, number: int) -> Tensor:
        """Return rows, and free them if no later sweep reads them."""
        return self.rows.pop(value) if self.until[value] == number else self.rows[value]


def worth_carrying(plan: Plan, parts: Sequence[Part]) -> bool:
    """Return whether carrying saves enough: few micro-batches, and much to recompute in each."""
    return len(parts) == 1 or (len(parts) <= FEW and much_again(plan))


def much_again(plan: Plan) -> bool:
    """Return whether many of a plan's operations run in several sweeps, as with a loss over embeddings."""
    heavy = [node for nodes in plan.sweeps.values() for node in nodes if not (node.view or node.light)]
    return len(heavy) > (1 + MUCH) * len(set(heavy))
