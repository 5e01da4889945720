"""Cache of recorded operations, keyed by operator, arguments, shapes, dtypes and batch dimension.

A training records the same operations in each update. How to do one micro-batch by micro-batch, and what
shapes come out, depends on the operator, on its arguments that are no tensors, and of its tensors on shape,
strides, dtype, device and where the samples are: on nothing that a tensor holds. So it is a function of these
alone, and is remembered for the process like any such function. What is remembered holds neither numbers nor
values of a block: rules are shown stand-ins.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from superbatch.torch.memory.out_of_memory import out_of_memory

from ..ir.calls import Call, Path, Recipe, filled, results, substituted
from ..ir.layout import Layout
from ..ir.values import Action, Operand, Value
from ..rules.decompositions import AT_ONCE, decomposition
from ..rules.lookup import draws, find
from ..rules.shape_rules import LIKES


class OpTraits(NamedTuple):
    """Traits of an operator, cached because the tables are slow to ask.

    Attributes:
        at_once: it runs on whole tensors when it is met.
        like: it makes a new tensor of the shape of another.
        draws: random numbers.
    """

    at_once: bool
    like: bool
    draws: bool


@cache
def traits(func: Any) -> OpTraits:
    """Return the traits of an operator."""
    return OpTraits(func in AT_ONCE, func.overloadpacket in LIKES, draws(func))


class Template(NamedTuple):
    """Cached action of all calls of a form.

    Attributes:
        action: what each of them records.
        operands: which of the call's tensors it reads, and how.
        gathered: one of them is read otherwise than by its samples, so that it is put together first.
        unknown: because there is no rule for the operator.
    """

    action: Action
    operands: tuple[tuple[int, Layout | None], ...]
    gathered: bool
    unknown: bool


class Form:
    """A call, and what is the same in all calls of its form.

    Args:
        func: the operator.
        args: positional, with a `Value` for each tensor.
        kwargs: by name.
        samples: of the batch.

    Attributes:
        tensors, paths: all values in order, and where they are.
        key: equal for equal forms; None if an argument is none of `_PLAIN`, whose equality is not known.
    """

    __slots__ = ("args", "func", "key", "kwargs", "paths", "samples", "tensors")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], samples: int) -> None:
        self.func, self.args, self.kwargs, self.samples = func, args, kwargs, samples
        self.tensors: list[Value] = []
        self.paths: list[Path] = []
        # A number and a tensor of integers may give one of the default dtype.
        parts: list[Any] = [id(func), samples, torch.get_default_dtype()]
        known = True
        for position, arg in enumerate(args):
            known &= self._describe(arg, (position,), parts)
        for name, arg in kwargs.items():
            parts.append(name)
            known &= self._describe(arg, (name,), parts)
        if len(self.tensors) > 1 and len(set(map(id, self.tensors))) < len(self.tensors):
            which = {id(value): index for index, value in enumerate(self.tensors)}
            # Rules may ask whether two arguments are the same.
            parts.append(tuple(which[id(value)] for value in self.tensors))
        self.key = tuple(parts) if known else None

    def _describe(self, arg: Any, path: Path, parts: list[Any]) -> bool:
        kind = type(arg)
        if kind is Value:
            self.tensors.append(arg)
            self.paths.append(path)
            # Metas are shared by form, and live as long as what is remembered.
            parts += (id(arg.meta), arg.layout, arg.device)
            return True
        if kind is list or kind is tuple or isinstance(arg, (list, tuple)):
            inner: list[Any] = []
            known = True
            for position, item in enumerate(arg):
                known &= self._describe(item, (*path, position), inner)
            parts += (list, tuple(inner))
            return known
        if kind is float and not (arg < 0 or arg > 0):
            arg = repr(arg)  # 0.0 equals -0.0, and nan not itself
        parts += (kind, arg)  # 1, 1.0 and True are equal, and give other dtypes
        return kind in _PLAIN

    def call(self) -> Call:
        """Return it as rules take it."""
        return Call(self.func, self.args, self.kwargs, self.tensors, self.paths, self.samples)


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
    """Return the template of a call, which depends on its form alone.

    Args:
        form: of an operator that draws no random numbers.

    Returns:
        None where the call has to be inspected each time: it is done as several others, its shape depends on
        numbers, or an argument is of a kind that is not known.
    """
    if form.key is None:
        return None
    key = _Key(form.key)
    key.form = form
    return _remembered(key).template


# torch decomposes them into something else: another loss (2.13), a sixth that the kernel rounds to float32.
_NOT_COMPILED = {torch.ops.aten.multilabel_margin_loss_forward, torch.ops.aten.hardsigmoid_backward}


class _Known(NamedTuple):
    template: Template | None
    held: tuple[Any, ...]  # whose ids are in the key


class _Key(tuple[Any, ...]):
    """Key of a form, with the form itself until it is evaluated."""

    form: Form | None


@lru_cache(maxsize=1 << 13)
def _remembered(key: _Key) -> _Known:
    form, key.form = key.form, None
    assert form is not None
    held = (form.func, *(value.meta for value in form.tensors))
    return _Known(_made(_with_stand_ins(form)), held)


def _with_stand_ins(form: Form) -> Call:
    """The call with values that are nothing but their form."""
    places = {id(value): Value(value.meta, value.device, value.layout) for value in form.tensors}
    tensors = [places[id(value)] for value in form.tensors]
    args, kwargs = substituted(form.args, form.kwargs, form.paths, tensors)
    return Call(form.func, tuple(args), kwargs, tensors, form.paths, form.samples)


def _made(call: Call) -> Template | None:
    recipe = find(call)
    batch = any(value.layout is not None for value in call.tensors)
    if recipe is None and batch and decomposition(call.func) is not None:
        return None
    try:
        metas = results(call, recipe)
    except (NotImplementedError, RuntimeError, TypeError, AssertionError) as error:
        if out_of_memory(error):
            raise
        return None
    if metas is None:
        return None
    unknown = recipe is None
    if recipe is None:
        count = 1 if isinstance(metas, Tensor) else len(metas)
        recipe = Recipe([Operand(value, None) for value in call.tensors], [None] * count, filled(call))
    places = {id(value): index for index, value in reversed(list(enumerate(call.tensors)))}
    operands = tuple((places[id(value)], layout) for value, layout in recipe.operands)
    gathered = any(v.layout is not None and v.layout != layout for v, layout in recipe.operands)
    layouts = [*(layout for _, layout in operands), *recipe.outputs]
    once = unknown or all(layout is None for layout in layouts)
    known = not recipe.placed and call.func.overloadpacket not in _NOT_COMPILED
    return Template(action(recipe, metas, once=once, known=known), operands, gathered, unknown)


def action(recipe: Recipe, metas: Any, *, once: bool, known: bool) -> Action:
    """Return the action of a recipe, for results of these shapes."""
    single = isinstance(metas, Tensor)
    return Action(
        (metas,) if single else tuple(metas),
        single,
        once,
        tuple(recipe.outputs),
        recipe.run,
        None if once else recipe.reduce,
        recipe.view,
        recipe.light,
        known,
    )
