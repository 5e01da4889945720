"""Interpreter of a sweep's program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..ir.shard import Part
from .instructions import Instruction, SideEffects

# (part, rows, ahead, following, carries); `rows` executes a `Load`. It is an argument of each call, not held:
# it is a method of the program, which holds this function, and the cycle would keep full tensors in memory
# until a garbage collection.
Function = Callable[..., None]


def interpreted(program: Sequence[Instruction], registers: Sequence[Any], carried: Any) -> Function:
    """Return a function that runs a program on a micro-batch.

    Args:
        program: the instructions of a sweep.
        registers: initial registers: full values, and None for rows.
        carried: rows that the last micro-batch carries to the next sweep, by value; None without.
    """
    before = list(registers)

    def function(part: Part, rows: Callable[..., Any], ahead: Any, following: Any, carries: bool) -> None:
        registers = before.copy()  # full values stay, rows of the last micro-batch are gone
        for run, inputs, output, more, frees, _, _ in program:
            if more is None:
                registers[output] = run(part, [registers[slot] for slot in inputs])
            else:
                for load in more.loads:
                    registers[load.slot] = rows(load, part, ahead, following)
                tensors = [registers[slot] for slot in inputs]
                # Freed before the call: then `tensors` is the only owner, and a segment frees each one after
                # its last use.
                for slot in more.early:
                    registers[slot] = None
                _finish(more, run(part, tensors), part, registers, carried if carries else None)
                del tensors  # or the inputs would live until the next instruction with side effects
            for slot in frees:
                registers[slot] = None

    return function


def _finish(more: SideEffects, result: Any, part: Part, registers: list[Any], carried: Any) -> None:
    """Store, reduce and carry the results of an instruction."""
    for index, slot in more.outputs:
        registers[slot] = result if index is None else result[index]
    if more.reduction is not None:
        more.reduction.add(part, [result if index is None else result[index] for index in more.reduced])
    for slot, kept in more.keeps:
        kept.put(part, registers[slot])
    if carried is not None:
        for slot, value in more.carries:
            carried[value] = registers[slot]
