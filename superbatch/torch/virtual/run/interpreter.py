"""Interpreter of a sweep's program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..ir.shard import BatchSlice
from .instructions import Instruction, SideEffects

# Arguments: microbatch, rows, prefetcher, next_read, carries. `rows` executes a `Load`. It is an argument,
# because it is a method of the program, which refers to this function: a reference back would make a cycle,
# which keeps full tensors in memory until a garbage collection.
Function = Callable[..., None]


def interpreted(program: Sequence[Instruction], registers: Sequence[Any], carried: Any) -> Function:
    """Return a function that runs a program on a micro-batch.

    The initial `registers` have full values, and None for rows. `carried` receives the rows that the last
    micro-batch carries to the next sweep; None to carry none.
    """
    before = list(registers)

    def function(
        microbatch: BatchSlice, rows: Callable[..., Any], prefetcher: Any, next_read: Any, carries: bool
    ) -> None:
        registers = before.copy()  # with full values, without rows of the last micro-batch
        for run, inputs, output, effects, frees, _, _ in program:
            if effects is None:
                registers[output] = run(microbatch, [registers[slot] for slot in inputs])
            else:
                for load in effects.loads:
                    registers[load.slot] = rows(load, microbatch, prefetcher, next_read)
                tensors = [registers[slot] for slot in inputs]
                # Freed before the call: `tensors` is the only owner, so that a segment can free each one.
                for slot in effects.early:
                    registers[slot] = None
                _finish(
                    effects, run(microbatch, tensors), microbatch, registers, carried if carries else None
                )
                del tensors  # a reference would keep the inputs alive during the next instructions
            for slot in frees:
                registers[slot] = None

    return function


def _finish(
    effects: SideEffects, result: Any, microbatch: BatchSlice, registers: list[Any], carried: Any
) -> None:
    """Store, reduce and carry the results of an instruction."""
    for index, slot in effects.outputs:
        registers[slot] = result if index is None else result[index]
    if effects.reduction is not None:
        effects.reduction.add(
            microbatch, [result if index is None else result[index] for index in effects.reduced]
        )
    for slot, row_store in effects.stores:
        row_store.put(microbatch, registers[slot])
    if carried is not None:
        for slot, value in effects.carries:
            carried[value] = registers[slot]
