"""Compute large full values one micro-batch at a time when every consumer reads them by rows.

The gradient of gathered embeddings is a sum over all samples, so it is full. The backward computes further
full values from it: a transpose, a negation, the gradient of a linear layer. Each has one row per sample, so
it can be cut. Operations that enlarge their input are always cut, others only if a device budget is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..ir.calls import substituted
from ..ir.shard import Shard
from ..ir.values import ByRows, Node, Operand, Value, in_backward
from .memo import KeyedCall, Template, template


def by_rows(keyed: KeyedCall) -> ByRows | None:
    """Return the form by rows of an operation on full values; None if it has to run once, on these values."""
    if not in_backward():  # only gradients of gathered values are full and large
        return None
    # A materialized value is in memory already, so cutting it saves nothing.
    cut = {id(v): shard for v in keyed.tensors if v.full is None and (shard := _row_shard(v, keyed.samples))}
    if not cut:
        return None
    # Rules read only shapes and shardings, so they can be called with sharded stand-ins.
    stand_ins = [Value(v.meta, v.device, cut[id(v)]) if id(v) in cut else v for v in keyed.tensors]
    args, kwargs = substituted(keyed.args, keyed.kwargs, keyed.paths, stand_ins)
    cached = template(KeyedCall(keyed.func, tuple(args), kwargs, keyed.samples))
    # Cutting saves nothing if the rule gathers an input again, or if a result is still full.
    if cached is None or cached.gathered or any(shard is None for shard in cached.action.shards):
        return None
    return ByRows(cached.action, _operands(cached, keyed.tensors), _enlarges(cached, keyed, set(cut)))


def _row_shard(value: Value, samples: int) -> Shard | None:
    """Return the sharding that can cut a full value; None if it has no row per sample."""
    form = None if value.node is None else value.node.by_rows
    if form is not None:
        return form.action.shards[value.index]
    # The size alone is ambiguous: the weight of a layer as wide as the batch has N rows too. But that
    # dimension is not in `grows`.
    return Shard(0) if 0 in value.grows and value.meta.shape[0] == samples else None


def _operands(cached: Template, tensors: Sequence[Value]) -> tuple[Operand, ...]:
    return tuple(Operand(tensors[index], shard) for index, shard in cached.operands)


def _enlarges(cached: Template, keyed: KeyedCall, cut: set[int]) -> bool:
    elements = sum(meta.numel() for meta in cached.action.metas if isinstance(meta, torch.Tensor))
    return elements >= 2 * sum(value.meta.numel() for value in keyed.tensors if id(value) in cut)


def cut_to_rows(nodes: Iterable[Node], readable: set[Value]) -> dict[Value, Shard]:
    """Switch each operation to its form by rows if every reader of its results reads rows.

    `nodes` are all operations that may still run, in order; `readable` are values that the program may read.
    Return the sums over samples that are read by rows only, with the sharding of these reads.
    """
    readings: dict[Value, set[Shard | None]] = {}
    read_by_rows: dict[Value, Shard] = {}
    for node in reversed(list(nodes)):  # readers first, which are recorded after the producer
        outputs = [output() for output in node.outputs]
        read = [None if value is None else _only_shard(readings.get(value)) for value in outputs]
        switchable = not any(value in readable for value in outputs)
        if node.by_rows is not None and switchable and read == list(node.by_rows.action.shards):
            _cut(node, node.by_rows)
        elif not node.once and switchable and not node.gathers:  # a gathered value may get readers later
            sums = zip(outputs, read, strict=True)
            read_by_rows |= {
                v: rows for v, rows in sums if v is not None and v.shard is None and rows is not None
            }
        for value, shard in node.operands:
            readings.setdefault(value, set()).add(shard)
    return read_by_rows


def _only_shard(shards: set[Shard | None] | None) -> Shard | None:
    """Return the sharding of all reads of a value; None if they differ or read the value in full."""
    return next(iter(shards)) if shards is not None and len(shards) == 1 else None


def _cut(node: Node, rows: ByRows) -> None:
    action = rows.action
    node.operands, node.shards, node.run = rows.operands, action.shards, action.run
    node.view, node.light, node.compilable = action.view, action.light, action.compilable
    node.once, node.by_rows = False, None
    for output, shard in zip(node.outputs, action.shards, strict=True):
        value = output()
        if value is not None:
            value.shard = shard
