"""``microbatch_size="auto"``: as many samples at a time as a plan needs memory for, and there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from superbatch.torch.memory.limits import memory_limit

from ..ir.values import Node, Value
from .carried import FEW, CarriedRows, much_again
from .plan import Plan

SHARE = (
    0.8  # of the free memory: workspaces of kernels, and what the heap loses between blocks, are not counted
)


def microbatch_size(
    size: int | Literal["auto"], plan: Plan, samples: int, device: torch.device, budget: int | None
) -> int:
    """Return the size that was given, or the largest that fits in what memory there is now."""
    if isinstance(size, int):  # no need to read the machine's limits, in each update
        return size
    return largest_size(plan, samples, memory_limit(device).bytes, budget)


def largest_size(plan: Plan, samples: int, free: int, budget: int | None) -> int:
    """Return the number of samples that fit.

    Args:
        plan: what is to be run.
        samples: of the batch.
        free: bytes that may still be allocated.
        budget: most bytes of kept rows that stay on the device; None: all.

    Returns:
        From 1 to `samples`.
    """
    kept = sum(value.nbytes for value in plan.kept)
    whole = sum(
        value.nbytes
        for node in plan.stage
        for output in node.outputs
        if (value := output()) is not None and value.layout is None
    )
    room = SHARE * free - (kept if budget is None else min(kept, budget)) - whole
    alive = max((_most_alive(nodes) for nodes in plan.sweeps.values()), default=0)
    if not alive:
        return samples
    carried = sum(
        base.nbytes for base in {_base(value) for value in CarriedRows(plan).until} if not base.there
    )
    few = FEW if much_again(plan) else 1  # number of micro-batches; one carries (see `carried`)
    size = int(room * samples / (alive + carried))
    if size * few < samples:
        size = min(int(room * samples / alive), -(-samples // few) - 1)
    return max(1, min(samples, size))


def _most_alive(nodes: Sequence[Node]) -> int:
    """The most bytes at a time that one sweep would need for all samples at once."""
    last: dict[Value, int] = {}
    for position in reversed(range(len(nodes))):
        node = nodes[position]
        # The memory of a view is that of its base.
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
    """Return the value whose memory this one is in."""
    while value.node is not None and value.node.view and (inputs := _inputs(value.node)):
        value = inputs[0]
    return value


def _inputs(node: Node) -> list[Value]:
    return [value for value, layout in node.operands if layout is not None]


def _outputs(node: Node) -> list[Value]:
    return [value for output in node.outputs if (value := output()) is not None and value.layout is not None]
