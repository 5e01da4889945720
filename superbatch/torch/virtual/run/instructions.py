"""Instructions of the register program that a sweep runs for each micro-batch."""

from __future__ import annotations

from typing import NamedTuple

from ..ir.shard import Shard
from ..ir.values import Reduction, Run, Value
from .store import RowStore


class Load(NamedTuple):
    """Load of the rows of a value into a register, before the first instruction that reads it."""

    slot: int
    source: Value
    shard: Shard  # cuts the rows of the micro-batch
    place: int  # index among the stored values that the program reads, for the prefetch of the next one


class SideEffects(NamedTuple):
    """Effects of an instruction other than filling one register.

    Attributes:
        loads: loads before it runs.
        outputs: (index of the result, register); index None: the only result.
        reduced: indices of the results that are reduced.
        reduction: the reduction of these; None without.
        keeps: registers whose rows are stored for later sweeps.
        carries: registers whose rows the last micro-batch carries to the next sweep.
        early: registers that nothing else reads: the instruction frees them while it runs.
    """

    loads: list[Load]
    outputs: list[tuple[int | None, int]]
    reduced: list[int | None]
    reduction: Reduction | None
    keeps: list[tuple[int, RowStore]]
    carries: list[tuple[int, Value]]
    early: list[int]

    def loading(self, loads: list[Load]) -> SideEffects:
        """Return the side effects with other loads."""
        return self._replace(loads=loads)


# A tuple and not a dataclass: the interpreter unpacks it in one step.
class Instruction(NamedTuple):
    """Instruction: one operation on registers.

    Attributes:
        run: as in `Node`.
        inputs: registers that it reads.
        output: register of its only result, without side effects.
        more: side effects; None for most instructions, which the interpreter then runs in one line.
        frees: registers that nothing reads after it.
        known: as in `Node`.
        view: as in `Node`.
    """

    run: Run
    inputs: list[int]
    output: int
    more: SideEffects | None
    frees: list[int]
    known: bool = False
    view: bool = False

    def with_effects(self, more: SideEffects) -> Instruction:
        """Return the instruction with other side effects."""
        return self._replace(more=more)


# `output` counts only without side effects, which list their own registers.
def filled(instruction: Instruction) -> list[int]:
    """Return the registers that an instruction fills."""
    more = instruction.more
    return [instruction.output] if more is None else [slot for _, slot in more.outputs]
