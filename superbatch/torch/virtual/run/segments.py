"""Segments of a program: groups of consecutive instructions to compile.

Consecutive operations that depend only on their tensors and on the number of samples (`Node.compilable`)
become one segment. Operations that draw random numbers or read the micro-batch's position stay between
segments. The outputs of a segment are the registers that are read, stored, carried or reduced outside of it.
"""

from __future__ import annotations

from typing import Any

from ..ir.shard import BatchSlice
from .compiled import Member, Segment
from .instructions import Instruction, Load, SideEffects, output_registers

LEAST = 2  # operations without views; a single one has its own kernel already
MOST = 100  # a loop over time steps has thousands, and compile time grows faster than linearly


def segmented(program: list[Instruction], registers: list[Any], *, rows_on_host: bool) -> list[Instruction]:
    """Return an equivalent program with segments; append their registers to the initial `registers`.

    With `rows_on_host`, rows may be in the host's memory, and are copied to the device when they are read.
    """
    rewriting = _SegmentBuilder(program, registers)
    for position, instruction in enumerate(program):
        rewriting.add(position, instruction, rows_on_host=rows_on_host)
    rewriting.close_segment()
    return rewriting.program


class _SegmentBuilder:
    def __init__(self, old: list[Instruction], registers: list[Any]) -> None:
        self.program: list[Instruction] = []
        self._registers = registers
        self._readers: dict[int, list[int]] = {}
        for position, instruction in enumerate(old):
            for slot in instruction.inputs:
                self._readers.setdefault(slot, []).append(position)
        self._open: dict[int, Instruction] = {}  # instructions of the segment in progress, by position
        self._made: set[int] = set()  # registers that the segment in progress fills
        self._loads: dict[int, Load] = {}  # loads before the segment in progress, by register

    def add(self, position: int, instruction: Instruction, *, rows_on_host: bool) -> None:
        """Add the next instruction to the open segment, or to the program."""
        loads = [] if instruction.effects is None else instruction.effects.loads
        if not instruction.compilable:
            self.close_segment()
            self.program.append(instruction)
            return
        # A view of an input runs before the segment: when compiled, it would have the storage offset of the
        # first micro-batch.
        if instruction.view and self._made.isdisjoint(instruction.inputs):
            self.program.append(self._before(instruction))
            return
        # A segment loads all its inputs before it runs. A new one begins here, so that no more copies of rows
        # are on the device than without segments.
        if rows_on_host and any(load.source.rows is not None for load in loads):
            self.close_segment()
        # A segment loads the rows of its members at its beginning, so the loads are collected.
        self._open[position] = instruction
        self._made.update(output_registers(instruction))
        self._loads.update((load.slot, load) for load in loads)
        if len(self._open) == MOST:
            self.close_segment()

    def _before(self, view: Instruction) -> Instruction:
        """Return a view with its loads, which are taken from the open segment."""
        taken = [self._loads.pop(slot) for slot in view.inputs if slot in self._loads]
        if not taken:
            return view
        effects = view.effects or SideEffects([], [(None, view.output)], [], None, [], [], [])
        return view.with_effects(effects.with_loads([*taken, *effects.loads]))

    def close_segment(self) -> None:
        """Append the open instructions to the program, as a segment if there are enough."""
        members, loads = self._open, self._loads
        self._open, self._made, self._loads = {}, set(), {}
        if sum(not member.view for member in members.values()) < LEAST:
            self.program += [_loading(member, loads) for member in members.values()]
        elif members:
            self.program += self._segment(members, list(loads.values()))

    def _segment(self, members: dict[int, Instruction], loads: list[Load]) -> list[Instruction]:
        # Dicts as ordered sets: equal layers get equal register numbers, and share a compiled function.
        made = dict.fromkeys(slot for member in members.values() for slot in output_registers(member))
        read = dict.fromkeys(slot for member in members.values() for slot in member.inputs)
        inputs = [slot for slot in read if slot not in made]
        local = {slot: index for index, slot in enumerate([*inputs, *made])}
        all_effects = [member.effects for member in members.values() if member.effects is not None]
        stores = [store for effects in all_effects for store in effects.stores]
        carries = [carry for effects in all_effects for carry in effects.carries]
        needed = {slot for slot, _ in [*stores, *carries]}
        needed |= {slot for slot in made if any(p not in members for p in self._readers.get(slot, ()))}
        wanted = [slot for slot in made if slot in needed]
        last = max(members)
        # Rows that are not read later are freed while the segment runs. Full values live on.
        early = [s for s in inputs if self._registers[s] is None and max(self._readers[s]) <= last]
        outputs: list[tuple[int | None, int]] = list(enumerate(wanted))
        reducing: list[Instruction] = []
        for effects in all_effects:
            # A reduction accumulates over micro-batches, so it stays outside of the segment. One register has
            # the list of its inputs.
            if effects.reduction is not None:
                slot = len(self._registers)
                self._registers.append(None)
                outputs.append((len(outputs), slot))
                reducing_effects = SideEffects(
                    [], [], list(range(len(effects.reduced))), effects.reduction, [], [], []
                )
                reducing.append(Instruction(_reduced_outputs, [slot], 0, reducing_effects, []))
        steps = tuple(_member(member, local) for member in members.values())
        segment = Segment(steps, tuple(local[slot] for slot in wanted), len(local))
        effects = SideEffects(loads, outputs, [], None, stores, carries, early)
        return [Instruction(segment, inputs, 0, effects, []), *reducing]


def _loading(instruction: Instruction, loads: dict[int, Load]) -> Instruction:
    """Return the instruction without the loads that a view before it has taken."""
    effects = instruction.effects
    if effects is None:
        return instruction
    return instruction.with_effects(effects.with_loads([one for one in effects.loads if one.slot in loads]))


def _member(instruction: Instruction, local: dict[int, int]) -> Member:
    effects, inputs = instruction.effects, tuple(local[slot] for slot in instruction.inputs)
    if effects is None:
        return Member(instruction.run, inputs, ((None, local[instruction.output]),), ())
    outputs = tuple((index, local[slot]) for index, slot in effects.outputs)
    return Member(
        instruction.run, inputs, outputs, () if effects.reduction is None else tuple(effects.reduced)
    )


def _reduced_outputs(microbatch: BatchSlice, tensors: list[Any]) -> Any:
    """Return the list of a segment's outputs to reduce, from its register."""
    return tensors[0]
