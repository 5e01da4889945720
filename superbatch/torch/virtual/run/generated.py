"""Generated Python source of a sweep's program, one function per structure.

The structure is the wiring of the instructions: the registers that each one reads, fills and frees. It has no
tensors or operators, so it is the same in every update. The function has registers in local variables and
calls operators directly, which halves the overhead per instruction. Generating it costs as much as a few
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
    """Return a generated function if the structure has occurred before, else an interpreted one."""
    entry = _cached(structure(program, registers))
    entry.programs += 1
    if entry.programs == 1:
        return interpreted(program, registers, carried)
    if entry.make is None:
        entry.make = _compile_source(entry.structure)
    return entry.make(carried, list(_constants(program, registers)))


class _CachedStructure:
    """Cache entry of a structure: the number of its programs, and a factory of the function."""

    __slots__ = ("make", "programs", "structure")

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.programs = 0
        self.make: Callable[..., Function] | None = None


@lru_cache(maxsize=1 << 10)  # of mutable entries, which count the programs of a structure
def _cached(structure: Structure) -> _CachedStructure:
    return _CachedStructure(structure)


def structure(program: Sequence[Instruction], registers: Sequence[Any]) -> Structure:
    """Return the wiring of a program, which is equal for programs that differ in constants only."""
    # Here and below: tuple() of a list is faster than of a generator, and this runs for every sweep.
    full = tuple([slot for slot, value in enumerate(registers) if value is not None])
    steps = [
        (
            # A `Direct` call is inlined. Its source depends on the number of arguments after the tensors.
            1 + len(run.other_args) if isinstance(run, Direct) else 0,
            tuple(inputs),
            output,
            tuple(frees),
            None if effects is None else _structure_of(effects),
        )
        for run, inputs, output, effects, frees, _, _ in program
    ]
    return (full, *steps)


def _structure_of(effects: SideEffects) -> Structure:
    return (
        tuple([load.slot for load in effects.loads]),
        tuple(effects.outputs),
        None if effects.reduction is None else tuple(effects.reduced),
        tuple([slot for slot, _ in effects.stores]),
        tuple([slot for slot, _ in effects.carries]),
        tuple(effects.early),
    )


def _constants(program: Sequence[Instruction], registers: Sequence[Any]) -> Iterator[Any]:
    """Yield the constants of a program in the order in which `_Writer` numbers them."""
    yield from (value for value in registers if value is not None)
    for run, _, _, effects, _, _, _ in program:
        if isinstance(run, Direct):
            yield run.func
            yield from run.other_args
        else:
            yield run
        if effects is not None:
            yield from effects.loads
            if effects.reduction is not None:
                yield effects.reduction.add
            yield from (row_store.put for _, row_store in effects.stores)
            yield from (value for _, value in effects.carries)


def _compile_source(structure: Structure) -> Callable[..., Function]:
    full, *steps = structure
    writer = _Writer(full)
    for step in steps:
        writer.write(*step)
    # An empty namespace, because the source reads arguments and constants only.
    names: dict[str, Any] = {}
    # Safe to execute: the source has numbers from `structure`, and no text of the program.
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
        self, direct: int, inputs: Sequence[int], output: int, frees: Sequence[int], effects: Structure | None
    ) -> None:
        """Write one instruction.

        `direct` is 0 for a call as a `Run`, else 1 + the number of arguments after its tensors.
        `effects` are as `_structure_of` returns them, other arguments as in `Instruction`.
        """
        read = [self._full.get(slot) or f"r{slot}" for slot in inputs]
        function = self._constant()
        arguments = [*read, *(self._constant() for _ in range(direct - 1))]
        tensors = f"[{', '.join(read)}]"
        call = f"{function}({', '.join(arguments)})" if direct else f"{function}(microbatch, {tensors})"
        if effects is None:
            self._lines.append(f"r{output} = {call}")
        else:
            loads, *rest, early = effects
            self._lines += [
                f"r{slot} = rows({self._constant()}, microbatch, ahead, following)" for slot in loads
            ]
            if early:  # the list must be their only owner, because the segment frees them while it runs
                self._lines.append(f"tensors = {tensors}")
                self._free(early)
                call = f"{function}(microbatch, tensors)"
            self._lines.append(f"result = {call}")
            self._finish(*rest)
            # The variable would keep the result alive until the next assignment.
            self._lines.append("result = tensors = None" if early else "result = None")
        self._free(frees)

    def _finish(
        self,
        outputs: Sequence[tuple[int | None, int]],
        reduced: Sequence[int | None] | None,
        stores: Sequence[int],
        carries: Sequence[int],
    ) -> None:
        def item_of(index: int | None) -> str:
            return "result" if index is None else f"result[{index}]"

        self._lines += [f"r{slot} = {item_of(index)}" for index, slot in outputs]
        if reduced is not None:
            self._lines.append(f"{self._constant()}(microbatch, [{', '.join(map(item_of, reduced))}])")
        self._lines += [f"{self._constant()}(microbatch, r{slot})" for slot in stores]
        self._lines += [f"if carries: carried[{self._constant()}] = r{slot}" for slot in carries]

    def _free(self, slots: Sequence[int]) -> None:
        if slots:
            self._lines.append(" = ".join([*(f"r{slot}" for slot in slots), "None"]))

    def source(self) -> str:
        """Return the source of a factory that takes the constants and returns the program."""
        # Constants become closure variables, which load faster than items of a list.
        names = "".join(f"c{index}, " for index in range(self._count))
        lines = [
            "def make(carried, constants):",
            f" ({names}) = constants",
            " def program(microbatch, rows, ahead, following, carries):",
            *(f"  {line}" for line in self._lines),
            " return program",
        ]
        return "\n".join(lines)
