"""Rows that the last micro-batch carries from sweep to sweep instead of recomputing them.

A later sweep recomputes the results that it reads, because those of all micro-batches would not fit. Those of
one micro-batch do fit: the last one of a sweep is the first one of the next and keeps its results in between,
as autograd would. With one micro-batch nothing is recomputed; with four, a quarter less.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..ir.shard import Part
from ..ir.values import Node, Value
from .plan import Plan

FEW = 16  # micro-batches: among more, one that recomputes nothing saves less than 6 %
MUCH = 0.1  # share of recomputed operations, views and light ones apart, from which carrying pays


class CarriedRows:
    """Rows that one micro-batch carries from sweep to sweep.

    Args:
        plan: the schedule that is about to run.

    Attributes:
        first: first sweep of each operation; for the carrying micro-batch the only one.
        until: last sweep that reads each carried value.
        rows: the rows carried now.
    """

    def __init__(self, plan: Plan) -> None:
        self.first: dict[Node, int] = {}
        for number in sorted(plan.sweeps):
            for node in plan.sweeps[number]:
                self.first.setdefault(node, number)
        self.until: dict[Value, int] = {}
        self.rows: dict[Value, Tensor] = {}
        for node, number in self.first.items():
            for value, shard in node.operands:
                # Full values, materialized ones and stored ones are read from their own place.
                made = None if value.shard is None or shard is None or value.materialized else value.node
                if made is not None and value not in plan.kept and self.first[made] < number:
                    self.until[value] = max(number, self.until.get(value, 0))

    def take(self, value: Value, number: int) -> Tensor:
        """Return the carried rows of a value, and free them after the last sweep that reads them."""
        return self.rows.pop(value) if self.until[value] == number else self.rows[value]


def worth_carrying(plan: Plan, parts: Sequence[Part]) -> bool:
    """Return whether carrying pays: few micro-batches, and much to recompute in each."""
    return len(parts) == 1 or (len(parts) <= FEW and much_again(plan))


def much_again(plan: Plan) -> bool:
    """Return whether many operations run in several sweeps, e.g. a forward under a contrastive loss."""
    heavy = [node for nodes in plan.sweeps.values() for node in nodes if not (node.view or node.light)]
    return len(heavy) > (1 + MUCH) * len(set(heavy))
