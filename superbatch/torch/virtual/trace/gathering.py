"""Gathering: a full value, joined from the rows of all micro-batches."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from superbatch.results.coupling import CouplingKind

from ..ir.reductions import Joined
from ..ir.shard import Part
from ..ir.values import Action, Node, Operand, Value
from ..run.log import Log

aten: Any = torch.ops.aten

READ_BY_PROGRAM = "gather"  # in place of an operator, if the program or a collective reads the numbers
# z @ z.T combines all pairs of samples: every exact method needs one side in full, so it is not logged.
_PRODUCTS = {aten.mm, aten.bmm, aten.baddbmm, aten.addmm, aten.mv, aten.dot}
_PRODUCTS |= {aten._cdist_forward, aten._cdist_backward}
# Views that take the same arguments for rows and for the full tensor.
_TURNED = {aten.t.default, aten.transpose.int, aten.permute.default}


def gather(log: Log, value: Value, kind: CouplingKind, why: Any) -> Value:
    """Record the gathering of a sharded value.

    Args:
        log: logs operators that gather the batch.
        value: the sharded value.
        kind: "gathered": the operator reads the full value; "unknown": the operator has no rule.
        why: the operator.

    Returns:
        The full value; the same one in each call.
    """
    # Cached weakly: two readers share one copy, and without readers it is freed.
    if value.gathered is not None and (known := value.gathered()) is not None:
        return known
    assert value.shard is not None
    shard, made = value.shard, value.node
    full = Value(value.meta, value.device)
    full.grows = tuple(sorted({shard.dim, *value.grows}))
    if value.full is not None:  # an input of the block: nothing to join
        full.full, full.source = value.full, value.source
    elif made is not None and made.operator in _TURNED and not made.once:
        # A loss reads embeddings, its backward their transpose: gather once, and transpose the full tensor.
        rows = Operand(gather_input(log, made, kind, why), None)
        action = Action((value.meta,), True, True, (None,), made.run, None, True, False, False)
        Node(made.operator, [rows], action, [full], where=log.where)
    else:
        if kind == "unknown":
            log.unknown(str(why), value.nbytes)
        elif why != READ_BY_PROGRAM and getattr(why, "overloadpacket", None) not in _PRODUCTS:
            log.full_value_needed(str(why), value.nbytes)
        action = Action(
            (value.meta,), True, False, (None,), _itself, lambda: Joined(shard), True, False, True
        )
        Node(why, [Operand(value, shard)], action, [full], gathers=kind, where=log.where)
    value.gathered = weakref.ref(full)
    return full


def gather_input(log: Log, node: Node, kind: CouplingKind, why: Any) -> Value:
    """Return the input of a view as a full value."""
    (operand,) = node.operands
    return operand.value if operand.value.shard is None else gather(log, operand.value, kind, why)


def _itself(part: Part, tensors: list[Tensor]) -> Tensor:
    return tensors[0]
