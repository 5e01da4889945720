"""Execution of a plan: the operations of each sweep, micro-batch by micro-batch, on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from superbatch.errors import WindowError

from ..ir.conjugates import conjugates_seen
from ..ir.readings import memory_of
from ..ir.shard import Part, Shard, cut
from ..ir.values import Node, Reduction, Value
from .carried import CarriedRows, worth_carrying
from .full_values import FullValues
from .generated import generated
from .instructions import Instruction, Load, SideEffects, filled
from .interpreter import Function, interpreted
from .log import Log
from .plan import Plan
from .prefetch import Prefetcher
from .store import RowStore, Store

WORTH_WRITING = 8  # micro-batches: generating a function costs what it saves in about six of them


def run(plan: Plan, parts: Sequence[Part], store: Store, log: Log, *, compile: bool = False) -> None:
    """Execute a plan.

    Args:
        plan: the schedule; it is consumed.
        parts: the micro-batches.
        store: storage of rows.
        log: receives the numbers of operations and sweeps.
        compile: compile consecutive operations.

    Raises:
        WindowError: an input was written in place after an operation on it was recorded.
    """
    done: set[int] = set()  # serials, not nodes: a set of nodes would keep their inputs alive
    full_values = FullValues(store, log, len(parts))
    carried = CarriedRows(plan) if worth_carrying(plan, parts) else None
    last = {node.serial: number for number in sorted(plan.sweeps) for node in plan.sweeps[number]}
    # no_grad: autograd recorded the virtual tensors; a graph of the real ones would keep all activations.
    with torch.no_grad(), conjugates_seen():
        for number in sorted({*plan.once, *plan.sweeps}):
            # Popped, as are the sweeps: the plan would hold nodes, and these their inputs, to the end.
            for node in plan.once.pop(number, ()):
                _run_once(node, full_values)
            nodes = plan.sweeps.pop(number, None)
            if nodes:
                again = sum(node.serial in done for node in nodes)
                ordinary = len(parts) - (carried is not None)
                _sweep(
                    nodes, number, plan, parts, store, carried, full_values, first=not done, compile=compile
                )
                log.sweeps += 1
                log.run += len(nodes) * len(parts) - again * (len(parts) - ordinary)
                log.repeated += again * ordinary
                done.update(node.serial for node in nodes)
                _forget(plan, [node for node in nodes if last[node.serial] == number])


def _forget(plan: Plan, nodes: list[Node]) -> None:
    """Free operations after their last sweep: they hold their inputs, e.g. all embeddings."""
    for node in nodes:
        del plan.stage[node]


def unchanged(value: Value) -> Tensor:
    """Return the tensor of a full value.

    Raises:
        WindowError: the program has written it since the operation on it was recorded.
    """
    tensor = value.full
    assert tensor is not None
    if value.source is not None and _is_written(*value.source, tensor):
        raise WindowError(
            f"A tensor of shape {tuple(tensor.shape)} was written in place after an operation of the virtual "
            "batch had read it. Write into parameters and buffers after the block, or write into a clone."
        )
    return tensor


def _is_written(source: Tensor, version: int, memory: Tensor) -> bool:
    """Return whether the memory of a tensor was written, rather than replaced by `.data = ...`."""
    return source._version != version and memory_of(source) == memory_of(memory)


def _run_once(node: Node, full_values: FullValues) -> None:
    tensors = [unchanged(value) for value, _ in node.operands]
    results = node.run(Part(0, 0, 0), tensors)  # no micro-batch: it reads full values only
    for value in _set_full(node, range(len(node.outputs)), (results,) if node.single else results):
        full_values.hold(value, node, tensors)
    # It never runs again, but `plan.stage` holds it: an N x N input would live to the end of the plan.
    node.operands, node.by_rows = (), None


def _set_full(node: Node, indices: Sequence[int], results: Sequence[Any]) -> list[Value]:
    found: list[Value] = []
    for index, result in zip(indices, results, strict=True):
        value = node.outputs[index]()
        if value is not None:
            # Without its node the value frees the graph behind it.
            value.full, value.node = result, None
            found.append(value)
    return found


class _Results:
    """Results of a sweep: full values and stored rows."""

    def __init__(self, store: Store, full_values: FullValues) -> None:
        self._store, self._full_values = store, full_values
        self._reduced: dict[Node, tuple[Reduction, list[int]]] = {}
        self._kept: dict[Value, RowStore] = {}

    def reduction(self, node: Node, full: list[int]) -> Reduction:
        """Return the reduction of the full outputs of a node."""
        if node not in self._reduced:
            assert node.reduce is not None
            self._reduced[node] = node.reduce(), full
        return self._reduced[node][0]

    def kept(self, value: Value) -> RowStore:
        """Return the storage of the rows of a value."""
        return self._kept.setdefault(value, RowStore(self._store))

    def set(self, plan: Plan, parts: Sequence[Part]) -> None:
        """Assign the results to their values after the last micro-batch."""
        # Not before: a value with `rows` counts as materialized, though rows are missing.
        for node, (reduction, full) in self._reduced.items():
            for value in _set_full(node, full, reduction.result()):
                if value in plan.apart and self._store.is_full(value.nbytes):
                    self._put_apart(value, plan.apart[value][0], parts)
                else:
                    self._full_values.hold(value, node)
        for value, kept in self._kept.items():
            value.rows, value.node = kept, None

    def _put_apart(self, value: Value, shard: Shard, parts: Sequence[Part]) -> None:
        """Store a full result by its rows."""
        kept, tensor = RowStore(self._store), unchanged(value)
        for part in parts:
            kept.put(part, cut(tensor, shard, part))
        value.rows, value.full = kept, None


def _sweep(
    nodes: list[Node],
    number: int,
    plan: Plan,
    parts: Sequence[Part],
    store: Store,
    carried: CarriedRows | None,
    full_values: FullValues,
    *,
    first: bool,
    compile: bool,
) -> None:
    results = _Results(store, full_values)
    # Rows that no later sweep reads are freed after each micro-batch, to make room for those of this sweep.
    read = [value.rows for value, until in plan.kept.items() if until == number]
    read += [value.rows for value, (_, until) in plan.apart.items() if until == number]
    dropped = [kept for kept in read if isinstance(kept, RowStore)]
    programs = _programs(nodes, number, plan, parts, results, carried)
    if compile:  # dict.fromkeys: most micro-batches share one program
        for program in dict.fromkeys(program for _, program in programs):
            program.compile(elsewhere=store.ahead is not None)
    if len(parts) >= WORTH_WRITING:  # the program of a carrying micro-batch, the last, runs only once
        programs[0][1].make(generated)
    if carried is not None and not first:
        # The carrying micro-batch runs first, so that its rows are freed before the others need memory.
        programs.insert(0, programs.pop())
    for (part, program), following in zip_longest(programs, programs[1:]):
        then = None if following is None else following[1].first_read(following[0])
        program.run(part, store.ahead, then, carries=part is parts[-1])
        for kept in dropped:
            kept.drop(part)
    results.set(plan, parts)


def _programs(
    nodes: list[Node],
    number: int,
    plan: Plan,
    parts: Sequence[Part],
    results: _Results,
    carried: CarriedRows | None,
) -> list[tuple[Part, _Program]]:
    """Return the program of each micro-batch; the one that carries rows runs only new operations."""
    if carried is None:
        program = _Program(nodes, number, plan, results, None)
        return [(part, program) for part in parts]
    new = [node for node in nodes if carried.first[node] == number]
    last = _Program(new, number, plan, results, carried)
    others = parts[:-1]
    # If every operation is new in this sweep, none reads carried rows, and one program serves all.
    same = last if len(new) == len(nodes) or not others else _Program(nodes, number, plan, results, None)
    return [*((part, same) for part in others), (parts[-1], last)]


class _Program:
    """Register program of one sweep, built once and run for each micro-batch."""

    def __init__(
        self, nodes: list[Node], number: int, plan: Plan, results: _Results, carried: CarriedRows | None
    ) -> None:
        self._number, self._plan, self._results, self._carried = number, plan, results, carried
        self._slots: dict[tuple[int, Shard | None], int] = {}
        self._registers: list[Any] = []  # initial contents, the same for each micro-batch
        self._read: list[Value] = []  # stored values in the order of their loads, for the prefetch
        self._program = [self._instruction(node) for node in nodes]
        self._free()
        self.make(interpreted)

    def make(self, how: Callable[..., Function]) -> None:
        """Build the function that runs the instructions, after their last change.

        Args:
            how: `interpreted` or `generated`.
        """
        carried = None if self._carried is None else self._carried.rows
        self._function = how(self._program, self._registers, carried)

    def compile(self, *, elsewhere: bool) -> None:
        """Replace consecutive operations by compiled segments.

        Args:
            elsewhere: rows may be in the host's memory.
        """
        from .segments import segmented  # here: a block that does not compile does not load it

        self._program = segmented(self._program, self._registers, elsewhere=elsewhere)
        self._free()
        self.make(interpreted)

    def _free(self) -> None:
        """Assign each instruction the registers to free: those that nothing reads after it."""
        last: dict[int, int] = {}
        for position, instruction in enumerate(self._program):
            instruction.frees.clear()
            for slot in instruction.inputs:
                if self._registers[slot] is None:  # rows; full values stay for the next micro-batch
                    last[slot] = position
            for slot in filled(instruction):
                last[slot] = position
        for slot, position in last.items():
            self._program[position].frees.append(slot)

    def _instruction(self, node: Node) -> Instruction:
        loads: list[Load] = []
        inputs: list[int] = []
        for value, shard in node.operands:
            # By sharding too: an operation may read a full value both cut into rows and in full.
            slot = self._slots.get((id(value), shard))
            if slot is None:
                slot = self._input(value, shard, loads)
            inputs.append(slot)
        outputs = self._outputs(node)
        if node.single and outputs and not loads and not self._is_needed(outputs[0][2]):
            return Instruction(node.run, inputs, outputs[0][1], None, [], node.known, node.view)
        return Instruction(node.run, inputs, 0, self._more(node, loads, outputs), [], node.known, node.view)

    def _is_needed(self, value: Value) -> bool:
        """Return whether the rows of a value are stored or carried."""
        return value in self._plan.kept or (self._carried is not None and value in self._carried.until)

    def _more(
        self, node: Node, loads: list[Load], outputs: list[tuple[int | None, int, Value]]
    ) -> SideEffects:
        single = node.single
        full = [None if single else index for index, shard in enumerate(node.shards) if shard is None]
        reduction = None
        # A node that a later sweep recomputes for its rows must not reduce its full outputs a second time.
        if full and self._plan.stage[node] == self._number:
            reduction = self._results.reduction(node, [index or 0 for index in full])
        carried = () if self._carried is None else self._carried.until
        keeps = [(slot, self._results.kept(v)) for _, slot, v in outputs if v in self._plan.kept]
        carries = [(slot, value) for _, slot, value in outputs if value in carried]
        registers = [(index, slot) for index, slot, _ in outputs]
        return SideEffects(loads, registers, full, reduction, keeps, carries, [])

    def _input(self, value: Value, shard: Shard | None, loads: list[Load]) -> int:
        """Return a new register for an input that no instruction of the program computes."""
        slot = self._slots[id(value), shard] = len(self._registers)
        if shard is None:
            self._registers.append(unchanged(value))
            return slot
        self._registers.append(None)
        loads.append(Load(slot, value, shard, len(self._read)))
        if value.rows is not None:
            self._read.append(value)
        return slot

    def _outputs(self, node: Node) -> list[tuple[int | None, int, Value]]:
        """Return (index of the result, register, value) for each result that is sharded."""
        outputs: list[tuple[int | None, int, Value]] = []
        single = node.single
        for index, shard in enumerate(node.shards):
            value = None if shard is None else node.outputs[index]()
            if value is None or value.materialized:  # freed, or stored by an earlier sweep
                continue
            slot = self._slots[id(value), shard] = len(self._registers)
            self._registers.append(None)
            outputs.append((None if single else index, slot, value))
        return outputs

    def first_read(self, part: Part) -> tuple[Value, Part] | None:
        """Return the stored rows that the program reads first; None if it reads none."""
        return (self._read[0], part) if self._read else None

    def run(
        self, part: Part, ahead: Prefetcher | None, following: tuple[Value, Part] | None, *, carries: bool
    ) -> None:
        """Run the program for a micro-batch.

        Args:
            part: the micro-batch.
            ahead: prefetcher; None on a device that shares the host's memory.
            following: the rows that the next program reads first.
            carries: this micro-batch carries rows to the next sweep.
        """
        self._function(part, self._rows, ahead, following, carries)

    def _rows(
        self, load: Load, part: Part, ahead: Prefetcher | None, following: tuple[Value, Part] | None
    ) -> Tensor:
        value = load.source
        if value.rows is not None:
            rows = value.rows.get(part)
            if ahead is None:
                # Compared first: `to` costs 1 us even without a copy.
                return rows if rows.device == value.device else rows.to(value.device)
            rows = ahead.fetch((value, part), rows)
            last = load.place + 1 == len(self._read)
            # After the last load of this program comes the first one of the next micro-batch.
            then = following if last else (self._read[load.place + 1], part)
            if then is not None and then[0].rows is not None:
                ahead.begin(then, then[0].rows.get(then[1]))
            return rows
        if value.full is not None:
            return cut(unchanged(value), load.shard, part)
        assert self._carried is not None, "a sweep reads only values that it or an earlier step computes"
        return self._carried.take(value, self._number)
