"""Gathering of a sharded value: a full value that joins the rows of all micro-batches."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from superbatch.results.coupling import CouplingKind

from ..ir.reductions import Joined
from ..ir.shard import REPLICATE, BatchSlice
from ..ir.values import Action, Node, Operand, Value
from ..run.log import Log

aten: Any = torch.ops.aten

READ_BY_PROGRAM = "gather"  # in place of an operator if the program or a collective reads the numbers
# Not logged: z @ z.T combines all pairs of samples, so every exact method needs one side in full.
_PRODUCTS = {aten.mm, aten.bmm, aten.baddbmm, aten.addmm, aten.mv, aten.dot}
_PRODUCTS |= {aten._cdist_forward, aten._cdist_backward}
# Views with the same arguments for rows and for the full tensor.
_TRANSPOSES = {aten.t.default, aten.transpose.int, aten.permute.default}


def gather(log: Log, value: Value, kind: CouplingKind, operator: Any) -> Value:
    """Record the gathering of a sharded value; return the full value, the same one in each call.

    `kind` is "gathered" if the operator reads the full value, "unknown" if the operator has no rule.
    """
    # Cached weakly: readers share one copy, which is freed after the last one.
    if value.gathered is not None and (full := value.gathered()) is not None:
        return full
    assert value.shard is not None
    shard, node = value.shard, value.node
    full = Value(value.meta, value.device)
    full.grows = tuple(sorted({shard.dim, *value.grows}))
    if value.full is not None:  # an input of the block, which is not split
        full.full, full.source = value.full, value.source
    elif node is not None and node.operator in _TRANSPOSES and not node.once:
        # A loss reads embeddings and its backward their transpose: gathered once, and transposed in full.
        rows = Operand(gather_input(log, node, kind, operator), REPLICATE)
        action = Action((value.meta,), True, True, (None,), node.run, None, True, False, False)
        Node(node.operator, [rows], action, [full], where=log.where)
    else:
        if kind == "unknown":
            log.operator_without_rule(str(operator), value.nbytes)
        elif operator != READ_BY_PROGRAM and getattr(operator, "overloadpacket", None) not in _PRODUCTS:
            log.operator_gathers(str(operator), value.nbytes)
        action = Action(
            (value.meta,), True, False, (None,), _itself, lambda: Joined(shard), True, False, True
        )
        Node(operator, [Operand(value, shard)], action, [full], gathers=kind, where=log.where)
    value.gathered = weakref.ref(full)
    return full


def gather_input(log: Log, node: Node, kind: CouplingKind, operator: Any) -> Value:
    """Return the input of a view as a full value."""
    (operand,) = node.operands
    return operand.value if operand.value.shard is None else gather(log, operand.value, kind, operator)


def _itself(microbatch: BatchSlice, tensors: list[Tensor]) -> Tensor:
    return tensors[0]
