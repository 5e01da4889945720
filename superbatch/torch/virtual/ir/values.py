"""Recorded values, and the operations that compute them.

A `Value` stands for a tensor of the whole batch: sharded into rows by micro-batch (it has a `Shard`), or
full (`shard` is None), as a parameter, a batch statistic or the loss is. A `Node` is one operation on values.
References go from a value to its node and from a node to its inputs; outputs are held weakly. So Python's
reference counts free a value once the program and all later operations have dropped it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from superbatch.results.coupling import CouplingKind

from .shard import Part, Shard, cut


class Handle:
    """Reference to a value, held by each tensor of the program that shows it."""

    __slots__ = ("__weakref__", "reference", "value")

    def __init__(self, value: Value) -> None:
        self.value = value
        # One weak reference for all tensors that show the value: the recording keeps it, and a live one means
        # that the program may still read the value.
        self.reference = weakref.ref(self)


class MicrobatchRows(Protocol):
    """Rows of a materialized value, one tensor per micro-batch."""

    def get(self, part: Part) -> Tensor:
        """Return the rows of a micro-batch, on the device that stores them."""
        ...


class Sliced(NamedTuple):
    """Rows cut from one full tensor, on the device or on the host."""

    tensor: Tensor
    shard: Shard

    def get(self, part: Part) -> Tensor:
        """Return the rows of a micro-batch as a view."""
        return cut(self.tensor, self.shard, part)


class Value:
    """Tensor of the whole batch, computed or not.

    Attributes:
        meta: shape, strides and dtype, as a tensor on the meta device.
        device: device of the computation.
        shard: how the samples are sharded; None if the value is full.
        node: the operation that computes it; None if it is an input, or is stored.
        index: position among the outputs of the node.
        full: the full tensor, once it is materialized.
        source: the program's tensor that shares this memory, with its `_version` at the time of reading;
            None if the memory is our own.
        rows: the rows by micro-batch, once they are stored.
        gathered: weak reference to the full value that is joined from the rows.
        grows: dimensions that grow with the number of samples, besides the sharded one.
        picked: number of batch rows in a full value, if it does not depend on the batch size.
        held: keeps the bytes of `full` in the store's count for as long as the value lives.
    """

    __slots__ = (
        "__weakref__",
        "_handle",
        "device",
        "full",
        "gathered",
        "grows",
        "held",
        "index",
        "meta",
        "node",
        "picked",
        "rows",
        "shard",
        "source",
    )

    def __init__(self, meta: Tensor, device: torch.device, shard: Shard | None = None) -> None:
        # None only for a sparse or nested tensor, which has no strides to describe it.
        self.meta = meta
        self.device = device
        self.shard = shard
        self.node: Node | None = None
        self.index = 0
        self.full: Tensor | None = None
        self.rows: MicrobatchRows | None = None
        self.source: tuple[Tensor, int] | None = None
        self.gathered: weakref.ref[Value] | None = None
        self.grows: tuple[int, ...] = ()
        self.picked = 0
        self.held: object = None
        self._handle: weakref.ref[Handle] | None = None

    @property
    def materialized(self) -> bool:
        """Return whether the value is materialized."""
        return self.full is not None or self.rows is not None

    @property
    def has_gradient(self) -> bool:
        """Return whether autograd supports its dtype."""
        return self.meta.dtype.is_floating_point or self.meta.dtype.is_complex

    def handle(self) -> Handle:
        """Return the handle for a tensor of the program to hold; a new one if none is alive."""
        # Held weakly here: handle -> value -> handle would be a cycle, freed only by the garbage collector.
        handle = None if self._handle is None else self._handle()
        if handle is None:
            handle = Handle(self)
            self._handle = handle.reference
        return handle

    # From the meta tensor, because the schedule and "auto" need it before anything is computed.
    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.meta.numel() * self.meta.element_size()


class Operand(NamedTuple):
    """Value that an operation reads, and how it reads it.

    Attributes:
        value: the value.
        shard: the operation reads the rows of its micro-batch, cut by this sharding; None: the full tensor.
    """

    value: Value
    shard: Shard | None


class Reduction(Protocol):
    """Reduction of the outputs of all micro-batches to full ones."""

    def add(self, part: Part, outputs: list[Any]) -> None:
        """Add the outputs of one micro-batch, in any order of micro-batches."""
        ...

    def result(self) -> list[Any]:
        """Return the outputs over all samples."""
        ...


Run = Callable[[Part, list[Tensor]], Any]
_serial = itertools.count()  # one for all threads: `next` of it is atomic


class Action(NamedTuple):
    """Operation without its values, shared by all operations of the same form.

    Attributes:
        metas: one meta tensor per result; None for an absent result, an int for a result that is a number.
        single: the operator returns one tensor, not a sequence.
        once: the operation reads full values only, so it runs once and not per micro-batch.
        shards: sharding of each result; None: full.
        run: computes the results of one micro-batch; a tuple if there are several.
        reduce: makes the `Reduction` of the full results; None without full results, or with `once`.
        view: the result shares the memory of its input.
        light: costs about as much as reading the inputs, so recomputing is as cheap as storing.
        known: `run` depends only on its tensors and on the number of samples, and operations of the same
            form share the function object: a compiled segment may be reused for all of them.
    """

    metas: tuple[Tensor | int | None, ...]
    single: bool
    once: bool
    shards: tuple[Shard | None, ...]
    run: Run
    reduce: Callable[[], Reduction] | None
    view: bool
    light: bool
    known: bool


class ByRows(NamedTuple):
    """Alternative form of an operation on full values: computed for the rows of one micro-batch at a time.

    Attributes:
        action: the operation by rows.
        operands: its inputs, with the shardings that cut them.
        larger: the results are much larger than the inputs that are cut.
    """

    action: Action
    operands: tuple[Operand, ...]
    larger: bool


def going_back() -> bool:
    """Return whether autograd runs a backward pass."""
    # -1 outside of the autograd engine; a thread-local of torch without a public accessor.
    return torch._C._current_graph_task_id() != -1


class Node:
    """Recorded operation.

    Attributes:
        operator: an operator of torch, or a name such as "batch_norm".
        serial: position in the recording order; inputs have smaller serials.
        operands: the inputs.
        outputs: weak references to the results; a dead one is not needed any more.
        single, once, shards, run, reduce, view, light, known: as in `Action`.
        gathers: the node gathers rows into a full tensor; "unknown" if an operator has no rule.
        where: path of the module whose forward recorded it.
        by_rows: alternative form that computes it by rows instead of once; None if there is none.
        backward: recorded during a backward pass.
    """

    __slots__ = (
        "backward",
        "by_rows",
        "gathers",
        "known",
        "light",
        "once",
        "operands",
        "operator",
        "outputs",
        "reduce",
        "run",
        "serial",
        "shards",
        "single",
        "view",
        "where",
    )

    def __init__(
        self,
        operator: Any,
        operands: Sequence[Operand],
        action: Action,
        outputs: Sequence[Value],
        *,
        gathers: CouplingKind | None = None,
        where: str = "",
    ) -> None:
        self.operator = operator
        self.serial = next(_serial)
        self.operands = tuple(operands)
        # The value holds the node: a strong reference back would make a cycle of every operation and its
        # results.
        self.outputs = [weakref.ref(value) for value in outputs]
        # Flattened into slots: a sweep reads these for every node, and an attribute of an attribute costs
        # twice.
        _, self.single, self.once, self.shards, self.run, self.reduce, self.view, self.light, self.known = (
            action
        )
        self.gathers: CouplingKind | None = gathers
        self.where = where
        # Set by the recording, and used only if the plan finds that every reader takes rows.
        self.by_rows: ByRows | None = None
        self.backward = going_back()
        for index, value in enumerate(outputs):
            value.node, value.index = self, index

    @property
    def name(self) -> str:
        """Name of the operator."""
        return str(self.operator)
