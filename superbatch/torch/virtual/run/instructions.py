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
    position: int  # index among the stored values that the program reads, to prefetch the next one


class SideEffects(NamedTuple):
    """Effects of an instruction other than filling one register.

    Attributes:
        loads: loads to execute before the instruction.
        outputs: (index of the result, register); index None: the only result.
        reduced: indices of the results to reduce.
        reduction: reduction of these results; None if there are none.
        stores: registers whose rows are stored for later sweeps.
        carries: registers whose rows the last micro-batch carries to the next sweep.
        early: registers that the instruction itself frees while it runs, because it reads them last.
    """

    loads: list[Load]
    outputs: list[tuple[int | None, int]]
    reduced: list[int | None]
    reduction: Reduction | None
    stores: list[tuple[int, RowStore]]
    carries: list[tuple[int, Value]]
    early: list[int]

    def with_loads(self, loads: list[Load]) -> SideEffects:
        """Return the side effects with other loads."""
        return self._replace(loads=loads)


# A tuple, because the interpreter unpacks it in one step.
class Instruction(NamedTuple):
    """Operation on registers.

    Attributes:
        run, compilable, view: as in `Node`.
        inputs: registers that it reads.
        output: register of the only result; not used with side effects, which have their own registers.
        effects: side effects; None for most instructions, which the interpreter runs in one line.
        frees: registers that no later instruction reads.
    """

    run: Run
    inputs: list[int]
    output: int
    effects: SideEffects | None
    frees: list[int]
    compilable: bool = False
    view: bool = False

    def with_effects(self, effects: SideEffects) -> Instruction:
        """Return the instruction with other side effects."""
        return self._replace(effects=effects)


def output_registers(instruction: Instruction) -> list[int]:
    """Return the registers that an instruction fills."""
    effects = instruction.effects
    return [instruction.output] if effects is None else [slot for _, slot in effects.outputs]
