"""A sweep's program, executed one instruction after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..ir.layout import Part
from .instructions import Instruction, SideEffects

# (part, rows, ahead, following, carries); `rows` reads what a `Load` says. It is handed over in each call: a
# function that held it would hold the program that holds the function, and whole tensors until a collection.
Function = Callable[..., None]


def interpreted(program: Sequence[Instruction], registers: Sequence[Any], carried: Any) -> Function:
    """Return a function that runs a program for a micro-batch.

    Args:
        program: of a sweep.
        registers: as they are before it.
        carried: rows that the last micro-batch hands to the next sweep, by value; None if it does not.
    """
    before = list(registers)

    def function(part: Part, rows: Callable[..., Any], ahead: Any, following: Any, carries: bool) -> None:
        registers = before.copy()
        for run, inputs, output, more, frees, _, _ in program:
            if more is None:
                registers[output] = run(part, [registers[slot] for slot in inputs])
            else:
                for load in more.loads:
                    registers[load.slot] = rows(load, part, ahead, following)
                tensors = [registers[slot] for slot in inputs]
                for slot in more.early:
                    registers[slot] = None
                _finish(more, run(part, tensors), part, registers, carried if carries else None)
                del tensors
            for slot in frees:
                registers[slot] = None

    return function


def _finish(more: SideEffects, result: Any, part: Part, registers: list[Any], carried: Any) -> None:
    """Put away what an instruction gave."""
    for index, slot in more.outputs:
        registers[slot] = result if index is None else result[index]
    if more.reduction is not None:
        more.reduction.add(part, [result if index is None else result[index] for index in more.whole])
    for slot, kept in more.keeps:
        kept.put(part, registers[slot])
    if carried is not None:
        for slot, value in more.carries:
            carried[value] = registers[slot]
