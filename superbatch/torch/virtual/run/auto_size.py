"""Micro-batch size for ``microbatch_size="auto"``: the largest whose sweeps fit in the free memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from superbatch.torch.memory.limits import memory_limit

from ..ir.values import Node, Value
from .carried import MOST_MICROBATCHES, CarriedRows, recomputes_much
from .plan import Plan

SHARE = 0.8  # of the free memory, because kernel workspaces and fragmentation are not counted


def microbatch_size(
    size: int | Literal["auto"], plan: Plan, samples: int, device: torch.device, budget: int | None
) -> int:
    """Return the given size; for "auto", the largest whose sweeps fit in the memory that is free now."""
    if isinstance(size, int):  # saves reading the machine's limits in each update
        return size
    return largest_size(plan, samples, memory_limit(device).bytes, budget)


def largest_size(plan: Plan, samples: int, free: int, budget: int | None) -> int:
    """Return the largest micro-batch size, from 1 to `samples`, whose sweeps fit in `free` bytes.

    `budget` is the largest number of bytes of stored rows on the device; with None all rows stay there.
    """
    stored = sum(value.nbytes for value in plan.stored)
    full = sum(
        value.nbytes
        for node in plan.stage
        for output in node.outputs
        if (value := output()) is not None and value.shard is None
    )
    # Stored rows and full values do not depend on the size. Micro-batches get the rest of the memory.
    room = SHARE * free - (stored if budget is None else min(stored, budget)) - full
    per_batch = max((_peak_bytes(nodes) for nodes in plan.sweeps.values()), default=0)
    if not per_batch:  # nothing runs per micro-batch
        return samples
    carried = sum(
        base.nbytes
        for base in {_base(value) for value in CarriedRows(plan).last_sweep}
        if not base.materialized
    )
    # Up to this number of micro-batches, the last one carries its rows.
    most = MOST_MICROBATCHES if recomputes_much(plan) else 1
    size = int(room * samples / (per_batch + carried))
    if size * most < samples:
        # The carried rows do not fit too, so make more than `most` micro-batches: then none carries rows.
        size = min(int(room * samples / per_batch), -(-samples // most) - 1)
    return max(1, min(samples, size))


def _peak_bytes(nodes: Sequence[Node]) -> int:
    """Return the peak bytes of a sweep over all samples at once; a micro-batch takes its share of them."""
    last_use: dict[Value, int] = {}
    for position in reversed(range(len(nodes))):
        node = nodes[position]
        # A view keeps its base alive until the view was read last.
        last_view_use = (
            max((last_use.get(value, 0) for value in _outputs(node)), default=0) if node.view else 0
        )
        for value in _inputs(node):
            last_use[value] = max(last_use.get(value, 0), position, last_view_use)
        for value in _outputs(node):
            last_use.setdefault(value, position)
    freed: dict[int, int] = {}
    for value, position in last_use.items():
        if not _is_view(value):
            freed[position] = freed.get(position, 0) + value.nbytes
    alive = peak = 0
    seen: set[Value] = set()
    for position, node in enumerate(nodes):
        for value in (*_inputs(node), *_outputs(node)):
            if value not in seen and not _is_view(value):
                alive += value.nbytes
            seen.add(value)
        peak = max(peak, alive)
        alive -= freed.get(position, 0)
    return peak


def _is_view(value: Value) -> bool:
    return value.node is not None and value.node.view


def _base(value: Value) -> Value:
    """Return the value that owns the memory of this one."""
    while value.node is not None and value.node.view and (inputs := _inputs(value.node)):
        value = inputs[0]
    return value


def _inputs(node: Node) -> list[Value]:
    return [value for value, shard in node.operands if shard is not None]


def _outputs(node: Node) -> list[Value]:
    return [value for output in node.outputs if (value := output()) is not None and value.shard is not None]
