"""Grouping of consecutive instructions of a program into segments that are compiled.

Consecutive operations that depend only on their tensors and on the number of samples (`Node.known`) become
one segment. Operations that draw random numbers or read the micro-batch's position stay between segments.
The outputs of a segment are the registers that are read, stored, carried or reduced outside of it.
"""

from __future__ import annotations

from typing import Any

from ..ir.shard import Part
from .compiled import Member, Segment
from .instructions import Instruction, Load, SideEffects, filled

LEAST = 2  # operations that are no views: a single one has its own kernel already
MOST = 100  # a loop over time steps has thousands, and compile time grows faster than their number


def segmented(program: list[Instruction], registers: list[Any], *, elsewhere: bool) -> list[Instruction]:
    """Return an equivalent program with segments.

    Args:
        program: the instructions of a sweep.
        registers: initial registers; the ones that segments need are appended.
        elsewhere: rows may be in the host's memory and are copied to the device when they are read.
    """
    rewriting = _Rewriting(program, registers)
    for position, instruction in enumerate(program):
        rewriting.take(position, instruction, elsewhere=elsewhere)
    rewriting.close()
    return rewriting.program


class _Rewriting:
    def __init__(self, old: list[Instruction], registers: list[Any]) -> None:
        self.program: list[Instruction] = []
        self._registers = registers
        self._readers: dict[int, list[int]] = {}
        for position, instruction in enumerate(old):
            for slot in instruction.inputs:
                self._readers.setdefault(slot, []).append(position)
        self._open: dict[int, Instruction] = {}  # instructions of the segment in progress, by position
        self._made: set[int] = set()  # registers that it fills
        self._loads: dict[int, Load] = {}  # loads before it

    def take(self, position: int, instruction: Instruction, *, elsewhere: bool) -> None:
        """Add the next instruction to the open segment, or to the program."""
        loads = [] if instruction.more is None else instruction.more.loads
        if not instruction.known:
            self.close()
            self.program.append(instruction)
            return
        # A view of an input runs before the segment: compiled, it would keep the storage offset that the rows
        # of the first micro-batch had.
        if instruction.view and self._made.isdisjoint(instruction.inputs):
            self.program.append(self._before(instruction))
            return
        # A segment loads all of its inputs before it runs. Starting a new one here keeps no more copies of
        # rows on the device than single instructions would.
        if elsewhere and any(load.source.rows is not None for load in loads):
            self.close()
        self._open[position] = instruction
        self._made.update(filled(instruction))
        self._loads.update((load.slot, load) for load in loads)
        if len(self._open) == MOST:
            self.close()

    def _before(self, view: Instruction) -> Instruction:
        """Return a view with the loads that it takes over from the open segment."""
        taken = [self._loads.pop(slot) for slot in view.inputs if slot in self._loads]
        if not taken:
            return view
        more = view.more or SideEffects([], [(None, view.output)], [], None, [], [], [])
        return view.with_effects(more.loading([*taken, *more.loads]))

    def close(self) -> None:
        """Append the open instructions to the program, as a segment if there are enough of them."""
        members, loads = self._open, self._loads
        self._open, self._made, self._loads = {}, set(), {}
        if sum(not member.view for member in members.values()) < LEAST:
            self.program += [_loading(member, loads) for member in members.values()]
        elif members:
            self.program += self._segment(members, list(loads.values()))

    def _segment(self, members: dict[int, Instruction], loads: list[Load]) -> list[Instruction]:
        # Dicts as ordered sets: equal layers get equal register numbers, so they share one compiled function.
        made = dict.fromkeys(slot for member in members.values() for slot in filled(member))
        read = dict.fromkeys(slot for member in members.values() for slot in member.inputs)
        inputs = [slot for slot in read if slot not in made]
        local = {slot: index for index, slot in enumerate([*inputs, *made])}
        mores = [member.more for member in members.values() if member.more is not None]
        keeps = [keep for more in mores for keep in more.keeps]
        carries = [carry for more in mores for carry in more.carries]
        needed = {slot for slot, _ in [*keeps, *carries]}
        needed |= {slot for slot in made if any(p not in members for p in self._readers.get(slot, ()))}
        wanted = [slot for slot in made if slot in needed]
        last = max(members)
        # Full values outlive the micro-batch. Rows that are not read later are freed while the segment runs.
        early = [s for s in inputs if self._registers[s] is None and max(self._readers[s]) <= last]
        outputs: list[tuple[int | None, int]] = list(enumerate(wanted))
        reducing: list[Instruction] = []
        for more in mores:
            # A reduction accumulates over micro-batches, so it stays outside: one register holds its inputs
            # as a list.
            if more.reduction is not None:
                slot = len(self._registers)
                self._registers.append(None)
                outputs.append((len(outputs), slot))
                found = SideEffects([], [], list(range(len(more.reduced))), more.reduction, [], [], [])
                reducing.append(Instruction(_found, [slot], 0, found, []))
        steps = tuple(_member(member, local) for member in members.values())
        segment = Segment(steps, tuple(local[slot] for slot in wanted), len(local))
        more = SideEffects(loads, outputs, [], None, keeps, carries, early)
        return [Instruction(segment, inputs, 0, more, []), *reducing]


def _loading(instruction: Instruction, loads: dict[int, Load]) -> Instruction:
    """Return the instruction without the loads that a view before it has taken over."""
    more = instruction.more
    if more is None:
        return instruction
    return instruction.with_effects(more.loading([one for one in more.loads if one.slot in loads]))


def _member(instruction: Instruction, local: dict[int, int]) -> Member:
    more, inputs = instruction.more, tuple(local[slot] for slot in instruction.inputs)
    if more is None:
        return Member(instruction.run, inputs, ((None, local[instruction.output]),), ())
    outputs = tuple((index, local[slot]) for index, slot in more.outputs)
    return Member(instruction.run, inputs, outputs, () if more.reduction is None else tuple(more.reduced))


def _found(part: Part, tensors: list[Any]) -> Any:
    """Return the list of outputs of a segment that are reduced, from its register."""
    return tensors[0]
