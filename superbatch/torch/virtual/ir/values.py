"""Recorded values, and the operations that make them.

A `Value` stands for a tensor of the whole batch. It has a layout if it is computed micro-batch by
micro-batch, and none if it is whole: a parameter, a statistic of all samples, the loss. A `Node` is one
operation: values in, values out, and a function that computes the rows of one micro-batch.

A value keeps its node alive, and a node its inputs; nodes know their outputs weakly. So what no tensor of the
program and no later operation needs is gone, without anybody's count of it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from superbatch.results.coupling import CouplingKind

from .layout import Layout, Part, cut


class Handle:
    """Reference to a value, held by the program's tensors that show it: while it lives they may read it."""

    __slots__ = ("__weakref__", "reference", "value")

    def __init__(self, value: Value) -> None:
        self.value = value
        self.reference = weakref.ref(self)


class Pieces(Protocol):
    """The rows of each micro-batch of a value that is there."""

    def get(self, part: Part) -> Tensor:
        """Return the rows of a micro-batch, on the device that holds them."""
        ...


class Sliced(NamedTuple):
    """Pieces of a tensor that is there whole, on the device or on the host."""

    tensor: Tensor
    layout: Layout

    def get(self, part: Part) -> Tensor:
        """Cut the rows out."""
        return cut(self.tensor, self.layout, part)


class Value:
    """A tensor of the whole batch.

    Attributes:
        meta: its shape, strides and dtype, as a tensor without memory.
        device: where it is worked with.
        layout: where its samples are; None if it is whole.
        node: what makes it; None if it is given, or kept.
        index: which output of the node.
        whole: the tensor itself, where it is there in one piece.
        source: the tensor of the program whose memory it is, with its version then; None: it is our own.
        pieces: its rows by micro-batch, where they are there.
        grows: dimensions, beside that of the layout, that grow with the number of samples.
        picked: of a whole value, how many rows of the batch are in it, where that is a fixed number.
        held: counts its memory while it is there whole.
    """

    __slots__ = (
        "__weakref__",
        "_handle",
        "device",
        "gathered",
        "grows",
        "held",
        "index",
        "layout",
        "meta",
        "node",
        "picked",
        "pieces",
        "source",
        "whole",
    )

    def __init__(self, meta: Tensor, device: torch.device, layout: Layout | None = None) -> None:
        self.meta = meta
        self.device = device
        self.layout = layout
        self.node: Node | None = None
        self.index = 0
        self.whole: Tensor | None = None
        self.pieces: Pieces | None = None
        self.source: tuple[Tensor, int] | None = None
        self.gathered: weakref.ref[Value] | None = None
        self.grows: tuple[int, ...] = ()
        self.picked = 0
        self.held: object = None
        self._handle: weakref.ref[Handle] | None = None

    @property
    def there(self) -> bool:
        """Return whether its numbers are in memory."""
        return self.whole is not None or self.pieces is not None

    @property
    def has_gradient(self) -> bool:
        """Return whether its dtype can have a gradient."""
        return self.meta.dtype.is_floating_point or self.meta.dtype.is_complex

    def handle(self) -> Handle:
        """Return the handle that a tensor of the program has to hold."""
        handle = None if self._handle is None else self._handle()
        if handle is None:
            handle = Handle(self)
            self._handle = handle.reference
        return handle

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.meta.numel() * self.meta.element_size()


class Operand(NamedTuple):
    """Value that an operation reads, and its layout there.

    Attributes:
        value: which.
        layout: rows of the micro-batch; None: all of it.
    """

    value: Value
    layout: Layout | None


class Reduction(Protocol):
    """Reduction of the outputs of micro-batches to whole ones."""

    def add(self, part: Part, outputs: list[Any]) -> None:
        """Take the outputs of one micro-batch; they come in any order."""
        ...

    def result(self) -> list[Any]:
        """Return the outputs for all samples."""
        ...


Run = Callable[[Part, list[Tensor]], Any]
_serial = itertools.count()


class Action(NamedTuple):
    """An operation without its values.

    Attributes:
        metas: of the results; None where there is none, and a number where that is the result.
        single: there is one result, and not a sequence.
        once: it reads whole values only, and runs once.
        layouts: of each result; None: whole.
        run: computes the results for one micro-batch; a tuple if there are several.
        reduce: makes a `Reduction` of the whole results; None if there are none, or if it runs once.
        view: its result takes no memory of its own.
        light: about as fast as reading its inputs, so that it may be done again.
        known: its `run` depends on nothing but its tensors and the number of samples, and is the same
            function in each operation of its form: it may be compiled.
    """

    metas: tuple[Tensor | int | None, ...]
    single: bool
    once: bool
    layouts: tuple[Layout | None, ...]
    run: Run
    reduce: Callable[[], Reduction] | None
    view: bool
    light: bool
    known: bool


class ByRows(NamedTuple):
    """Operation on whole values, done for the rows of a micro-batch.

    Attributes:
        action: what it does then.
        operands: what it reads then.
        larger: its results are much larger than what it cuts.
    """

    action: Action
    operands: tuple[Operand, ...]
    larger: bool


def going_back() -> bool:
    """Return whether autograd runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


class Node:
    """One operation.

    Attributes:
        operator: an operator of torch, or what it is in words.
        serial: a number that grows; inputs have smaller ones.
        operands: what it reads.
        outputs: the values, weakly: None once nobody needs one.
        single, once, layouts, run, reduce, view, light, known: as told (`Action`).
        gathers: it puts a whole tensor together; "unknown": because an operator has no rule.
        where: path of the module that it belongs to.
        by_rows: how it would be done by rows, where it runs once; None if that is not known.
        backward: it belongs to a backward pass.
    """

    __slots__ = (
        "backward",
        "by_rows",
        "gathers",
        "known",
        "layouts",
        "light",
        "once",
        "operands",
        "operator",
        "outputs",
        "reduce",
        "run",
        "serial",
        "single",
        "view",
        "where",
    )

    def __init__(
        self,
        operator: Any,
        operands: Sequence[Operand],
        told: Action,
        outputs: Sequence[Value],
        *,
        gathers: CouplingKind | None = None,
        where: str = "",
    ) -> None:
        self.operator = operator
        self.serial = next(_serial)
        self.operands = tuple(operands)
        self.outputs = [weakref.ref(value) for value in outputs]
        _, self.single, self.once, self.layouts, self.run, self.reduce, self.view, self.light, self.known = (
            told
        )
        self.gathers: CouplingKind | None = gathers
        self.where = where
        self.by_rows: ByRows | None = None
        self.backward = going_back()
        for index, value in enumerate(outputs):
            value.node, value.index = self, index

    @property
    def name(self) -> str:
        """Name of the operator."""
        return str(self.operator)
