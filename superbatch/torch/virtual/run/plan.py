"""Schedule: the operations of each sweep, and the results stored from one sweep to the next.

A sweep runs all micro-batches once. An operation that reads a batch statistic runs in a sweep after the one
that sums the statistic. The *stage* of an operation is the number of its first sweep. A result that several
stages read is either stored for all samples or recomputed. It is stored if a coupling point reads it (the
input of a BatchNorm, an embedding), or if more than `PATIENCE` later stages would recompute it. So a
contrastive loss runs the forward twice, like GradCache, and BatchNorms run it once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..ir.shard import Shard
from ..ir.values import Node, Value
from .by_rows import cut_to_rows

PATIENCE = {True: 3, False: 1}  # largest number of recomputations, for light operations and for others
_LATER = 1 << 30  # stage after all others, for values that the program may still read


class Plan(NamedTuple):
    """Schedule of the operations to run.

    Attributes:
        once: by stage, operations on full values, which run before the sweep.
        sweeps: by stage, operations that run for each micro-batch, in order.
        stage: stage in which the full outputs of each node are computed.
        stored: values whose rows are stored, with the last stage that reads them.
        read_by_rows: full results of sweeps that are read by rows only, with the sharding of these reads and
            the last stage that reads them.
        points: coupling points: operations whose full results are read per micro-batch by later operations.
    """

    once: dict[int, list[Node]]
    sweeps: dict[int, list[Node]]
    stage: dict[Node, int]
    stored: dict[Value, int]
    read_by_rows: dict[Value, tuple[Shard, int]]
    points: list[Node]


def plan(targets: Iterable[Value], readable: Iterable[Value], *, by_rows: bool = False) -> Plan:
    """Schedule the operations that compute the targets, which are full values.

    `readable` are values that the program may read later, because its tensors refer to them. With `by_rows`,
    full values are computed by rows if all readers take rows; that saves memory, and costs kernel calls.
    """
    targets, readable = set(targets), set(readable)
    others = [value for value in readable if not value.materialized and value not in targets]
    # Include values that may be read later. From a running mean alone, the plan would not know that samples
    # wait for the same statistic.
    everything = _ancestors([*targets, *others])
    cut = cut_to_rows(everything, targets | readable) if by_rows else {}
    # Computed again, because cut_to_rows changes operands.
    nodes = _ancestors(targets) if by_rows or others else everything
    stage = _stages(nodes, {})
    later = {id(node) for node in _ancestors(others)} if others else set[int]()
    coupling_ids = _coupling_points(everything)
    sweeps: dict[int, list[Node]] = {}
    wanted: dict[Value, set[int]] = {}
    coupling: dict[Value, set[int]] = {}  # stages in which a coupling point reads a value
    stored: dict[Value, int] = {}
    moved = False
    for node in reversed(nodes):  # readers first: the stages that read a value also compute it
        if node.once:
            continue
        # No sample waits for such a node, e.g. a logged loss: it joins a sweep that computes its inputs.
        if id(node) not in coupling_ids:
            earliest = stage[node]
            stage[node] = _stage_with_inputs(node, earliest, wanted)
            moved |= stage[node] != earliest
        runs = _running_stages(node, stage, wanted, coupling, stored, id(node) in later)
        for number in runs:
            sweeps.setdefault(number, []).append(node)
        for value, shard in node.operands:
            if value.shard is not None and shard is not None and not value.materialized:
                wanted.setdefault(value, set()).update(runs)
                if id(node) in coupling_ids:
                    coupling.setdefault(value, set()).add(stage[node])
    for sweep in sweeps.values():
        # Nodes were appended in reverse, but run in the order of recording.
        sweep.reverse()
    if moved:  # operations that read a moved sum have to wait for it
        stage = _stages(nodes, stage)
    points = [node for node in nodes if id(node) in coupling_ids]
    readers = [(node, _LATER if id(node) in later else 0) for node in everything]
    read_by_rows = {value: (shard, _last_reading(value, readers, sweeps)) for value, shard in cut.items()}
    return Plan(_once(nodes, stage), sweeps, stage, stored, read_by_rows, points)


def _last_reading(value: Value, readers: list[tuple[Node, int]], sweeps: dict[int, list[Node]]) -> int:
    """Return the last stage that reads a value by rows; `readers` has (node, lowest stage)."""
    last = 0
    for node, least in readers:
        if any(read is value for read, _ in node.operands):
            runs = [number for number, nodes in sweeps.items() if node in nodes]
            last = max(last, least, *runs)
    return last


def _once(nodes: list[Node], stage: dict[Node, int]) -> dict[int, list[Node]]:
    once: dict[int, list[Node]] = {}
    # In the order of recording, so that the inputs of a node are computed before it.
    for node in nodes:
        if node.once:
            once.setdefault(stage[node], []).append(node)
    return once


def _stage_with_inputs(node: Node, earliest: int, wanted: dict[Value, set[int]]) -> int:
    """Return the first stage that computes the inputs of a sum that no sample reads later, such as a loss."""
    if node.shards.count(None) < len(node.shards):  # readers of its sharded results determine its stages
        return earliest
    inputs = [
        v for v, shard in node.operands if v.shard is not None and shard is not None and not v.materialized
    ]
    stages = [min(numbers) for v in inputs if (numbers := wanted.get(v))]
    return max([earliest, *stages])


def _ancestors(values: Iterable[Value]) -> list[Node]:
    """Return the operations that still have to run for the values, in the order of recording."""
    nodes: dict[int, Node] = {}
    # An explicit stack, because a deep model would exceed Python's recursion limit.
    todo = [value.node for value in values if not value.materialized and value.node is not None]
    while todo:
        node = todo.pop()
        if node.serial in nodes:
            continue
        nodes[node.serial] = node
        todo += [v.node for v, _ in node.operands if not v.materialized and v.node is not None]
    return [nodes[serial] for serial in sorted(nodes)]


def _stages(nodes: list[Node], least: dict[Node, int]) -> dict[Node, int]:
    """Return the first stage in which each node can run, at least the one in `least`."""
    stage: dict[Node, int] = {}
    for node in nodes:
        number = 0 if node.once else least.get(node, 0)
        for value, _ in node.operands:
            if value.materialized or value.node is None:
                continue
            made = value.node
            waits = value.shard is None and not made.once  # a sum over samples is complete after its sweep
            number = max(number, stage[made] + waits)
        stage[node] = number
    return stage


def _coupling_points(nodes: list[Node]) -> set[int]:
    """Return the ids of nodes whose full outputs are read per micro-batch by later operations."""
    awaited: set[int] = set()  # ids of full values that operations per micro-batch depend on
    points: set[int] = set()
    for node in reversed(nodes):
        outputs = [output() for output in node.outputs]
        full = any(value is not None and id(value) in awaited for value in outputs)
        if full and not node.once:
            points.add(id(node))
        if full or not node.once:
            awaited.update(
                id(value) for value, _ in node.operands if value.shard is None and not value.materialized
            )
    return points


def _running_stages(
    node: Node,
    stage: dict[Node, int],
    wanted: dict[Value, set[int]],
    coupling: dict[Value, set[int]],
    stored: dict[Value, int],
    later: bool,
) -> set[int]:
    """Return the stages in which a node runs, and add its outputs that must be stored to `stored`."""
    runs = {stage[node]} if None in node.shards else set[int]()
    for output in node.outputs:
        value = output()
        if value is None or value.shard is None or not (stages := wanted.get(value)):
            continue
        first = min(stages)
        later_stages = stages - {first}
        if later:
            later_stages = later_stages | {_LATER}
        # A coupling point and a later stage read all rows, as with the input of a BatchNorm.
        coupled = first in coupling.get(value, ())
        if (
            later_stages
            and (coupled or len(later_stages) > PATIENCE[node.light])
            and not _cheap_to_recompute(node)
        ):
            stored[value] = max(later_stages)
            runs.add(first)
        else:
            runs |= stages
    return runs


def _cheap_to_recompute(node: Node) -> bool:
    """Return whether recomputing the output costs no more than reading it from the store."""
    # True for views, and at most one light operation, of stored rows.
    while node.view or node.light:
        batch = [value for value, shard in node.operands if shard is not None]
        if not batch:  # zeros, or an expanded full value
            return True
        if len(batch) != 1:
            return False
        value = batch[0]
        if value.materialized:
            return True
        if value.node is None or not node.view:
            return False
        node = value.node
    return False
