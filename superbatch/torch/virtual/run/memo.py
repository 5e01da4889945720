"""Cache of recorded operations, keyed by operator, arguments, shapes, dtypes and batch dimension.

Every update records the same operations. So the strategy of an operation and the shapes of its results are
cached for the process. They depend on the operator, on the arguments that are not tensors, and on the shape,
strides, dtype, device and sharding of each tensor; never on numbers. Rules are called with stand-ins, so that
an entry holds no numbers and no values of a block.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from superbatch.torch.memory.out_of_memory import out_of_memory

from ..ir.calls import Call, OpStrategy, Path, results, run_of, substituted
from ..ir.shard import PARTIAL, REPLICATE, Shard
from ..ir.values import Action, Operand, Value
from ..rules.decompositions import IMMEDIATE, decomposition
from ..rules.lookup import draws, find
from ..rules.shape_rules import LIKES


class OpTraits(NamedTuple):
    """Traits of an operator that decide how it is recorded.

    Attributes:
        immediate: it runs at once, on full tensors.
        like: it makes a new tensor with the shape of another, as `zeros_like` does.
        draws: it draws random numbers.
    """

    immediate: bool
    like: bool
    draws: bool


@cache  # one lookup per operation in place of three
def traits(func: Any) -> OpTraits:
    """Return the traits of an operator."""
    return OpTraits(func in IMMEDIATE, func.overloadpacket in LIKES, draws(func))


class Template(NamedTuple):
    """Cached action for all calls with the same key.

    Attributes:
        action: action that each call records.
        operands: (index of the tensor in the call, placement in which it is read).
        gathered: an operand has to be gathered, because it is not read in its own sharding.
        unknown: the operator has no rule.
    """

    action: Action
    operands: tuple[tuple[int, Shard | None], ...]
    gathered: bool
    unknown: bool


class KeyedCall:
    """Call of an operator, with its cache key: operator, arguments, shapes, dtypes and sharding.

    Args:
        func, args, kwargs, samples: as in `Call`.

    Attributes:
        tensors, paths: all values in order, and their paths in the arguments.
        key: cache key; None if the type of an argument is not in `_PLAIN`.
    """

    __slots__ = ("args", "func", "key", "kwargs", "paths", "samples", "tensors")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], samples: int) -> None:
        self.func, self.args, self.kwargs, self.samples = func, args, kwargs, samples
        self.tensors: list[Value] = []
        self.paths: list[Path] = []
        # The default dtype is part of the key: an integer tensor times a float has that dtype.
        key: list[Any] = [id(func), samples, torch.get_default_dtype()]
        cacheable = True
        for position, arg in enumerate(args):
            cacheable &= self._describe(arg, (position,), key)
        for name, arg in kwargs.items():
            key.append(name)
            cacheable &= self._describe(arg, (name,), key)
        if len(self.tensors) > 1 and len(set(map(id, self.tensors))) < len(self.tensors):
            which = {id(value): index for index, value in enumerate(self.tensors)}
            # mm(x, x) has another key than mm(x, y), because rules may compare arguments by identity.
            key.append(tuple(which[id(value)] for value in self.tensors))
        self.key = tuple(key) if cacheable else None

    def _describe(self, arg: Any, path: Path, key: list[Any]) -> bool:
        kind = type(arg)
        if kind is Value:
            self.tensors.append(arg)
            self.paths.append(path)
            # The id identifies shape, strides and dtype: `meta_tensor` returns one object for them, and the
            # cache entry keeps it alive.
            key += (id(arg.meta), arg.shard, arg.device)
            return True
        if kind is list or kind is tuple or isinstance(arg, (list, tuple)):
            inner: list[Any] = []
            cacheable = True
            for position, item in enumerate(arg):
                cacheable &= self._describe(item, (*path, position), inner)
            key += (list, tuple(inner))
            return cacheable
        if kind is float and not (arg < 0 or arg > 0):
            arg = repr(arg)  # because 0.0 == -0.0, whose inverses differ, and nan != nan
        key += (kind, arg)  # 1 == 1.0 == True, but the dtypes of the results differ
        return kind in _PLAIN

    def call(self) -> Call:
        """Return the call to pass to rules."""
        return Call(self.func, self.args, self.kwargs, self.tensors, self.paths, self.samples)


# Types whose values are immutable and compare by content, unlike SymInt or generators.
_PLAIN = {
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.device,
}


def template(keyed: KeyedCall) -> Template | None:
    """Return the cached template of a call of an operator that draws no random numbers.

    Return None if the call is decomposed, its shape depends on numbers, or the type of an argument is not in
    `_PLAIN`.
    """
    if keyed.key is None:
        return None
    key = _Key(keyed.key)
    key.keyed = keyed
    return _cached(key).template


# Inductor's decompositions of these differ from the kernels: the loss is wrong (torch 2.13), and the kernel
# rounds a factor 1/6 to float32.
_NOT_COMPILED = {torch.ops.aten.multilabel_margin_loss_forward, torch.ops.aten.hardsigmoid_backward}


class _CacheEntry(NamedTuple):
    template: Template | None
    held: tuple[Any, ...]  # objects whose ids are in the key, so that no other object gets these ids


class _Key(tuple[Any, ...]):
    """Cache key; refers to its call until the call is evaluated."""

    keyed: KeyedCall | None


@lru_cache(maxsize=1 << 13)
def _cached(key: _Key) -> _CacheEntry:
    keyed, key.keyed = key.keyed, None  # otherwise the cache would keep values of the first block alive
    assert keyed is not None
    held = (keyed.func, *(value.meta for value in keyed.tensors))
    return _CacheEntry(_build_template(_with_stand_ins(keyed)), held)


def _with_stand_ins(keyed: KeyedCall) -> Call:
    """Return the call with stand-ins for its values, without nodes and numbers."""
    stand_ins = {id(value): Value(value.meta, value.device, value.shard) for value in keyed.tensors}
    tensors = [stand_ins[id(value)] for value in keyed.tensors]
    args, kwargs = substituted(keyed.args, keyed.kwargs, keyed.paths, tensors)
    return Call(keyed.func, tuple(args), kwargs, tensors, keyed.paths, keyed.samples)


def _build_template(call: Call) -> Template | None:
    strategy = find(call)
    batch = any(value.shard is not None for value in call.tensors)
    if strategy is None and batch and decomposition(call.func) is not None:
        return None  # the simpler operations have their own templates
    try:
        metas = results(call, strategy)
    except (NotImplementedError, RuntimeError, TypeError, AssertionError) as error:
        if out_of_memory(error):
            raise
        return None
    if metas is None:
        return None
    unknown = strategy is None
    if strategy is None:
        count = 1 if isinstance(metas, Tensor) else len(metas)
        strategy = OpStrategy(
            [Operand(value, REPLICATE) for value in call.tensors], [PARTIAL] * count, run_of(call)
        )
    # Reversed, so that a tensor that occurs twice has its first index.
    indices = {id(value): index for index, value in reversed(list(enumerate(call.tensors)))}
    operands = tuple((indices[id(value)], shard) for value, shard in strategy.operands)
    gathered = any(v.shard is not None and v.shard != shard for v, shard in strategy.operands)
    shards = [*(shard for _, shard in operands), *strategy.outputs]
    once = unknown or all(shard is None for shard in shards)
    compilable = not strategy.reads_position and call.func.overloadpacket not in _NOT_COMPILED
    return Template(action(strategy, metas, once=once, compilable=compilable), operands, gathered, unknown)


def action(strategy: OpStrategy, metas: Any, *, once: bool, compilable: bool) -> Action:
    """Return the action of a strategy for results of the given shapes."""
    single = isinstance(metas, Tensor)
    return Action(
        (metas,) if single else tuple(metas),
        single,
        once,
        tuple(strategy.outputs),
        strategy.run,
        None if once else strategy.reduce,
        strategy.view,
        strategy.light,
        compilable,
    )
