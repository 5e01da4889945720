"""Rows that the last micro-batch carries from sweep to sweep instead of recomputing them.

A later sweep recomputes the results that it reads, because those of all micro-batches would not fit in
memory. Those of one micro-batch do. So the last micro-batch of a sweep is the first of the next sweep, and
its results stay in memory, as autograd would keep them. With four micro-batches this saves a quarter of the
recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..ir.shard import BatchSlice
from ..ir.values import Node, Value
from .plan import Plan

MOST_MICROBATCHES = 16  # with more, a single one that recomputes nothing saves less than 6 %
LEAST_RECOMPUTED = 0.1  # smallest share of recomputed operations (without views and light ones) to carry for


class CarriedRows:
    """Rows that the last micro-batch carries from sweep to sweep.

    Attributes:
        first_sweep: first sweep of each operation; the last micro-batch runs it only there.
        last_sweep: last sweep that reads each carried value.
        rows: carried rows by value.
    """

    def __init__(self, plan: Plan) -> None:
        self.first_sweep: dict[Node, int] = {}
        for number in sorted(plan.sweeps):
            for node in plan.sweeps[number]:
                self.first_sweep.setdefault(node, number)
        self.last_sweep: dict[Value, int] = {}
        self.rows: dict[Value, Tensor] = {}
        for node, number in self.first_sweep.items():
            for value, shard in node.operands:
                # Full, materialized and stored values are not read from carried rows.
                full = value.shard is None or shard is None
                producer = None if full or value.materialized else value.node
                if producer is None or value in plan.stored:
                    continue
                if self.first_sweep[producer] < number:
                    self.last_sweep[value] = max(number, self.last_sweep.get(value, 0))

    def take(self, value: Value, number: int) -> Tensor:
        """Return the carried rows of a value, and free them after the last sweep that reads them."""
        return self.rows.pop(value) if self.last_sweep[value] == number else self.rows[value]


def worth_carrying(plan: Plan, microbatches: Sequence[BatchSlice]) -> bool:
    """Return whether carrying saves time: few micro-batches, and much to recompute in each."""
    return len(microbatches) == 1 or (len(microbatches) <= MOST_MICROBATCHES and recomputes_much(plan))


def recomputes_much(plan: Plan) -> bool:
    """Return whether many operations run in several sweeps, as the forward of a contrastive loss does."""
    heavy = [node for nodes in plan.sweeps.values() for node in nodes if not (node.view or node.light)]
    return len(heavy) > (1 + LEAST_RECOMPUTED) * len(set(heavy))
