"""Program with registers, which a sweep runs for each micro-batch."""

from __future__ import annotations

from typing import NamedTuple

from ..ir.layout import Layout
from ..ir.values import Reduction, Run, Value
from .store import RowStore


class Load(NamedTuple):
    """Load of a register before the first operation that reads it."""

    slot: int
    source: Value
    layout: Layout  # of the rows
    place: int  # in what the program reads


class SideEffects(NamedTuple):
    """Side effects of an instruction, beside filling one register.

    Attributes:
        loads: what it is the first to read.
        outputs: which result (None: the only one) into which register.
        whole: which results are reduced.
        reduction: how they are reduced; None if there are none.
        keeps: registers whose rows are kept.
        carries: registers that the last micro-batch hands to the next sweep.
        early: registers that only the instruction itself needs: it frees them while it runs.
    """

    loads: list[Load]
    outputs: list[tuple[int | None, int]]
    whole: list[int | None]
    reduction: Reduction | None
    keeps: list[tuple[int, RowStore]]
    carries: list[tuple[int, Value]]
    early: list[int]

    def loading(self, loads: list[Load]) -> SideEffects:
        """Return the same side effects with other loads."""
        return self._replace(loads=loads)


class Instruction(NamedTuple):
    """One step.

    Attributes:
        run: as in `Node`.
        inputs: the registers it is given.
        output: the register of the result, if it does nothing more.
        more: what else it does.
        frees: registers that nothing reads after it.
        known: as in `Node`.
        view: likewise.
    """

    run: Run
    inputs: list[int]
    output: int
    more: SideEffects | None
    frees: list[int]
    known: bool = False
    view: bool = False

    def with_effects(self, more: SideEffects) -> Instruction:
        """Return the same instruction with other side effects."""
        return self._replace(more=more)


def filled(instruction: Instruction) -> list[int]:
    """Return the registers that an instruction fills."""
    more = instruction.more
    return [instruction.output] if more is None else [slot for _, slot in more.outputs]
