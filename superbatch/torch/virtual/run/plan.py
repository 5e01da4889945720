"""Schedule: the operations of each sweep, and the results stored from one sweep to the next.

A sweep visits all micro-batches once. An operation that reads a batch statistic waits for a sweep after the
one that sums it: its *stage*. A result that several stages read is stored for all samples if a coupling point
reads it (a BatchNorm's input, an embedding) or if more than `PATIENCE` later stages would recompute it; else
it is recomputed. So a contrastive loss runs the forward twice, like GradCache; BatchNorms run it once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..ir.shard import Shard
from ..ir.values import Node, Value
from .by_rows import cut_to_rows

PATIENCE = {True: 3, False: 1}  # recomputations of a light operation, and of any other, before it is stored
_LATER = 1 << 30  # a stage after all others, for values that the program may still read


class Plan(NamedTuple):
    """Schedule of the operations to run.

    Attributes:
        once: by stage, the operations on full values, which run before the sweep.
        sweeps: by stage, the operations that run for each micro-batch, in order.
        stage: stage of each node, in which its full outputs are computed.
        kept: values whose rows are stored, with the last stage that reads them.
        apart: full results of sweeps that are read by rows only, with the sharding of these reads and the
            last stage that makes one.
        points: coupling points: operations whose full results are read per micro-batch again.
    """

    once: dict[int, list[Node]]
    sweeps: dict[int, list[Node]]
    stage: dict[Node, int]
    kept: dict[Value, int]
    apart: dict[Value, tuple[Shard, int]]
    points: list[Node]


def plan(targets: Iterable[Value], readable: Iterable[Value], *, by_rows: bool = False) -> Plan:
    """Schedule the operations that compute full values.

    Args:
        targets: full values to compute.
        readable: values that tensors of the program refer to, so that they may be read later.
        by_rows: compute full values by rows where all readers take rows: saves memory, costs kernel calls.

    Returns:
        The plan.
    """
    targets, readable = set(targets), set(readable)
    others = [value for value in readable if not value.materialized and value not in targets]
    # With the values that may be read later: a read of a running mean alone does not show that samples wait
    # for the same statistic.
    everything = _ancestors([*targets, *others])
    cut = cut_to_rows(everything, targets | readable) if by_rows else {}
    # cut_to_rows changes operands, and with them the ancestors.
    nodes = _ancestors(targets) if by_rows or others else everything
    stage = _stages(nodes, {})
    later = {id(node) for node in _ancestors(others)} if others else set[int]()
    feeds = _feeding(everything)
    sweeps: dict[int, list[Node]] = {}
    wanted: dict[Value, set[int]] = {}
    coupling: dict[Value, set[int]] = {}  # stages in which a coupling point reads a value
    kept: dict[Value, int] = {}
    moved = False
    for node in reversed(nodes):  # readers first: which stages want a value decides where its node runs
        if node.once:
            continue
        if id(node) not in feeds:  # e.g. a logged loss: joins a sweep that runs its inputs anyway
            earliest = stage[node]
            stage[node] = _stage_with_inputs(node, earliest, wanted)
            moved |= stage[node] != earliest
        runs = _runs(node, stage, wanted, coupling, kept, id(node) in later)
        for number in runs:
            sweeps.setdefault(number, []).append(node)
        for value, shard in node.operands:
            if value.shard is not None and shard is not None and not value.materialized:
                wanted.setdefault(value, set()).update(runs)
                if id(node) in feeds:
                    coupling.setdefault(value, set()).add(stage[node])
    for found in sweeps.values():
        # Nodes were appended in reverse; a sweep runs them in the order of recording.
        found.reverse()
    if moved:  # a moved sum delays the operations that read it
        stage = _stages(nodes, stage)
    points = [node for node in nodes if id(node) in feeds]
    readers = [(node, _LATER if id(node) in later else 0) for node in everything]
    apart = {value: (shard, _last_reading(value, readers, sweeps)) for value, shard in cut.items()}
    return Plan(_once(nodes, stage), sweeps, stage, kept, apart, points)


def _last_reading(value: Value, readers: list[tuple[Node, int]], sweeps: dict[int, list[Node]]) -> int:
    """Return the last stage that reads a value by rows; `readers` are pairs of a node and its least stage."""
    last = 0
    for node, least in readers:
        if any(read is value for read, _ in node.operands):
            runs = [number for number, nodes in sweeps.items() if node in nodes]
            last = max(last, least, *runs)
    return last


def _once(nodes: list[Node], stage: dict[Node, int]) -> dict[int, list[Node]]:
    once: dict[int, list[Node]] = {}
    for node in nodes:
        if node.once:
            once.setdefault(stage[node], []).append(node)
    return once


def _stage_with_inputs(node: Node, earliest: int, wanted: dict[Value, set[int]]) -> int:
    """Return the stage of a sum that no sample waits for, such as a loss: the first that runs its inputs."""
    if node.shards.count(None) < len(node.shards):  # it has rows as well, which their readers place
        return earliest
    inputs = [
        v for v, shard in node.operands if v.shard is not None and shard is not None and not v.materialized
    ]
    stages = [min(numbers) for v in inputs if (numbers := wanted.get(v))]
    return max([earliest, *stages])


def _ancestors(values: Iterable[Value]) -> list[Node]:
    """Return the operations that still have to run for the values, in the order of recording."""
    found: dict[int, Node] = {}
    # An explicit stack: the chain of nodes of a deep model exceeds Python's recursion limit.
    todo = [value.node for value in values if not value.materialized and value.node is not None]
    while todo:
        node = todo.pop()
        if node.serial in found:
            continue
        found[node.serial] = node
        todo += [v.node for v, _ in node.operands if not v.materialized and v.node is not None]
    return [found[serial] for serial in sorted(found)]


def _stages(nodes: list[Node], least: dict[Node, int]) -> dict[Node, int]:
    """Return the first stage in which each node can run, at least the given one."""
    stage: dict[Node, int] = {}
    for node in nodes:
        number = 0 if node.once else least.get(node, 0)
        for value, _ in node.operands:
            if value.materialized or value.node is None:
                continue
            made = value.node
            waits = value.shard is None and not made.once  # a sum over samples is full after its sweep
            number = max(number, stage[made] + waits)
        stage[node] = number
    return stage


def _feeding(nodes: list[Node]) -> set[int]:
    """Return the ids of the coupling points: operations whose full outputs are read per micro-batch again."""
    fed: set[int] = set()  # ids of full values that an operation per micro-batch depends on
    feeding: set[int] = set()
    for node in reversed(nodes):
        outputs = [output() for output in node.outputs]
        full = any(value is not None and id(value) in fed for value in outputs)
        if full and not node.once:
            feeding.add(id(node))
        if full or not node.once:
            fed.update(
                id(value) for value, _ in node.operands if value.shard is None and not value.materialized
            )
    return feeding


def _runs(
    node: Node,
    stage: dict[Node, int],
    wanted: dict[Value, set[int]],
    coupling: dict[Value, set[int]],
    kept: dict[Value, int],
    later: bool,
) -> set[int]:
    """Return the stages in which a node runs, and decide which of its outputs are stored."""
    runs = {stage[node]} if None in node.shards else set[int]()
    for output in node.outputs:
        value = output()
        if value is None or value.shard is None or not (stages := wanted.get(value)):
            continue
        first = min(stages)
        again = stages - {first}
        if later:
            again = again | {_LATER}
        # e.g. the input of a BatchNorm: the next stage normalises it, so all of its rows are read at least
        # twice.
        coupled = first in coupling.get(value, ())
        if again and (coupled or len(again) > PATIENCE[node.light]) and not _cheap_to_recompute(node):
            kept[value] = max(again)
            runs.add(first)
        else:
            runs |= stages
    return runs


def _cheap_to_recompute(node: Node) -> bool:
    """Return whether recomputing the output costs as much as reading it from the store."""
    # Follows views to their base, and accepts one light operation on stored rows.
    while node.view or node.light:
        batch = [value for value, shard in node.operands if shard is not None]
        if not batch:  # e.g. zeros, or an expanded full value
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
