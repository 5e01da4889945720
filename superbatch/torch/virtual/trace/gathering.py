"""A value of all samples in one piece, put together from the rows of the micro-batches."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from superbatch.results.coupling import CouplingKind

from ..ir.layout import Part
from ..ir.reductions import Joined
from ..ir.values import Action, Node, Operand, Value
from ..run.log import Log

aten: Any = torch.ops.aten

ASKED = "gather"  # in the place of an operator: the program, or a collective, asks for the numbers
# What all samples are compared with is whole in every exact way.
_PRODUCTS = {aten.mm, aten.bmm, aten.baddbmm, aten.addmm, aten.mv, aten.dot}
_PRODUCTS |= {aten._cdist_forward, aten._cdist_backward}
# Views for which it is all the same how many rows there are.
_TURNED = {aten.t.default, aten.transpose.int, aten.permute.default}


def gather(log: Log, value: Value, kind: CouplingKind, why: Any) -> Value:
    """Record that the rows of a value are put together.

    Args:
        log: records where an operator without a rule asks for it.
        value: with rows.
        kind: why: the operator needs it, or no rule knows the operator.
        why: the operator.

    Returns:
        The whole value; the same each time.
    """
    if value.gathered is not None and (known := value.gathered()) is not None:
        return known
    assert value.layout is not None
    layout, made = value.layout, value.node
    whole = Value(value.meta, value.device)
    whole.grows = tuple(sorted({layout.dim, *value.grows}))
    if value.whole is not None:
        whole.whole, whole.source = value.whole, value.source
    elif made is not None and made.operator in _TURNED and not made.once:
        # A loss reads embeddings, its backward their transpose: in memory once, not put together twice.
        rows = Operand(gather_input(log, made, kind, why), None)
        told = Action((value.meta,), True, True, (None,), made.run, None, True, False, False)
        Node(made.operator, [rows], told, [whole], where=log.where)
    else:
        if kind == "unknown":
            log.unknown(str(why), value.nbytes)
        elif why != ASKED and getattr(why, "overloadpacket", None) not in _PRODUCTS:
            log.whole_needed(str(why), value.nbytes)
        told = Action((value.meta,), True, False, (None,), _itself, lambda: Joined(layout), True, False, True)
        Node(why, [Operand(value, layout)], told, [whole], gathers=kind, where=log.where)
    value.gathered = weakref.ref(whole)
    return whole


def gather_input(log: Log, node: Node, kind: CouplingKind, why: Any) -> Value:
    """Return the source of a view, in one piece."""
    (operand,) = node.operands
    return operand.value if operand.value.layout is None else gather(log, operand.value, kind, why)


def _itself(part: Part, tensors: list[Tensor]) -> Tensor:
    return tensors[0]
