"""Recording of operations on virtual tensors, and computation of the numbers that the program reads.

Values are immutable. Recording runs no kernel on the samples; reading numbers runs all pending operations.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from superbatch.errors import WindowError
from superbatch.results.coupling import CouplingKind
from superbatch.torch.memory.out_of_memory import out_of_memory

from ..ir.calls import Call, OpStrategy, empty_like, mapped, meta_like, meta_tensor, results, run_of
from ..ir.conjugates import lazy_conjugation
from ..ir.readings import Readings
from ..ir.recorder import RankSums
from ..ir.shard import PARTIAL, REPLICATE, BatchSlice, Shard, batch_slices
from ..ir.values import Action, Handle, Node, Operand, Value
from ..ir.writes import Writes
from ..rules.lookup import find
from ..run.auto_size import microbatch_size
from ..run.by_rows import by_rows
from ..run.full_values import mark
from ..run.growth import may_grow
from ..run.log import Log
from ..run.memo import KeyedCall, Template, action, template, traits
from ..run.plan import plan
from ..run.store import Store
from ..run.sweep import run, unchanged
from . import composites, paranoia
from .aliases import current
from .dispatch import dispatch
from .gathering import READ_BY_PROGRAM, gather
from .host_indices import on_device
from .leaves import Leaves
from .randomness import Randomness, draw_full_batch
from .spreading import spread
from .tensor import VirtualTensor, refuse_hollow

aten: Any = torch.ops.aten
_SMALL = 4096  # elements; smaller real tensors are copied at once, which is cheaper than watching for writes
_ONE_ROW = (1, 1)  # `outer` and `inner` of a sharding with one row per sample
_NOTHING = meta_tensor((), (), torch.float32)  # for an absent result


class Recording:
    """Operations of one block; properties and most methods are explained in `Recorder`.

    Args:
        size: largest size of a micro-batch; "auto": chosen before numbers are first computed.

    Attributes:
        ending: the program has left the block.
        leaves: leaves that may get a gradient, with their old gradients.
    """

    def __init__(
        self,
        samples: int,
        size: int | Literal["auto"],
        device: torch.device,
        *,
        randomness: Randomness,
        store: Store,
        log: Log,
        paranoid: bool = False,
        compile: bool = False,
    ) -> None:
        self.samples = samples
        self.size: int | Literal["auto"] = size
        self.microbatches: list[BatchSlice] = []
        self.device = device
        self.randomness = randomness
        self.store = store
        self.log = log
        self.paranoid = paranoid
        self.compile = compile
        self.open, self.ending = True, False
        self.leaves = Leaves()
        self.ranks: RankSums | None = None
        self._handles: list[weakref.ref[Handle]] = []
        self._writes = Writes()
        self.readings = Readings()
        self._shards_by_shape: dict[torch.Size, Shard] = {}  # see `rules.shape_arguments`

    # -- recording --------------------------------------------------------------------------------------

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Dispatch an operation on virtual tensors."""
        return dispatch(self, func, args, kwargs)

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operation on values, and return the values of its results."""
        if self.paranoid:
            func = paranoia.DEFINED.get(func, func)
        keyed = KeyedCall(func, args, kwargs, self.samples)
        results = spread(self, keyed, self._shards_by_shape) if func is aten.expand.default else None
        if results is None:
            results = self._computed(keyed)
        if may_grow(keyed, results):
            size = 1 if self.size == "auto" else self.size
            rows = self.microbatches[0].samples if self.microbatches else size
            mark(keyed, results, min(rows, self.samples), self.store, self.log)
        return results

    def _computed(self, keyed: KeyedCall) -> Any:
        func, args, kwargs = keyed.func, keyed.args, keyed.kwargs
        kind = traits(func)
        batch = pending = elsewhere = False
        for value in keyed.tensors:
            if value.meta is None:  # sparse or nested
                return self._run_now(keyed.call())
            batch = batch or value.shard is not None
            pending = pending or value.full is None
            elsewhere = elsewhere or value.device != self.device
        if kind.immediate:
            return self._run_now(keyed.call())
        if batch and elsewhere and (moved := on_device(self, keyed)) is not None:
            return self._computed(moved)
        if not batch and kind.like:  # ones_like(loss) must not materialize a pending loss
            like = empty_like(keyed.tensors[0].meta, keyed.tensors[0].device)
            return self.from_real(func(like, *args[1:], **kwargs))
        random = kind.draws and keyed.call().argument("dropout_p") != 0.0
        if not batch and (random or not pending):
            if random and self.randomness.as_full_batch:
                return draw_full_batch(self, keyed.call())
            return self._run_now(keyed.call())
        cached = None if random else template(keyed)
        if cached is None:
            return self._untemplated(keyed.call(), batch, random)
        results = self._from_template(cached, keyed, batch)
        if self.paranoid:
            paranoia.check(self, keyed.call(), results)
        return results

    def _from_template(self, cached: Template, keyed: KeyedCall, batch: bool) -> Any:
        """Record an operation by its cached template."""
        func, tensors = keyed.func, keyed.tensors
        rows = None if batch else by_rows(keyed)
        if rows is not None and rows.larger:
            return self._node(func, rows.operands, rows.action)
        if cached.gathered:
            kind: CouplingKind = "unknown" if cached.unknown else "gathered"
            operands = [self._operand(Operand(tensors[i], shard), kind, func) for i, shard in cached.operands]
        else:
            operands = [Operand(tensors[index], shard) for index, shard in cached.operands]
        results = self._node(func, operands, cached.action)
        if rows is not None and isinstance(results, Value) and results.node is not None:
            results.node.by_rows = rows  # the plan decides later, when all readers are recorded
        return results

    def _untemplated(self, call: Call, batch: bool, random: bool) -> Any:
        """Record an operation that has no cached template."""
        if random and (self.randomness.as_full_batch or call.argument("generator") is not None):
            return draw_full_batch(self, call)
        strategy = self.randomness.strategy(call) if random else find(call)
        if strategy is None and batch:
            results = composites.decomposed(self, call)
            if results is not NotImplemented:
                return mapped(results, self.value)
        results = self._recorded(call, strategy, check=self.paranoid and not random)
        if random:
            self.randomness.remember_seed(strategy, results)
        return results

    def _recorded(self, call: Call, strategy: OpStrategy | None, *, check: bool) -> Any:
        try:
            metas = results(call, strategy)
        except (NotImplementedError, RuntimeError, TypeError, AssertionError) as error:
            if out_of_memory(error):
                raise
            return self._run_now(call)  # the shape of nonzero(), for example, depends on numbers
        if metas is None:
            return self._run_now(call)
        if strategy is not None:
            values = self.add(call.func, strategy, metas)
            if check:
                paranoia.check(self, call, values)
            return values
        count = 1 if isinstance(metas, Tensor) else len(metas)
        full = OpStrategy(
            [Operand(value, REPLICATE) for value in call.tensors], [PARTIAL] * count, run_of(call)
        )
        return self.add(call.func, full, metas, once=True)

    def add(
        self, func: Any, strategy: OpStrategy, metas: Any, *, once: bool = False, compilable: bool = False
    ) -> Any:
        """Record an operation with its strategy, and return the values of its results."""
        kind: CouplingKind = "unknown" if once else "gathered"
        operands = [self._operand(operand, kind, func) for operand in strategy.operands]
        shards = [*(shard for _, shard in operands), *strategy.outputs]
        once = once or all(shard is None for shard in shards)
        return self._node(func, operands, action(strategy, metas, once=once, compilable=compilable))

    def _node(self, func: Any, operands: Sequence[Operand], action: Action) -> Any:
        self.log.recorded += 1
        device = self.device
        for value, shard in operands:
            if shard is not None:
                device = value.device
                break
        if action.single:
            (meta,), (shard,) = action.metas, action.shards
            assert isinstance(meta, Tensor)
            output = Value(meta, device, shard)
            if shard is not None and shard[1:] != _ONE_ROW:
                self._shards_by_shape[meta.shape] = shard
            Node(func, operands, action, (output,), where=self.log.where)
            return output
        outputs = [
            Value(meta if isinstance(meta, Tensor) else _NOTHING, device, shard)
            for meta, shard in zip(action.metas, action.shards, strict=True)
        ]
        Node(func, operands, action, outputs, where=self.log.where)
        return [
            output if isinstance(meta, Tensor) else meta
            for meta, output in zip(action.metas, outputs, strict=True)
        ]

    def _operand(self, operand: Operand, kind: CouplingKind, operator: Any) -> Operand:
        value, shard = operand
        if value.shard is not None and value.shard != shard:
            return Operand(self.gathered(value, kind, operator), shard)
        return operand

    def gathered(
        self, value: Value, kind: CouplingKind = "gathered", operator: Any = READ_BY_PROGRAM
    ) -> Value:
        """Return a value as a full one; `kind` is as in `gathering.gather`."""
        return value if value.shard is None else gather(self.log, value, kind, operator)

    def _run_now(self, call: Call) -> Any:
        """Run an operation immediately, on full tensors."""
        full = [self.gathered(value, "unknown", call.func) for value in call.tensors]
        tensors = self.materialized(full)
        with lazy_conjugation():
            return mapped(run_of(call)(BatchSlice(0, 0, self.samples), tensors), self.from_real)

    # -- tensors and values ---------------------------------------------------------------------------------

    def value(self, tensor: Any) -> Any:
        """Return the value of a virtual or real tensor."""
        if isinstance(tensor, VirtualTensor):
            if tensor.virtual.recording is not self:
                return self.from_real(tensor.virtual.recording.numbers(tensor))
            return current(self, tensor)
        return self.from_real(tensor)

    def from_real(self, tensor: Tensor) -> Value:
        """Return a value for a real tensor."""
        if tensor.layout is not torch.strided or tensor.is_nested:
            value = Value(None, tensor.device)  # type: ignore[arg-type]  (no strides, so no meta)
            value.full = tensor
            return value
        self.make_writes((tensor,))  # such as that of a running mean
        self.register_leaves(tensor)
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        value = Value(meta_like(tensor), tensor.device)
        if tensor.numel() <= _SMALL and not tensor.requires_grad:
            value.full = tensor.clone()
        else:
            self.readings.bind(value, tensor)
        return value

    def register_leaves(self, tensor: Tensor) -> None:
        """Register the autograd leaves that get a gradient through a real tensor, parameters or others."""
        refuse_hollow(tensor)
        for leaf in () if isinstance(tensor, VirtualTensor) else self.leaves.new(tensor):
            if leaf.grad is not None and leaf.grad.layout is torch.strided:
                # Autograd adds the new gradient in place, which would materialize it if `.grad` were real.
                leaf.grad = self.wrap(self.from_real(leaf.grad))

    def values(self, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with a value in place of each tensor."""
        new = [self._argument(arg) for arg in args]
        return tuple(new), {name: self._argument(arg) for name, arg in kwargs.items()} if kwargs else {}

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return self.value(arg)
        if isinstance(arg, (list, tuple)) and any(isinstance(item, Tensor) for item in arg):
            return [self.value(item) if isinstance(item, Tensor) else item for item in arg]
        return arg

    def wrapped(self, results: Any) -> Any:
        """Return the results with a tensor in place of each value; sparse tensors stay as they are."""
        if type(results) is Value:
            return self._wrapped_value(results)
        return mapped(results, self._wrapped_value, Value)

    def _wrapped_value(self, value: Value) -> Tensor | None:
        # Full, materialized integers and flags are real tensors, because the program may index with them.
        if value.meta is None or (value.full is not None and value.shard is None and not value.has_gradient):
            return value.full
        return self.wrap(value)

    def wrap(self, value: Value) -> VirtualTensor:
        """Return a virtual tensor for a value."""
        return VirtualTensor(self, value)

    def register(self, handle: Handle) -> None:
        """Register a handle: while it lives, the program may read its value."""
        self._handles.append(handle.reference)

    def _readable(self) -> list[Value]:
        """Return the values of all live virtual tensors."""
        alive = {id(handle): handle for reference in self._handles if (handle := reference()) is not None}
        self._handles = [handle.reference for handle in alive.values()]
        return [handle.value for handle in alive.values()]

    # -- numbers --------------------------------------------------------------------------------------------

    def numbers(self, tensor: Tensor) -> Tensor:
        """Return a real tensor with the numbers of a virtual one."""
        if not isinstance(tensor, VirtualTensor):
            return tensor
        owner = tensor.virtual.recording
        value = owner.gathered(current(owner, tensor))
        if value.full is None and not owner.open:
            raise WindowError(
                f"This virtual tensor of shape {tuple(tensor.shape)} was not materialized before its block "
                "ended. Read it inside the block with tensor.item() or tensor.numpy()."
            )
        (full,) = owner.materialized([value])
        return full

    def materialized(self, values: Iterable[Value]) -> list[Tensor]:
        """Materialize full values, and return their tensors."""
        values = list(values)
        if any(value.full is None for value in values):
            self.materialize(values)
        return [unchanged(value) for value in values]

    def materialize(self, targets: Iterable[Value]) -> None:
        """Compute the targets and all other pending values, and make the pending writes."""
        # All, because a gradient computed later would repeat the sweeps, or read parameters that an optimizer
        # has changed in the meantime.
        writes = self._writes.take()
        wanted = [*targets, *(self.gathered(value) for _, value in writes), *self.pending()]
        wanted = [value for value in wanted if value.full is None]
        # After the block, rows cannot be read even if a variable still refers to them.
        readable = [] if self.ending else self._readable()
        todo = plan(wanted, readable, by_rows=self.store.budget is not None)
        if not self.microbatches:
            size = microbatch_size(self.size, todo, self.samples, self.device, self.store.budget)
            self.microbatches = batch_slices(self.samples, size)
        self.log.log_plan(todo)
        run(todo, self.microbatches, self.store, self.log, compile=self.compile)
        with torch.no_grad():
            for tensor, value in writes:
                # Operations recorded before the write read the old numbers.
                self.readings.copy_before_write([tensor])
                tensor.copy_(unchanged(self.gathered(value)))
        self.readings.drop_unused()

    def end(self) -> None:
        """Compute the values that the program may read after the block."""
        for leaf, _ in self.leaves.gradients.values():
            if isinstance(leaf.grad, VirtualTensor) and leaf.grad.virtual.recording is self:
                value = current(self, leaf.grad)
                if value.shard is not None:  # gathered now, because its inputs are freed at the end
                    leaf.grad = self.wrap(self.gathered(value))
        self.ending = True
        self.materialize(self.pending())

    def write_later(self, tensor: Tensor, value: Value) -> None:
        """Write a value into a buffer once it is computed."""
        self._writes.add(tensor, value)

    def make_writes(self, args: Iterable[Any]) -> None:
        """Make the pending writes if one of the arguments shares memory with a buffer to be written."""
        if self._writes and self._writes.shares_memory(args):
            self.materialize([])

    def pending(self) -> list[Value]:
        """Return the full values that the program may read and that are not materialized."""
        return [value for value in self._readable() if value.shard is None and value.full is None]
