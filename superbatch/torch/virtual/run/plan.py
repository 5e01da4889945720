"""Schedule: the operations of each sweep, and the results kept from one sweep to the next.

A sweep goes over all micro-batches once. What depends on a statistic of all samples has to wait for the sweep
after the one in which the statistic is summed: its *stage*. Within a stage everything runs micro-batch by
micro-batch. A result that a later stage reads too is either kept for all samples, or recomputed there
from what was kept.

Kept is what a coupling point itself reads (the input of a BatchNorm, an embedding), and what more than
`PATIENCE` later stages would have to recompute. So a model with samples coupled in the loss only keeps its
embeddings and runs its forward twice, as GradCache does; one with a BatchNorm in every block keeps their
inputs and runs every convolution once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..ir.layout import Layout
from ..ir.values import Node, Value
from .by_rows import cut_to_rows

PATIENCE = {True: 3, False: 1}  # for light operations, and for others
_LATER = 1 << 30  # a stage that nobody knows yet: a tensor of the program may still be used


class Plan(NamedTuple):
    """Schedule of the operations to run.

    Attributes:
        once: by stage, what runs before the sweep, on whole values.
        sweeps: by stage, what runs for each micro-batch, in order.
        stage: of each node: where its whole outputs are computed.
        kept: the values that are kept, with the last stage that reads them.
        apart: whole results of sweeps that are read by rows alone: where these are, and the last stage.
        meeting: operations whose whole results flow back into samples.
    """

    once: dict[int, list[Node]]
    sweeps: dict[int, list[Node]]
    stage: dict[Node, int]
    kept: dict[Value, int]
    apart: dict[Value, tuple[Layout, int]]
    meeting: list[Node]


def plan(targets: Iterable[Value], asked_for: Iterable[Value], *, by_rows: bool = False) -> Plan:
    """Schedule the operations that compute full values.

    Args:
        targets: whole values.
        asked_for: values that tensors of the program show, and that may be used later.
        by_rows: do what is whole by rows where nothing reads it otherwise: saves memory, costs calls.

    Returns:
        The plan.
    """
    targets, asked_for = set(targets), set(asked_for)
    others = [value for value in asked_for if not value.there and value not in targets]
    # A running mean may be asked for before the samples that its statistics are for.
    everything = _ancestors([*targets, *others])
    cut = cut_to_rows(everything, targets | asked_for) if by_rows else {}
    nodes = _ancestors(targets) if by_rows or others else everything
    stage = _stages(nodes, {})
    later = {id(node) for node in _ancestors(others)} if others else set[int]()
    feeds = _feeding(everything)
    sweeps: dict[int, list[Node]] = {}
    wanted: dict[Value, set[int]] = {}
    coupling: dict[Value, set[int]] = {}  # stages in which a coupling operation reads a value
    kept: dict[Value, int] = {}
    moved = False
    for node in reversed(nodes):
        if node.once:
            continue
        if id(node) not in feeds:
            earliest = stage[node]
            stage[node] = _when_at_hand(node, earliest, wanted)
            moved |= stage[node] != earliest
        runs = _runs(node, stage, wanted, coupling, kept, id(node) in later)
        for number in runs:
            sweeps.setdefault(number, []).append(node)
        for value, layout in node.operands:
            if value.layout is not None and layout is not None and not value.there:
                wanted.setdefault(value, set()).update(runs)
                if id(node) in feeds:
                    coupling.setdefault(value, set()).add(stage[node])
    for found in sweeps.values():
        found.reverse()
    if moved:
        stage = _stages(nodes, stage)
    meeting = [node for node in nodes if id(node) in feeds]
    readers = [(node, _LATER if id(node) in later else 0) for node in everything]
    apart = {value: (layout, _last_reading(value, readers, sweeps)) for value, layout in cut.items()}
    return Plan(_once(nodes, stage), sweeps, stage, kept, apart, meeting)


def _last_reading(value: Value, readers: list[tuple[Node, int]], sweeps: dict[int, list[Node]]) -> int:
    """Return the last stage that reads a value by rows; `readers` come with the last stage of theirs."""
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


def _when_at_hand(node: Node, earliest: int, wanted: dict[Value, set[int]]) -> int:
    """Return the stage for a sum that no sample waits for, such as a loss: that of its inputs."""
    if node.layouts.count(None) < len(node.layouts):
        return earliest
    inputs = [v for v, layout in node.operands if v.layout is not None and layout is not None and not v.there]
    stages = [min(numbers) for v in inputs if (numbers := wanted.get(v))]
    return max([earliest, *stages])


def _ancestors(values: Iterable[Value]) -> list[Node]:
    """All operations that still have to run for the values, in the order of their recording."""
    found: dict[int, Node] = {}
    todo = [value.node for value in values if not value.there and value.node is not None]
    while todo:
        node = todo.pop()
        if node.serial in found:
            continue
        found[node.serial] = node
        todo += [v.node for v, _ in node.operands if not v.there and v.node is not None]
    return [found[serial] for serial in sorted(found)]


def _stages(nodes: list[Node], least: dict[Node, int]) -> dict[Node, int]:
    """The first stage in which each node can run, and not before that which it was given."""
    stage: dict[Node, int] = {}
    for node in nodes:
        number = 0 if node.once else least.get(node, 0)
        for value, _ in node.operands:
            if value.there or value.node is None:
                continue
            made = value.node
            waits = value.layout is None and not made.once
            number = max(number, stage[made] + waits)
        stage[node] = number
    return stage


def _feeding(nodes: list[Node]) -> set[int]:
    """Operations whose whole outputs flow back into samples."""
    fed: set[int] = set()  # whole values, by id, that something per micro-batch reads
    feeding: set[int] = set()
    for node in reversed(nodes):
        outputs = [output() for output in node.outputs]
        whole = any(value is not None and id(value) in fed for value in outputs)
        if whole and not node.once:
            feeding.add(id(node))
        if whole or not node.once:
            fed.update(id(value) for value, _ in node.operands if value.layout is None and not value.there)
    return feeding


def _runs(
    node: Node,
    stage: dict[Node, int],
    wanted: dict[Value, set[int]],
    coupling: dict[Value, set[int]],
    kept: dict[Value, int],
    later: bool,
) -> set[int]:
    """Return the stages in which a node runs, and decide which of its outputs are kept."""
    runs = {stage[node]} if None in node.layouts else set[int]()
    for output in node.outputs:
        value = output()
        if value is None or value.layout is None or not (stages := wanted.get(value)):
            continue
        first = min(stages)
        again = stages - {first}
        if later:
            again = again | {_LATER}
        met = first in coupling.get(value, ())
        if again and (met or len(again) > PATIENCE[node.light]) and not _at_hand(node):
            kept[value] = max(again)
            runs.add(first)
        else:
            runs |= stages
    return runs


def _at_hand(node: Node) -> bool:
    """Return whether the output is as quickly recomputed as read."""
    while node.view or node.light:
        batch = [value for value, layout in node.operands if layout is not None]
        if not batch:  # new, or of whole values alone
            return True
        if len(batch) != 1:
            return False
        value = batch[0]
        if value.there:
            return True
        if value.node is None or not node.view:
            return False
        node = value.node
    return False
