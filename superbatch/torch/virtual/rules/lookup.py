"""Lookup of an operator's rule: its own function, a row of the table, or the elementwise rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..ir.calls import Call, OpStrategy, run_of
from ..ir.shard import PARTIAL, REPLICATE
from ..ir.values import Operand, Value
from .attention_rules import RULES as ATTENTION
from .convolution_rules import RULES as CONVOLUTIONS
from .index_rules import RULES as INDEXING
from .loss_rules import RULES as LOSSES
from .norm_rules import RULES as NORMALISATIONS
from .reduce_rules import RULES as REDUCTIONS
from .shape_rules import RULES as SHAPES
from .table import ROWS

Rule = Callable[[Call], "OpStrategy | None"]
_aten: Any = torch.ops.aten
# Elementwise operators without torch's `pointwise` tag.
_ELEMENTWISE = {
    _aten.complex,
    _aten.elu_backward,
    _aten.fake_quantize_per_tensor_affine_cachemask,
    _aten.fill,
    _aten.floor_divide,
    _aten.hardshrink_backward,
    _aten.hardsigmoid_backward,
    _aten.hardswish,
    _aten.hardswish_backward,
    _aten.hardtanh_backward,
    _aten.leaky_relu_backward,
    _aten.masked_fill,
    _aten.polar,
    _aten.softplus_backward,
    _aten.softshrink_backward,
}
OWN: dict[Any, Rule] = {
    **SHAPES,
    **REDUCTIONS,
    **NORMALISATIONS,
    **ATTENTION,
    **INDEXING,
    **LOSSES,
    **CONVOLUTIONS,
}


def find(call: Call) -> OpStrategy | None:
    """Return the strategy that runs a call micro-batch by micro-batch; None without a rule.

    The strategy may read sharded values in full; the caller has to gather these.
    """
    func = call.func
    # The overload first: max.dim and max.default have different rules.
    own = OWN.get(func) or OWN.get(func.overloadpacket)
    if own is not None:
        strategy = own(call)
        if strategy is not None:
            return strategy  # otherwise the table: the function may be for special cases (nll_loss_backward)
    rows = ROWS.get(func) or ROWS.get(func.overloadpacket)
    if rows is not None:
        return _by_row(call, rows)
    return elementwise(call) if _is_elementwise(func) else None


@cache  # reading tags converts a C++ list
def _is_elementwise(func: Any) -> bool:
    pointwise = torch.Tag.pointwise in func.tags or func.overloadpacket in _ELEMENTWISE
    return pointwise and not draws(func)  # for random operators see `trace.randomness`


@cache
def draws(func: Any) -> bool:
    """Return whether an operator draws random numbers, or rereads those of its forward."""
    return torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket in _DRAWN_BEFORE


_DRAWN_BEFORE = {torch.ops.aten._scaled_dot_product_flash_attention_backward}


# -- rows of the table --------------------------------------------------------------------------------------


def _by_row(call: Call, rows: list[tuple[str, str]]) -> OpStrategy | None:
    """Return the strategy of the row that gathers the fewest bytes."""
    # Gathering needs the memory of the whole batch, so it decides between the rows that fit.
    best: tuple[int, OpStrategy] | None = None
    for inputs, outputs in rows:
        fit = _fit(call, inputs, outputs)
        if fit is not None and (best is None or fit[0] < best[0]):
            best = fit
    return None if best is None else best[1]


def _fit(call: Call, inputs: str, outputs: str) -> tuple[int, OpStrategy] | None:
    codes = inputs.ljust(len(call.tensors), "_")
    # All values that the row cuts need the same `outer` and `inner`. Their dimensions are the row's codes.
    shards = [
        value.shard
        for code, value in zip(codes, call.tensors, strict=False)
        if code != "_" and value.shard is not None and value.shard.dim == int(code)
    ]
    if not shards or len({shard[1:] for shard in shards}) > 1:
        return None
    common, gathered, operands = shards[0], 0, []
    rows = common.rows(call.samples)
    for code, value in zip(codes, call.tensors, strict=False):
        if code == "_":
            if value.shard is not None:
                gathered += value.nbytes
            operands.append(Operand(value, REPLICATE))
            continue
        shard = common.at(int(code))
        if value.shard != shard and value.shard is not None:  # sharded in another dimension
            gathered += value.nbytes
        if value.meta.dim() <= shard.dim or value.meta.shape[shard.dim] != rows:
            return None
        operands.append(Operand(value, shard))
    placements = [PARTIAL if code == "+" else common.at(int(code)) for code in outputs]
    return gathered, OpStrategy(operands, placements, run_of(call))


# -- elementwise --------------------------------------------------------------------------------------------


def elementwise(call: Call) -> OpStrategy | None:
    """Return the strategy of an elementwise call: cut each tensor that has the rows of the batch."""
    dims = max((value.meta.dim() for value in call.tensors), default=0)
    leading = _leading(call)
    if leading is None or leading.shard is None:
        return None
    from_end = leading.shard.dim - leading.meta.dim()  # negative, because broadcasting aligns on the right
    rows = leading.shard.rows(call.samples)
    operands = []
    for value in call.tensors:
        dim = value.meta.dim() + from_end
        if dim < 0 or (value.meta.shape[dim] == 1 != rows):  # e.g. a bias [d], or a mean [1, d]
            operands.append(Operand(value, REPLICATE))
        elif value.meta.shape[dim] == rows:
            operands.append(Operand(value, leading.shard.at(dim)))
        else:  # a batch of one sample broadcasts to the size of another tensor
            return None
    output = leading.shard.at(dims + from_end)
    return OpStrategy(operands, [output] * len(call.func._schema.returns), run_of(call), light=True)


def _leading(call: Call) -> Value | None:
    """Return the largest sharded value, whose sharding all others have to take."""
    batch = [value for value in call.tensors if value.shard is not None]
    return max(batch, key=lambda value: (value.meta.numel(), value.meta.dim()), default=None)
