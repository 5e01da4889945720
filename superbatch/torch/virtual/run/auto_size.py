"""Micro-batch size for ``microbatch_size="auto"``: the largest whose sweeps fit in the free memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from superbatch.torch.memory.limits import memory_limit

from ..ir.values import Node, Value
from .carried import FEW, CarriedRows, much_again
from .plan import Plan

SHARE = 0.8  # of the free memory: workspaces of kernels and fragmentation of the heap are not counted


def microbatch_size(
    size: int | Literal["auto"], plan: Plan, samples: int, device: torch.device, budget: int | None
) -> int:
    """Return the given size; for "auto" the largest that fits in the memory that is free now."""
    if isinstance(size, int):  # without reading the machine's limits in each update
        return size
    return largest_size(plan, samples, memory_limit(device).bytes, budget)


def largest_size(plan: Plan, samples: int, free: int, budget: int | None) -> int:
    """Return the number of samples whose sweeps fit in the free memory.

    Args:
        plan: the schedule.
        samples: number of samples of the batch.
        free: bytes that can be allocated.
        budget: largest number of bytes of stored rows on the device; None: all rows stay there.

    Returns:
        A size from 1 to `samples`.
    """
    kept = sum(value.nbytes for value in plan.kept)
    full = sum(
        value.nbytes
        for node in plan.stage
        for output in node.outputs
        if (value := output()) is not None and value.shard is None
    )
    # Stored rows and full values take their bytes whatever the size; only the rest is for micro-batches.
    room = SHARE * free - (kept if budget is None else min(kept, budget)) - full
    alive = max((_most_alive(nodes) for nodes in plan.sweeps.values()), default=0)
    if not alive:  # nothing runs per micro-batch
        return samples
    carried = sum(
        base.nbytes for base in {_base(value) for value in CarriedRows(plan).until} if not base.materialized
    )
    few = FEW if much_again(plan) else 1  # up to this number of micro-batches the last one carries its rows
    size = int(room * samples / (alive + carried))
    if size * few < samples:
        # The carried rows do not fit beside the others: so more than `few` micro-batches, of which none
        # carries.
        size = min(int(room * samples / alive), -(-samples // few) - 1)
    return max(1, min(samples, size))


def _most_alive(nodes: Sequence[Node]) -> int:
    """Peak bytes of one sweep if it ran on all samples at once: scales linearly with the size."""
    last: dict[Value, int] = {}
    for position in reversed(range(len(nodes))):
        node = nodes[position]
        # A view keeps its base alive until the last reader of the view.
        until = max((last.get(value, 0) for value in _outputs(node)), default=0) if node.view else 0
        for value in _inputs(node):
            last[value] = max(last.get(value, 0), position, until)
        for value in _outputs(node):
            last.setdefault(value, position)
    dies: dict[int, int] = {}
    for value, position in last.items():
        if not _is_view(value):
            dies[position] = dies.get(position, 0) + value.nbytes
    alive = most = 0
    seen: set[Value] = set()
    for position, node in enumerate(nodes):
        for value in (*_inputs(node), *_outputs(node)):
            if value not in seen and not _is_view(value):
                alive += value.nbytes
            seen.add(value)
        most = max(most, alive)
        alive -= dies.get(position, 0)
    return most


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
