"""Compute large full values one micro-batch at a time when every consumer reads them by rows.

The gradient with respect to gathered embeddings is a sum over all samples, so it is full. What the backward
computes from it is full too: a transpose, a negation, a linear layer. Each of these has one row per sample,
so it can be cut. Operations that enlarge their input are always cut; others if a device budget is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..ir.calls import substituted
from ..ir.shard import Shard
from ..ir.values import ByRows, Node, Operand, Value, going_back
from .memo import Form, Template, template


def by_rows(form: Form) -> ByRows | None:
    """Return the form by rows of an operation on full values.

    Args:
        form: an operation on full values, some of them not computed yet.

    Returns:
        None if the operation has to run once on the full values.
    """
    if not going_back():  # only the backward has large full values: gradients of gathered ones
        return None
    # A computed value is in memory already: cutting it saves nothing.
    cut = {id(v): shard for v in form.tensors if v.full is None and (shard := _rows(v, form.samples))}
    if not cut:
        return None
    # Rules depend only on the shardings, so they are called with stand-ins that are sharded.
    stand_ins = [Value(v.meta, v.device, cut[id(v)]) if id(v) in cut else v for v in form.tensors]
    args, kwargs = substituted(form.args, form.kwargs, form.paths, stand_ins)
    known = template(Form(form.func, tuple(args), kwargs, form.samples))
    # Cutting gains nothing if the rule gathers an input again, or if a result is still full.
    if known is None or known.gathered or any(shard is None for shard in known.action.shards):
        return None
    return ByRows(known.action, _operands(known, form.tensors), _gets_larger(known, form, set(cut)))


def _rows(value: Value, samples: int) -> Shard | None:
    """Return the sharding that cuts a full value: that of its inputs, or dimension 0; None without rows."""
    made = None if value.node is None else value.node.by_rows
    if made is not None:
        return made.action.shards[value.index]
    # The size alone is ambiguous: the weight [N, d] of a layer as wide as the batch has N rows that are no
    # samples. `grows` excludes it.
    return Shard(0) if 0 in value.grows and value.meta.shape[0] == samples else None


def _operands(known: Template, tensors: Sequence[Value]) -> tuple[Operand, ...]:
    return tuple(Operand(tensors[index], shard) for index, shard in known.operands)


def _gets_larger(known: Template, form: Form, cut: set[int]) -> bool:
    made = sum(meta.numel() for meta in known.action.metas if isinstance(meta, torch.Tensor))
    return made >= 2 * sum(value.meta.numel() for value in form.tensors if id(value) in cut)


def cut_to_rows(nodes: Iterable[Node], readable: set[Value]) -> dict[Value, Shard]:
    """Switch operations on full values to their form by rows where every reader of the results reads rows.

    Args:
        nodes: all operations that may still run, in order; changed in place.
        readable: values that the program may read.

    Returns:
        Sums over samples that are read by rows only, with the sharding of these reads.
    """
    readings: dict[Value, set[Shard | None]] = {}
    apart: dict[Value, Shard] = {}
    for node in reversed(list(nodes)):  # backwards: readers are recorded after the producer
        outputs = [output() for output in node.outputs]
        read = [None if value is None else _only(readings.get(value)) for value in outputs]
        free = not any(value in readable for value in outputs)
        if node.by_rows is not None and free and read == list(node.by_rows.action.shards):
            _cut(node, node.by_rows)
        elif not node.once and free and not node.gathers:  # a gathered value may get more readers
            sums = zip(outputs, read, strict=True)
            apart |= {v: rows for v, rows in sums if v is not None and v.shard is None and rows is not None}
        for value, shard in node.operands:
            readings.setdefault(value, set()).add(shard)
    return apart


def _only(shards: set[Shard | None] | None) -> Shard | None:
    """Return the only sharding that a value is read with; None for several, or if it is read in full."""
    return next(iter(shards)) if shards is not None and len(shards) == 1 else None


def _cut(node: Node, rows: ByRows) -> None:
    action = rows.action
    node.operands, node.shards, node.run = rows.operands, action.shards, action.run
    node.view, node.light, node.known = action.view, action.light, action.known
    node.once, node.by_rows = False, None
    for output, shard in zip(node.outputs, action.shards, strict=True):
        value = output()
        if value is not None:
            value.shard = shard
