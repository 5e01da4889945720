"""Operations of a program that follow each other, put together into segments that are compiled.

A program is rewritten once it is made. Operations in a row whose functions read nothing but their tensors
and the number of samples (`Node.known`) become one *segment* (`compiled.Segment`). Whatever draws random
numbers or asks for the place of a micro-batch stays what it is, between segments. What a segment gives is
what is read, kept, carried or reduced outside of it; all else is gone when it has run.

A view of what a segment reads is made before it: compiled, it would remember where in their memory the rows
of the first micro-batch were.
"""

from __future__ import annotations

from typing import Any

from ..ir.layout import Part
from .compiled import Member, Segment
from .instructions import Instruction, Load, SideEffects, filled

LEAST = 2  # operations that are no views: one alone has a kernel already
MOST = 100  # a loop over time has thousands, and compiling takes longer than in proportion


def segmented(program: list[Instruction], registers: list[Any], *, elsewhere: bool) -> list[Instruction]:
    """Return a program that does the same in segments.

    Args:
        program: of a sweep.
        registers: as they are before it; those that segments need are added.
        elsewhere: rows may lie in other memory and are copied when they are read. A segment begins with them
            then, so that not more of them are here at a time than without segments.
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
        self._open: dict[int, Instruction] = {}  # what the next segment is made of, by position
        self._made: set[int] = set()  # registers that it fills
        self._loads: dict[int, Load] = {}  # that it begins with

    def take(self, position: int, instruction: Instruction, *, elsewhere: bool) -> None:
        """Put the next instruction where it belongs."""
        loads = [] if instruction.more is None else instruction.more.loads
        if not instruction.known:
            self.close()
            self.program.append(instruction)
            return
        if instruction.view and self._made.isdisjoint(instruction.inputs):
            self.program.append(self._before(instruction))
            return
        if elsewhere and any(load.source.pieces is not None for load in loads):
            self.close()
        self._open[position] = instruction
        self._made.update(filled(instruction))
        self._loads.update((load.slot, load) for load in loads)
        if len(self._open) == MOST:
            self.close()

    def _before(self, view: Instruction) -> Instruction:
        """The view, which reads now what the segment was to be the first to read."""
        taken = [self._loads.pop(slot) for slot in view.inputs if slot in self._loads]
        if not taken:
            return view
        more = view.more or SideEffects([], [(None, view.output)], [], None, [], [], [])
        return view.with_effects(more.loading([*taken, *more.loads]))

    def close(self) -> None:
        """Put what is open into the program: as a segment, if that is worth it."""
        members, loads = self._open, self._loads
        self._open, self._made, self._loads = {}, set(), {}
        if sum(not member.view for member in members.values()) < LEAST:
            self.program += [_loading(member, loads) for member in members.values()]
        elif members:
            self.program += self._segment(members, list(loads.values()))

    def _segment(self, members: dict[int, Instruction], loads: list[Load]) -> list[Instruction]:
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
        # What is there before the program has no end; the rest may go while the segment runs.
        early = [s for s in inputs if self._registers[s] is None and max(self._readers[s]) <= last]
        outputs: list[tuple[int | None, int]] = list(enumerate(wanted))
        reducing: list[Instruction] = []
        for more in mores:
            if more.reduction is not None:
                slot = len(self._registers)
                self._registers.append(None)
                outputs.append((len(outputs), slot))
                found = SideEffects([], [], list(range(len(more.whole))), more.reduction, [], [], [])
                reducing.append(Instruction(_found, [slot], 0, found, []))
        steps = tuple(_member(member, local) for member in members.values())
        segment = Segment(steps, tuple(local[slot] for slot in wanted), len(local))
        more = SideEffects(loads, outputs, [], None, keeps, carries, early)
        return [Instruction(segment, inputs, 0, more, []), *reducing]


def _loading(instruction: Instruction, loads: dict[int, Load]) -> Instruction:
    """The instruction without those of its loads that a view before it has taken over."""
    more = instruction.more
    if more is None:
        return instruction
    return instruction.with_effects(more.loading([one for one in more.loads if one.slot in loads]))


def _member(instruction: Instruction, local: dict[int, int]) -> Member:
    more, inputs = instruction.more, tuple(local[slot] for slot in instruction.inputs)
    if more is None:
        return Member(instruction.run, inputs, ((None, local[instruction.output]),), ())
    outputs = tuple((index, local[slot]) for index, slot in more.outputs)
    return Member(instruction.run, inputs, outputs, () if more.reduction is None else tuple(more.whole))


def _found(part: Part, tensors: list[Any]) -> Any:
    """Return the outputs of a segment that are reduced."""
    return tensors[0]
