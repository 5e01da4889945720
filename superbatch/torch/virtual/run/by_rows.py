"""Compute large unsharded values one micro-batch at a time when every consumer reads them by rows.

The gradient of a loss with respect to gathered embeddings is a sum over the samples that they were compared
with, so it is whole; what the way back makes of it - a transpose, a change of sign, a linear layer - has as
many rows. Any tensor may be cut into rows; those that grow with the batch are. What gets larger is
done so from the start; the rest where memory on the device is short, and nothing reads it otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..ir.calls import substituted
from ..ir.layout import Layout
from ..ir.values import ByRows, Node, Operand, Value, going_back
from .memo import Form, Template, template


def by_rows(form: Form) -> ByRows | None:
    """Return a recipe for an operation on whole values by rows.

    Args:
        form: of an operation on whole values, some of which wait to be computed.

    Returns:
        None: whole, as it stands.
    """
    if not going_back():  # not on the way back
        return None
    cut = {id(v): layout for v in form.tensors if v.whole is None and (layout := _rows(v, form.samples))}
    if not cut:
        return None
    stand_ins = [Value(v.meta, v.device, cut[id(v)]) if id(v) in cut else v for v in form.tensors]
    args, kwargs = substituted(form.args, form.kwargs, form.paths, stand_ins)
    known = template(Form(form.func, tuple(args), kwargs, form.samples))
    if known is None or known.gathered or any(layout is None for layout in known.action.layouts):
        return None
    return ByRows(known.action, _operands(known, form.tensors), _gets_larger(known, form, set(cut)))


def _rows(value: Value, samples: int) -> Layout | None:
    """Return the layout by which a full value may be cut: that of its inputs, or its first dimension.

    A layer as wide as the batch is large has a gradient of as many rows, which are no samples.
    """
    made = None if value.node is None else value.node.by_rows
    if made is not None:
        return made.action.layouts[value.index]
    return Layout(0) if 0 in value.grows and value.meta.shape[0] == samples else None


def _operands(known: Template, tensors: Sequence[Value]) -> tuple[Operand, ...]:
    return tuple(Operand(tensors[index], layout) for index, layout in known.operands)


def _gets_larger(known: Template, form: Form, cut: set[int]) -> bool:
    made = sum(meta.numel() for meta in known.action.metas if isinstance(meta, torch.Tensor))
    return made >= 2 * sum(value.meta.numel() for value in form.tensors if id(value) in cut)


def cut_to_rows(nodes: Iterable[Node], asked_for: set[Value]) -> dict[Value, Layout]:
    """Let operations on whole values be done by rows where nothing reads the results otherwise.

    Args:
        nodes: all that may still run, in order; they are changed in place.
        asked_for: values that the program may ask for.

    Returns:
        The sums over samples that nothing reads but by rows, and where these are.
    """
    readings: dict[Value, set[Layout | None]] = {}
    apart: dict[Value, Layout] = {}
    for node in reversed(list(nodes)):  # who reads a value comes after who makes it
        outputs = [output() for output in node.outputs]
        read = [None if value is None else _only(readings.get(value)) for value in outputs]
        free = not any(value in asked_for for value in outputs)
        if node.by_rows is not None and free and read == list(node.by_rows.action.layouts):
            _cut(node, node.by_rows)
        elif not node.once and free and not node.gathers:  # what is gathered may be asked for again
            sums = zip(outputs, read, strict=True)
            apart |= {v: rows for v, rows in sums if v is not None and v.layout is None and rows is not None}
        for value, layout in node.operands:
            readings.setdefault(value, set()).add(layout)
    return apart


def _only(layouts: set[Layout | None] | None) -> Layout | None:
    """The one layout that a value is read with; None if there are several, or it is read whole."""
    return next(iter(layouts)) if layouts is not None and len(layouts) == 1 else None


def _cut(node: Node, rows: ByRows) -> None:
    told = rows.action
    node.operands, node.layouts, node.run = rows.operands, told.layouts, told.run
    node.view, node.light, node.known = told.view, told.light, told.known
    node.once, node.by_rows = False, None
    for output, layout in zip(node.outputs, told.layouts, strict=True):
        value = output()
        if value is not None:
            value.layout = layout
