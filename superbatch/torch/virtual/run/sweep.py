"""Execution of a plan on real tensors: the operations of each sweep, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from superbatch.errors import WindowError

from ..ir.conjugates import lazy_conjugation
from ..ir.readings import memory_of
from ..ir.shard import BatchSlice, Shard, cut
from ..ir.values import Node, Reduction, Value
from .carried import CarriedRows, worth_carrying
from .full_values import FullValues
from .generated import generated
from .instructions import Instruction, Load, SideEffects, output_registers
from .interpreter import Function, interpreted
from .log import Log
from .plan import Plan
from .prefetch import Prefetcher
from .store import RowStore, Store

GENERATE_FROM = 8  # micro-batches; generating a function costs the time that it saves in about six


def run(
    plan: Plan, microbatches: Sequence[BatchSlice], store: Store, log: Log, *, compile: bool = False
) -> None:
    """Execute a plan; its operations are removed as they run.

    Raises:
        WindowError: an input was written in place after an operation on it was recorded.
    """
    done: set[int] = set()  # serials, because a set of nodes would keep their inputs alive
    full_values = FullValues(store, log, len(microbatches))
    carried = CarriedRows(plan) if worth_carrying(plan, microbatches) else None
    last = {node.serial: number for number in sorted(plan.sweeps) for node in plan.sweeps[number]}
    # no_grad: autograd has recorded the virtual tensors. A graph of the real ones would keep all activations.
    with torch.no_grad(), lazy_conjugation():
        for number in sorted({*plan.once, *plan.sweeps}):
            # Popped, like the sweeps, because nodes in the plan would keep their inputs alive to the end.
            for node in plan.once.pop(number, ()):
                _run_once(node, full_values)
            nodes = plan.sweeps.pop(number, None)
            if nodes:
                repeated = sum(node.serial in done for node in nodes)
                ordinary = len(microbatches) - (carried is not None)
                _sweep(
                    nodes,
                    number,
                    plan,
                    microbatches,
                    store,
                    carried,
                    full_values,
                    first=not done,
                    compile=compile,
                )
                log.sweeps += 1
                log.run += len(nodes) * len(microbatches) - repeated * (len(microbatches) - ordinary)
                log.repeated += repeated * ordinary
                done.update(node.serial for node in nodes)
                _free_nodes(plan, [node for node in nodes if last[node.serial] == number])


def _free_nodes(plan: Plan, nodes: list[Node]) -> None:
    """Free operations after their last sweep, because they keep their inputs alive."""
    for node in nodes:
        del plan.stage[node]


def unchanged(value: Value) -> Tensor:
    """Return the tensor of a full value; raise `WindowError` if it was written since it was recorded."""
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
    results = node.run(BatchSlice(0, 0, 0), tensors)  # no micro-batch, because it reads full values only
    for value in _set_full(node, range(len(node.outputs)), (results,) if node.single else results):
        full_values.count_result(value, node, tensors)
    # `plan.stage` refers to the node, which would keep an N x N input alive to the end of the plan.
    node.operands, node.by_rows = (), None


def _set_full(node: Node, indices: Sequence[int], results: Sequence[Any]) -> list[Value]:
    values: list[Value] = []
    for index, result in zip(indices, results, strict=True):
        value = node.outputs[index]()
        if value is not None:
            # Without a reference to its node, earlier operations can be freed.
            value.full, value.node = result, None
            values.append(value)
    return values


class _SweepResults:
    """Results of a sweep: full values and stored rows."""

    def __init__(self, store: Store, full_values: FullValues) -> None:
        self._store, self._full_values = store, full_values
        self._reduced: dict[Node, tuple[Reduction, list[int]]] = {}
        self._row_stores: dict[Value, RowStore] = {}

    def reduction(self, node: Node, full: list[int]) -> Reduction:
        """Return the reduction of the full outputs of a node."""
        if node not in self._reduced:
            assert node.reduce is not None
            self._reduced[node] = node.reduce(), full
        return self._reduced[node][0]

    def row_store(self, value: Value) -> RowStore:
        """Return the storage of the rows of a value."""
        return self._row_stores.setdefault(value, RowStore(self._store))

    def set(self, plan: Plan, microbatches: Sequence[BatchSlice]) -> None:
        """Assign the results to their values after the last micro-batch."""
        # Not earlier, because a value with `rows` counts as materialized.
        for node, (reduction, full) in self._reduced.items():
            for value in _set_full(node, full, reduction.result()):
                if value in plan.read_by_rows and self._store.is_full(value.nbytes):
                    self._store_by_rows(value, plan.read_by_rows[value][0], microbatches)
                else:
                    self._full_values.count_result(value, node)
        for value, row_store in self._row_stores.items():
            value.rows, value.node = row_store, None

    def _store_by_rows(self, value: Value, shard: Shard, microbatches: Sequence[BatchSlice]) -> None:
        """Store a full result as rows of micro-batches."""
        row_store, tensor = RowStore(self._store), unchanged(value)
        for microbatch in microbatches:
            row_store.put(microbatch, cut(tensor, shard, microbatch))
        value.rows, value.full = row_store, None


def _sweep(
    nodes: list[Node],
    number: int,
    plan: Plan,
    microbatches: Sequence[BatchSlice],
    store: Store,
    carried: CarriedRows | None,
    full_values: FullValues,
    *,
    first: bool,
    compile: bool,
) -> None:
    results = _SweepResults(store, full_values)
    # Rows that no later sweep reads are freed after each micro-batch, to make room for new ones.
    read = [value.rows for value, until in plan.stored.items() if until == number]
    read += [value.rows for value, (_, until) in plan.read_by_rows.items() if until == number]
    dropped = [row_store for row_store in read if isinstance(row_store, RowStore)]
    programs = _programs(nodes, number, plan, microbatches, results, carried)
    if compile:  # most micro-batches share one program, so duplicates are removed
        for program in dict.fromkeys(program for _, program in programs):
            program.compile(rows_on_host=store.prefetcher is not None)
    if len(microbatches) >= GENERATE_FROM:  # the last program may be that of a single, carrying micro-batch
        programs[0][1].build(generated)
    if carried is not None and not first:
        # The carrying micro-batch runs first, so that its rows are freed before others need memory.
        programs.insert(0, programs.pop())
    for (microbatch, program), following in zip_longest(programs, programs[1:]):
        next_read = None if following is None else following[1].first_read(following[0])
        program.run(microbatch, store.prefetcher, next_read, carries=microbatch is microbatches[-1])
        for row_store in dropped:
            row_store.drop(microbatch)
    results.set(plan, microbatches)


def _programs(
    nodes: list[Node],
    number: int,
    plan: Plan,
    microbatches: Sequence[BatchSlice],
    results: _SweepResults,
    carried: CarriedRows | None,
) -> list[tuple[BatchSlice, _Program]]:
    """Return the program of each micro-batch; the one with carried rows runs new operations only."""
    if carried is None:
        program = _Program(nodes, number, plan, results, None)
        return [(microbatch, program) for microbatch in microbatches]
    new = [node for node in nodes if carried.first_sweep[node] == number]
    last = _Program(new, number, plan, results, carried)
    others = microbatches[:-1]
    # If all operations are new in this sweep, none reads carried rows, and one program serves all.
    same = last if len(new) == len(nodes) or not others else _Program(nodes, number, plan, results, None)
    return [*((microbatch, same) for microbatch in others), (microbatches[-1], last)]


class _Program:
    """Register program of one sweep, built once and run for each micro-batch."""

    def __init__(
        self, nodes: list[Node], number: int, plan: Plan, results: _SweepResults, carried: CarriedRows | None
    ) -> None:
        self._number, self._plan, self._results, self._carried = number, plan, results, carried
        self._slots: dict[tuple[int, Shard | None], int] = {}
        self._registers: list[Any] = []  # initial contents for each micro-batch
        self._read: list[Value] = []  # stored values in the order of their loads, to prefetch them
        self._program = [self._instruction(node) for node in nodes]
        self._free()
        self.build(interpreted)

    def build(self, builder: Callable[..., Function]) -> None:
        """Build the function that runs the instructions, with `interpreted` or `generated`."""
        carried = None if self._carried is None else self._carried.rows
        self._function = builder(self._program, self._registers, carried)

    def compile(self, *, rows_on_host: bool) -> None:
        """Replace consecutive operations by compiled segments; `rows_on_host` as in `segmented`."""
        from .segments import segmented  # loaded only for blocks that compile

        self._program = segmented(self._program, self._registers, rows_on_host=rows_on_host)
        self._free()
        self.build(interpreted)

    def _free(self) -> None:
        """Assign each instruction the registers to free, which no later instruction reads."""
        last: dict[int, int] = {}
        for position, instruction in enumerate(self._program):
            instruction.frees.clear()
            for slot in instruction.inputs:
                if self._registers[slot] is None:  # rows; the next micro-batch reads full values again
                    last[slot] = position
            for slot in output_registers(instruction):
                last[slot] = position
        for slot, position in last.items():
            self._program[position].frees.append(slot)

    def _instruction(self, node: Node) -> Instruction:
        loads: list[Load] = []
        inputs: list[int] = []
        for value, shard in node.operands:
            # By placement too, because an operation may read a full value in full and cut into rows.
            slot = self._slots.get((id(value), shard))
            if slot is None:
                slot = self._input(value, shard, loads)
            inputs.append(slot)
        outputs = self._outputs(node)
        # The common case has no side effects, and the interpreter runs it in one line.
        if node.single and outputs and not loads and not self._is_needed(outputs[0][2]):
            return Instruction(node.run, inputs, outputs[0][1], None, [], node.compilable, node.view)
        return Instruction(
            node.run, inputs, 0, self._side_effects(node, loads, outputs), [], node.compilable, node.view
        )

    def _is_needed(self, value: Value) -> bool:
        """Return whether the rows of a value are stored or carried."""
        return value in self._plan.stored or (self._carried is not None and value in self._carried.last_sweep)

    def _side_effects(
        self, node: Node, loads: list[Load], outputs: list[tuple[int | None, int, Value]]
    ) -> SideEffects:
        single = node.single
        full = [None if single else index for index, shard in enumerate(node.shards) if shard is None]
        reduction = None
        # A node that is recomputed for its rows must not reduce its full outputs a second time.
        if full and self._plan.stage[node] == self._number:
            reduction = self._results.reduction(node, [index or 0 for index in full])
        carried = () if self._carried is None else self._carried.last_sweep
        stores = [(slot, self._results.row_store(v)) for _, slot, v in outputs if v in self._plan.stored]
        carries = [(slot, value) for _, slot, value in outputs if value in carried]
        registers = [(index, slot) for index, slot, _ in outputs]
        return SideEffects(loads, registers, full, reduction, stores, carries, [])

    def _input(self, value: Value, shard: Shard | None, loads: list[Load]) -> int:
        """Return a new register for an input that the program does not compute."""
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
        """Return (index of the result, register, value) for each sharded result to compute."""
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

    def first_read(self, microbatch: BatchSlice) -> tuple[Value, BatchSlice] | None:
        """Return the stored rows that the program reads first; None if it reads none."""
        return (self._read[0], microbatch) if self._read else None

    def run(
        self,
        microbatch: BatchSlice,
        prefetcher: Prefetcher | None,
        next_read: tuple[Value, BatchSlice] | None,
        *,
        carries: bool,
    ) -> None:
        """Run the program for a micro-batch; with `carries`, its rows are carried to the next sweep.

        `prefetcher` copies rows to the device (None: shared memory), last `next_read` for the next program.
        """
        self._function(microbatch, self._rows, prefetcher, next_read, carries)

    def _rows(
        self,
        load: Load,
        microbatch: BatchSlice,
        prefetcher: Prefetcher | None,
        next_read: tuple[Value, BatchSlice] | None,
    ) -> Tensor:
        value = load.source
        if value.rows is not None:
            rows = value.rows.get(microbatch)
            if prefetcher is None:
                # Compared first, because `to` costs 1 us even without a copy.
                return rows if rows.device == value.device else rows.to(value.device)
            rows = prefetcher.fetch((value, microbatch), rows)
            last = load.position + 1 == len(self._read)
            # The last load of this program is followed by the first one of the next micro-batch.
            then = next_read if last else (self._read[load.position + 1], microbatch)
            if then is not None and then[0].rows is not None:
                prefetcher.begin(then, then[0].rows.get(then[1]))
            return rows
        if value.full is not None:
            return cut(unchanged(value), load.shard, microbatch)
        assert self._carried is not None, "a sweep reads only values that it or an earlier step computes"
        return self._carried.take(value, self._number)
