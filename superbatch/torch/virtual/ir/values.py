"""Recorded values, and the operations that compute them.

A `Value` stands for a tensor of the whole batch. It is sharded by micro-batch (it has a `Shard`), or full
(`shard` is None), as parameters, batch statistics and losses are. A `Node` is one operation on values. A
value refers to its node and a node to its inputs, but a node refers to its outputs weakly. So Python's
reference counts free a value after the last reference from the program and from later operations.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from superbatch.results.coupling import CouplingKind

from .shard import BatchSlice, Shard, cut


class Handle:
    """Reference to a value, held by each virtual tensor of the program that has this value."""

    __slots__ = ("__weakref__", "reference", "value")

    def __init__(self, value: Value) -> None:
        self.value = value
        # One weak reference for all tensors with the value. The recording stores it: as long as the handle
        # lives, the program may read the value.
        self.reference = weakref.ref(self)


class MicrobatchRows(Protocol):
    """Rows of a materialized value, one tensor per micro-batch."""

    def get(self, microbatch: BatchSlice) -> Tensor:
        """Return the rows of a micro-batch, on the device that stores them."""
        ...


class Sliced(NamedTuple):
    """Rows cut from one full tensor, on the device or on the host."""

    tensor: Tensor
    shard: Shard

    def get(self, microbatch: BatchSlice) -> Tensor:
        """Return the rows of a micro-batch as a view."""
        return cut(self.tensor, self.shard, microbatch)


class Value:
    """Tensor of the whole batch, materialized or not.

    Attributes:
        meta: shape, strides and dtype, as a tensor on the meta device.
        device: device of the computation.
        shard: sharding of the samples; None if the value is full.
        node: operation that computes the value; None for an input, and after it is materialized.
        index: position of the value among the outputs of the node.
        full: the full tensor, once it is materialized.
        source: tensor of the program that shares memory with `full`, and its `_version` when the value was
            made; None if no tensor of the program does.
        rows: the rows by micro-batch, once they are stored.
        gathered: weak reference to the full value that joins the rows.
        grows: dimensions that grow with the number of samples, besides the sharded one.
        picked: number of rows of the batch in a full value if that number is fixed, as in ``x[:3]``; else 0.
        counted_bytes: entry of `full` in the store's count, which ends when the value is freed.
    """

    __slots__ = (
        "__weakref__",
        "_handle",
        "counted_bytes",
        "device",
        "full",
        "gathered",
        "grows",
        "index",
        "meta",
        "node",
        "picked",
        "rows",
        "shard",
        "source",
    )

    def __init__(self, meta: Tensor, device: torch.device, shard: Shard | None = None) -> None:
        # None for a sparse or nested tensor, which has no strides.
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
        self.counted_bytes: object = None
        self._handle: weakref.ref[Handle] | None = None

    @property
    def materialized(self) -> bool:
        """Return whether the value is materialized."""
        return self.full is not None or self.rows is not None

    @property
    def has_gradient(self) -> bool:
        """Return whether autograd supports the dtype."""
        return self.meta.dtype.is_floating_point or self.meta.dtype.is_complex

    def handle(self) -> Handle:
        """Return the handle for a tensor of the program to hold; a new one if none is alive."""
        # A weak reference: handle -> value -> handle would be a cycle, freed only by the garbage collector.
        handle = None if self._handle is None else self._handle()
        if handle is None:
            handle = Handle(self)
            self._handle = handle.reference
        return handle

    # From the meta tensor: the schedule and "auto" need the size before the value is computed.
    @property
    def nbytes(self) -> int:
        """Size of the tensor for the whole batch in bytes."""
        return self.meta.numel() * self.meta.element_size()


class Operand(NamedTuple):
    """Value that an operation reads, cut by `shard`, or in full if that is `REPLICATE`."""

    value: Value
    shard: Shard | None


class Reduction(Protocol):
    """Reduction of the outputs of all micro-batches to full ones."""

    def add(self, microbatch: BatchSlice, outputs: list[Any]) -> None:
        """Add the outputs of one micro-batch; micro-batches may come in any order."""
        ...

    def result(self) -> list[Any]:
        """Return the outputs over all samples."""
        ...


Run = Callable[[BatchSlice, list[Tensor]], Any]
_serial = itertools.count()  # shared by all threads: its `next` is atomic


class Action(NamedTuple):
    """Operation without its values, shared by all operations of the same form.

    Attributes:
        metas: one meta tensor per result; None for an absent result, an int for a result that is a number.
        single: the operator returns a tensor, not a sequence.
        once: the operation reads and returns full values only, so it runs once and not per micro-batch.
        shards: placement of each result: a `Shard`, or `PARTIAL`.
        run: computes the results of one micro-batch; a tuple if there are several.
        reduce: creates the `Reduction` of the `PARTIAL` results; None with `once`.
        view: the result shares the memory of its input.
        light: running it costs about as much as reading the inputs, so recomputing is as cheap as storing.
        compilable: `run` depends only on its tensors and on the number of samples, and is the same function
            object for all operations of the same form. So they can share a compiled segment.
    """

    metas: tuple[Tensor | int | None, ...]
    single: bool
    once: bool
    shards: tuple[Shard | None, ...]
    run: Run
    reduce: Callable[[], Reduction] | None
    view: bool
    light: bool
    compilable: bool


class ByRows(NamedTuple):
    """Alternative form of an operation on full values, which computes the rows of one micro-batch at a time.

    Attributes:
        larger: the results have at least twice the elements of the inputs that are cut.
    """

    action: Action
    operands: tuple[Operand, ...]
    larger: bool


def in_backward() -> bool:
    """Return whether autograd runs a backward pass."""
    # -1 outside of the autograd engine; a thread-local of torch without a public accessor.
    return torch._C._current_graph_task_id() != -1


class Node:
    """Recorded operation.

    Attributes:
        operator: an operator of torch, or a name such as "batch_norm".
        serial: position in the recording order; inputs have smaller serials.
        outputs: weak references to the results; a freed result need not be computed.
        single, once, shards, run, reduce, view, light, compilable: as in `Action`.
        gathers: reason why the node gathers rows into a full tensor: "gathered" for an operator that reads
            it, "unknown" for an operator without a rule; None if the node does not gather.
        where: path of the module whose forward recorded the node.
        by_rows: alternative form that runs per micro-batch instead of once; None if there is none.
        backward: recorded during a backward pass.
    """

    __slots__ = (
        "backward",
        "by_rows",
        "compilable",
        "gathers",
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
        # Weak, because the value refers to the node: a cycle would be freed only by the garbage collector.
        self.outputs = [weakref.ref(value) for value in outputs]
        # Slots of the node, not of `action`: a sweep reads them for every node, and `node.action.run` would
        # cost two lookups.
        (
            _,
            self.single,
            self.once,
            self.shards,
            self.run,
            self.reduce,
            self.view,
            self.light,
            self.compilable,
        ) = action
        self.gathers: CouplingKind | None = gathers
        self.where = where
        # Set by the recording, and used if the plan finds that all readers take rows.
        self.by_rows: ByRows | None = None
        self.backward = in_backward()
        for index, value in enumerate(outputs):
            value.node, value.index = self, index

    @property
    def name(self) -> str:
        """Name of the operator."""
        return str(self.operator)
