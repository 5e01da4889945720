"""Run a plan: for each micro-batch the operations of a sweep, in order, on real tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import WindowError, explain
from .layout import Layout, Part, cut
from .log import Log
from .plan import Plan
from .store import Kept, Store
from .values import Node, Operand, Reduction, Run, Value


def run(plan: Plan, parts: Sequence[Part], store: Store, log: Log) -> None:
    """Work through a plan.

    Args:
        plan: what to run.
        parts: the micro-batches.
        store: where results are kept.
        log: is told what was done.

    Raises:
        WindowError: a tensor that was used has been written since.
    """
    done: set[Node] = set()
    with torch.no_grad():
        for number in sorted({*plan.once, *plan.sweeps}):
            for node in plan.once.get(number, ()):
                _run_once(node)
            nodes = plan.sweeps.pop(number, None)
            if nodes:
                _Sweep(nodes, number, plan, store).run(parts)
                log.sweeps += 1
                log.run += len(nodes) * len(parts)
                log.repeated += sum(node in done for node in nodes) * len(parts)
                done.update(nodes)


def unchanged(value: Value) -> Tensor:
    """Return the tensor of a whole value.

    Raises:
        WindowError: it has been written since it was used.
    """
    tensor = value.whole
    assert tensor is not None
    if value.version is not None and tensor._version != value.version:
        raise WindowError(
            explain(
                f"a tensor of shape {tuple(tensor.shape)} that was written in place",
                "what was computed from it before is worked out only when it is needed, and would be another",
                "change parameters and buffers after the block, or use a copy of what is written",
            )
        )
    return tensor


def _run_once(node: Node) -> None:
    tensors = [unchanged(value) for value, _ in node.operands]
    results = node.run(Part(0, 0, 0), tensors)
    _set_whole(node, range(len(node.outputs)), results if len(node.outputs) > 1 else (results,))


def _set_whole(node: Node, indices: Sequence[int], results: Sequence[Any]) -> None:
    for index, result in zip(indices, results, strict=True):
        value = node.outputs[index]()
        if value is not None:
            value.whole, value.node = result, None


class _Load(NamedTuple):
    """What is read before an operation, because it is its first reader."""

    slot: int
    source: Value
    layout: Layout  # of the rows


class _Instruction(NamedTuple):
    run: Run
    loads: list[_Load]
    inputs: list[int]
    single: bool  # it returns one result, and not a sequence
    outputs: list[tuple[int, int]]  # which result into which register
    whole: list[int]  # which results are reduced
    reduction: Reduction | None
    keeps: list[tuple[int, Kept]]
    frees: list[int]  # registers that nothing reads after it


class _Sweep:
    """The operations of one sweep as a program with registers, made once and run for each micro-batch."""

    def __init__(self, nodes: list[Node], number: int, plan: Plan, store: Store) -> None:
        self._number, self._plan, self._store = number, plan, store
        self._slots: dict[tuple[int, Layout | None], int] = {}
        self._registers: list[Any] = []  # as they are before each micro-batch
        self._last_reader: dict[int, int] = {}
        self._kept: dict[Value, Kept] = {}
        self._dropped: list[Kept] = []
        self._reduced: list[tuple[Node, Reduction, list[int]]] = []
        self._program = [self._instruction(node, position) for position, node in enumerate(nodes)]
        for slot, position in self._last_reader.items():
            self._program[position].frees.append(slot)

    def _slot(self, value: Value, layout: Layout | None) -> tuple[int, bool]:
        """Return the register of a value, and whether it is a new one."""
        key = (id(value), layout)
        slot = self._slots.get(key)
        if slot is not None:
            return slot, False
        slot = self._slots[key] = len(self._registers)
        self._registers.append(None)
        return slot, True

    def _instruction(self, node: Node, position: int) -> _Instruction:
        loads: list[_Load] = []
        inputs = [self._input(operand, position, loads) for operand in node.operands]
        outputs, keeps = self._outputs(node, position)
        whole = [index for index, layout in enumerate(node.layouts) if layout is None]
        reduction = None
        if whole and self._plan.stage[node] == self._number:
            assert node.reduce is not None
            reduction = node.reduce()
            self._reduced.append((node, reduction, whole))
        single = len(node.layouts) == 1
        return _Instruction(node.run, loads, inputs, single, outputs, whole, reduction, keeps, [])

    def _input(self, operand: Operand, position: int, loads: list[_Load]) -> int:
        value, layout = operand
        slot, new = self._slot(value, layout)
        if layout is None:
            self._registers[slot] = unchanged(value)
            return slot
        if new:
            assert value.there, "what a sweep reads is worked out before it, or in it"
            loads.append(_Load(slot, value, layout))
            if isinstance(value.pieces, Kept) and self._plan.kept.get(value) == self._number:
                self._dropped.append(value.pieces)
        self._last_reader[slot] = position
        return slot

    def _outputs(self, node: Node, position: int) -> tuple[list[tuple[int, int]], list[tuple[int, Kept]]]:
        outputs: list[tuple[int, int]] = []
        keeps: list[tuple[int, Kept]] = []
        for index, (output, layout) in enumerate(zip(node.outputs, node.layouts, strict=True)):
            value = output()
            if layout is None or value is None or value.there:
                continue
            slot, _ = self._slot(value, layout)
            self._last_reader[slot] = position
            outputs.append((index, slot))
            if value in self._plan.kept:
                self._kept[value] = Kept(self._store)
                keeps.append((slot, self._kept[value]))
        return outputs, keeps

    def run(self, parts: Sequence[Part]) -> None:
        """Run the program for each micro-batch, and set what comes of it."""
        for part in parts:
            self._run(part)
        for node, reduction, whole in self._reduced:
            _set_whole(node, whole, reduction.result())
        for value, kept in self._kept.items():
            value.pieces, value.node = kept, None

    def _run(self, part: Part) -> None:
        registers = self._registers.copy()
        for run, loads, inputs, single, outputs, whole, reduction, keeps, frees in self._program:
            for slot, source, layout in loads:
                registers[slot] = _rows(source, layout, part)
            result = run(part, [registers[slot] for slot in inputs])
            results = (result,) if single else result
            for index, slot in outputs:
                registers[slot] = results[index]
            if reduction is not None:
                reduction.add(part, [results[index] for index in whole])
            del result, results  # else they would live until the next operation has run
            for slot, kept in keeps:
                kept.put(part, registers[slot])
            for slot in frees:
                registers[slot] = None
        for kept in self._dropped:
            kept.drop(part)


def _rows(value: Value, layout: Layout, part: Part) -> Tensor:
    if value.pieces is not None:
        return value.pieces.get(part)
    return cut(unchanged(value), layout, part)
