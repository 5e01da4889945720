"""A sweep's program as generated Python source, one function per structure.

The structure is the wiring of the instructions: which registers each one reads, fills and frees. It contains
no tensors and no operators, so every update has the same one. The function keeps registers in local variables
and calls operators directly, which halves the overhead per instruction. Generating it costs as much as some
hundred instructions, so the first program of a structure is interpreted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from ..ir.calls import Direct
from .instructions import Instruction, SideEffects
from .interpreter import Function, interpreted

Structure = tuple[Any, ...]


def generated(program: Sequence[Instruction], registers: Sequence[Any], carried: Any) -> Function:
    """Return a generated function if the structure has occurred before, else `interpreted`."""
    known = _remembered(structure(program, registers))
    known.programs += 1
    if known.programs == 1:
        return interpreted(program, registers, carried)
    if known.make is None:
        known.make = _made(known.structure)
    return known.make(carried, list(_constants(program, registers)))


class _Known:
    """Cache entry of a structure: the number of its programs, and a factory of the function."""

    __slots__ = ("make", "programs", "structure")

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.programs = 0
        self.make: Callable[..., Function] | None = None


@lru_cache(maxsize=1 << 10)  # returns a mutable entry on purpose: it counts the programs of the structure
def _remembered(structure: Structure) -> _Known:
    return _Known(structure)


def structure(program: Sequence[Instruction], registers: Sequence[Any]) -> Structure:
    """Return the wiring of a program: equal for programs that differ only in constants."""
    full = tuple([slot for slot, value in enumerate(registers) if value is not None])
    steps = [
        (
            # A `Direct` call is inlined, and its source depends on the number of arguments behind the
            # tensors.
            1 + len(run.rest) if isinstance(run, Direct) else 0,
            tuple(inputs),
            output,
            tuple(frees),
            None if more is None else _of_more(more),
        )
        for run, inputs, output, more, frees, _, _ in program
    ]
    return (full, *steps)


def _of_more(more: SideEffects) -> Structure:
    return (
        tuple([load.slot for load in more.loads]),
        tuple(more.outputs),
        None if more.reduction is None else tuple(more.reduced),
        tuple([slot for slot, _ in more.keeps]),
        tuple([slot for slot, _ in more.carries]),
        tuple(more.early),
    )


def _constants(program: Sequence[Instruction], registers: Sequence[Any]) -> Iterator[Any]:
    """Yield the constants of a program, in the order in which `_Writer` names them."""
    yield from (value for value in registers if value is not None)
    for run, _, _, more, _, _, _ in program:
        if isinstance(run, Direct):
            yield run.func
            yield from run.rest
        else:
            yield run
        if more is not None:
            yield from more.loads
            if more.reduction is not None:
                yield more.reduction.add
            yield from (kept.put for _, kept in more.keeps)
            yield from (value for _, value in more.carries)


def _made(structure: Structure) -> Callable[..., Function]:
    full, *steps = structure
    writer = _Writer(full)
    for step in steps:
        writer.write(*step)
    # An empty namespace: the source reads arguments and constants only.
    names: dict[str, Any] = {}
    # The source has names and indices from `structure` only: no text of the program gets into it.
    exec(compile(writer.source(), "<sweep of superbatch>", "exec"), names)
    return names["make"]


class _Writer:
    """Writer of the source of a function.

    Args:
        full: registers of full values, which are constants of the function.
    """

    def __init__(self, full: Sequence[int]) -> None:
        self._lines: list[str] = []
        self._count = 0
        self._full = {slot: self._constant() for slot in full}

    def _constant(self) -> str:
        self._count += 1
        return f"c{self._count - 1}"

    def write(
        self, direct: int, inputs: Sequence[int], output: int, frees: Sequence[int], more: Structure | None
    ) -> None:
        """Write one instruction.

        Args:
            direct: 0: call it as a `Run`; otherwise 1 + the number of arguments behind its tensors.
            inputs: as in `Instruction`.
            output: as in `Instruction`.
            frees: as in `Instruction`.
            more: the side effects, as `_of_more` returns them.
        """
        read = [self._full.get(slot) or f"r{slot}" for slot in inputs]
        function = self._constant()
        arguments = [*read, *(self._constant() for _ in range(direct - 1))]
        tensors = f"[{', '.join(read)}]"
        call = f"{function}({', '.join(arguments)})" if direct else f"{function}(part, {tensors})"
        if more is None:
            self._lines.append(f"r{output} = {call}")
        else:
            loads, *rest, early = more
            self._lines += [f"r{slot} = rows({self._constant()}, part, ahead, following)" for slot in loads]
            if early:  # the segment frees its inputs while it runs, so the list must be their only owner
                self._lines.append(f"tensors = {tensors}")
                self._free(early)
                call = f"{function}(part, tensors)"
            self._lines.append(f"result = {call}")
            self._finish(*rest)
            # A local variable would keep the result alive until the next instruction assigns it.
            self._lines.append("result = tensors = None" if early else "result = None")
        self._free(frees)

    def _finish(
        self,
        outputs: Sequence[tuple[int | None, int]],
        reduced: Sequence[int | None] | None,
        keeps: Sequence[int],
        carries: Sequence[int],
    ) -> None:
        def part_of(index: int | None) -> str:
            return "result" if index is None else f"result[{index}]"

        self._lines += [f"r{slot} = {part_of(index)}" for index, slot in outputs]
        if reduced is not None:
            self._lines.append(f"{self._constant()}(part, [{', '.join(map(part_of, reduced))}])")
        self._lines += [f"{self._constant()}(part, r{slot})" for slot in keeps]
        self._lines += [f"if carries: carried[{self._constant()}] = r{slot}" for slot in carries]

    def _free(self, slots: Sequence[int]) -> None:
        if slots:
            self._lines.append(" = ".join([*(f"r{slot}" for slot in slots), "None"]))

    def source(self) -> str:
        """Return the source of a factory that takes the constants and returns the program."""
        # The constants become closure variables: one load each, where a list would cost an index.
        names = "".join(f"c{index}, " for index in range(self._count))
        lines = [
            "def make(carried, constants):",
            f" ({names}) = constants",
            " def program(part, rows, ahead, following, carries):",
            *(f"  {line}" for line in self._lines),
            " return program",
        ]
        return "\n".join(lines)
