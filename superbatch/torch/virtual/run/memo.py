"""Cache of recorded operations, keyed by operator, arguments, shapes, dtypes and batch dimension.

Every update records the same operations. The strategy of an operation and the shapes of its results depend on
the operator, its other arguments, and the shape, strides, dtype, device and sharding of each tensor, never on
numbers. So both are cached for the process. An entry holds no numbers and no values of a block: the rules see
stand-ins.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from superbatch.torch.memory.out_of_memory import out_of_memory

from ..ir.calls import Call, OpStrategy, Path, filled, results, substituted
from ..ir.shard import Shard
from ..ir.values import Action, Operand, Value
from ..rules.decompositions import AT_ONCE, decomposition
from ..rules.lookup import draws, find
from ..rules.shape_rules import LIKES


class OpTraits(NamedTuple):
    """Traits of an operator that decide how it is recorded.

    Attributes:
        at_once: it runs immediately, on full tensors.
        like: it makes a new tensor with the shape of another (`zeros_like`).
        draws: it draws random numbers.
    """

    at_once: bool
    like: bool
    draws: bool


@cache  # one lookup per operation in place of three in the tables
def traits(func: Any) -> OpTraits:
    """Return the traits of an operator."""
    return OpTraits(func in AT_ONCE, func.overloadpacket in LIKES, draws(func))


class Template(NamedTuple):
    """Cached action of all calls of a form.

    Attributes:
        action: what each call records.
        operands: (index of the tensor in the call, sharding in which it is read).
        gathered: an operand has to be gathered first, because it is not read by its own sharding.
        unknown: the operator has no rule.
    """

    action: Action
    operands: tuple[tuple[int, Shard | None], ...]
    gathered: bool
    unknown: bool


class Form:
    """Call of an operator, with the key that all calls of the same form share.

    Args:
        func: the operator.
        args: positional arguments, with a `Value` for each tensor.
        kwargs: keyword arguments.
        samples: number of samples of the batch.

    Attributes:
        tensors, paths: all values in order, and their places in the arguments.
        key: equal for equal forms; None if the type of an argument is not in `_PLAIN`.
    """

    __slots__ = ("args", "func", "key", "kwargs", "paths", "samples", "tensors")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], samples: int) -> None:
        self.func, self.args, self.kwargs, self.samples = func, args, kwargs, samples
        self.tensors: list[Value] = []
        self.paths: list[Path] = []
        # The default dtype is part of the key: an integer tensor times a float has that dtype.
        parts: list[Any] = [id(func), samples, torch.get_default_dtype()]
        known = True
        for position, arg in enumerate(args):
            known &= self._describe(arg, (position,), parts)
        for name, arg in kwargs.items():
            parts.append(name)
            known &= self._describe(arg, (name,), parts)
        if len(self.tensors) > 1 and len(set(map(id, self.tensors))) < len(self.tensors):
            which = {id(value): index for index, value in enumerate(self.tensors)}
            # Rules may compare arguments by identity: mm(x, x) is another form than mm(x, y).
            parts.append(tuple(which[id(value)] for value in self.tensors))
        self.key = tuple(parts) if known else None

    def _describe(self, arg: Any, path: Path, parts: list[Any]) -> bool:
        kind = type(arg)
        if kind is Value:
            self.tensors.append(arg)
            self.paths.append(path)
            # `blank` makes one meta per form, and the cache entry keeps it alive: the id stands for the form.
            parts += (id(arg.meta), arg.shard, arg.device)
            return True
        if kind is list or kind is tuple or isinstance(arg, (list, tuple)):
            inner: list[Any] = []
            known = True
            for position, item in enumerate(arg):
                known &= self._describe(item, (*path, position), inner)
            parts += (list, tuple(inner))
            return known
        if kind is float and not (arg < 0 or arg > 0):
            arg = repr(arg)  # 0.0 == -0.0, though 1 / x differs; nan != nan would never be found again
        parts += (kind, arg)  # 1 == 1.0 == True, but the dtypes of the results differ
        return kind in _PLAIN

    def call(self) -> Call:
        """Return the call in the form that rules take."""
        return Call(self.func, self.args, self.kwargs, self.tensors, self.paths, self.samples)


# Types whose values are immutable and compare by content. A SymInt or a generator does not.
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


def template(form: Form) -> Template | None:
    """Return the cached template of a call.

    Args:
        form: the call of an operator that draws no random numbers.

    Returns:
        None if nothing can be cached: the call decomposes into others, its shape depends on numbers, or the
        type of an argument is unknown.
    """
    if form.key is None:
        return None
    key = _Key(form.key)
    key.form = form
    return _remembered(key).template


# Inductor's decompositions of these differ from the kernels: another loss (torch 2.13), and a factor 1/6 that
# the kernel rounds to float32.
_NOT_COMPILED = {torch.ops.aten.multilabel_margin_loss_forward, torch.ops.aten.hardsigmoid_backward}


class _Known(NamedTuple):
    template: Template | None
    held: tuple[Any, ...]  # keeps alive the objects whose ids are in the key


class _Key(tuple[Any, ...]):
    """Cache key of a form; holds the form until it is evaluated."""

    form: Form | None


@lru_cache(maxsize=1 << 13)
def _remembered(key: _Key) -> _Known:
    form, key.form = key.form, None  # or the cache would keep values of the first block alive
    assert form is not None
    held = (form.func, *(value.meta for value in form.tensors))
    return _Known(_made(_with_stand_ins(form)), held)


def _with_stand_ins(form: Form) -> Call:
    """Return the call with stand-ins: values that have a form and no node or numbers."""
    places = {id(value): Value(value.meta, value.device, value.shard) for value in form.tensors}
    tensors = [places[id(value)] for value in form.tensors]
    args, kwargs = substituted(form.args, form.kwargs, form.paths, tensors)
    return Call(form.func, tuple(args), kwargs, tensors, form.paths, form.samples)


def _made(call: Call) -> Template | None:
    strategy = find(call)
    batch = any(value.shard is not None for value in call.tensors)
    if strategy is None and batch and decomposition(call.func) is not None:
        return None  # recorded as simpler operations, each of which has its own template
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
        strategy = OpStrategy([Operand(value, None) for value in call.tensors], [None] * count, filled(call))
    # Reversed: of a tensor that comes twice the first index is kept.
    places = {id(value): index for index, value in reversed(list(enumerate(call.tensors)))}
    operands = tuple((places[id(value)], shard) for value, shard in strategy.operands)
    gathered = any(v.shard is not None and v.shard != shard for v, shard in strategy.operands)
    shards = [*(shard for _, shard in operands), *strategy.outputs]
    once = unknown or all(shard is None for shard in shards)
    known = not strategy.placed and call.func.overloadpacket not in _NOT_COMPILED
    return Template(action(strategy, metas, once=once, known=known), operands, gathered, unknown)


def action(strategy: OpStrategy, metas: Any, *, once: bool, known: bool) -> Action:
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
        known,
    )
