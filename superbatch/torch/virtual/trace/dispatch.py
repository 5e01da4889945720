"""Dispatch of an operation on virtual tensors: record it, make a view, write, or return numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from superbatch.errors import WindowError

from ..ir.calls import mapped, written_by
from ..ir.recorder import Recorder
from ..ir.values import Value
from ..rules.decompositions import is_composite
from ..run.memo import Form
from . import composites
from .aliases import assign, current, functional_of, view, with_defaults
from .paranoid_composites import compared
from .randomness import drawn_as_the_batch
from .tensor import VirtualTensor
from .unsupported import REFUSED

aten: Any = torch.ops.aten


def dispatch(recording: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dispatch an operation on virtual tensors."""
    if recording.paranoid and recording.open:
        return compared(recording, func, args, kwargs, _done)
    return _done(recording, func, args, kwargs)


def _done(recording: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not recording.open:
        return _with_numbers(recording, func, args, kwargs)
    if torch.is_inference_mode_enabled():
        # Inference tensors have no version counter, though autograd gives each view one.
        with torch.inference_mode(mode=False):
            return _done(recording, func, args, kwargs)
    kind = _kind_of(func)
    if kind.answer is not None:
        return kind.answer(recording, *args, **kwargs)
    if kind.composite:  # inside a decomposition; the program's own are decomposed above us
        return func.decompose(*args, **kwargs)
    if kind.writes:
        return _write(recording, func, args, kwargs)
    if kind.view and isinstance(args[0], VirtualTensor):
        return view(recording, args[0], func, args[1:], kwargs)
    if kind.several:  # before the rules; for other arguments the composite returns NotImplemented
        result = composites.attempt(recording, func, args, kwargs)
        if result is not NotImplemented:
            return result
    return recording.shown(recording.compute(func, *recording.values(args, kwargs)))


class _Kind(NamedTuple):
    """Kind of an operator; cached, because finding it takes several lookups in schema, tags and tables."""

    answer: Callable[..., Any] | None  # computes the result itself: a number, or a list of views
    composite: bool
    writes: bool
    view: bool
    several: bool  # a composite exists, for some arguments at least


@cache
def _kind_of(func: Any) -> _Kind:
    answer = _ANSWERS.get(func, composites.LISTS.get(func))
    several = composites.found(func) is not None
    return _Kind(answer, is_composite(func), func._schema.is_mutable, func.is_view, several)


def _with_numbers(recording: Recorder, func: Any, args: Any, kwargs: Any, given: Any = None) -> Any:
    """Run an operation on real tensors: those in `given`, by id of the virtual tensor, or its numbers."""

    def one(item: Any) -> Any:
        if given and id(item) in given:
            return given[id(item)]
        return recording.numbers(item) if isinstance(item, VirtualTensor) else item

    def each(arg: Any) -> Any:
        return [one(item) for item in arg] if isinstance(arg, (list, tuple)) else one(arg)

    return func(*(each(arg) for arg in args), **{name: each(arg) for name, arg in kwargs.items()})


# -- writing in place ---------------------------------------------------------------------------------------


def _write(recording: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    functional, target = functional_of(func), args[0] if args else None
    if functional is None or not isinstance(target, VirtualTensor) or "out" in kwargs:
        return _write_with_numbers(recording, func, args, kwargs)
    args = with_defaults(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags:  # e.g. squeeze_: changes the shape and writes no numbers
        return _reshape(recording, func, functional, args, kwargs)
    drawn_whole = recording.randomness.as_the_batch or kwargs.get("generator") is not None
    if drawn_whole and torch.Tag.nondeterministic_seeded in func.tags:
        # The in-place operator itself: the functional one may draw in another memory order.
        form = Form(func, *recording.values(args, kwargs), recording.samples)
        assign(recording, target, drawn_as_the_batch(recording, form.call()))
        return target
    result = composites.attempt(recording, functional, args, kwargs)
    if result is NotImplemented:
        result = recording.compute(functional, *recording.values(args, kwargs))
    assign(recording, target, result if isinstance(result, Value) else recording.value(result))
    return target


def _reshape(recording: Recorder, func: Any, functional: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run `squeeze_`, `t_` and the like: the same memory in another shape."""
    target: VirtualTensor = args[0]
    other = view(recording, target, functional, args[1:], kwargs)
    target.virtual.become(other.virtual)
    with no_dispatch():
        func(*args, **kwargs)  # on the wrapper itself: the sizes that the program reads
    return target


def _write_with_numbers(recording: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a write on numbers: into a real tensor, into several tensors, or without a functional form."""
    written = written_by(func, args, kwargs)
    for arg in (*args, *kwargs.values()):
        mapped(arg, recording.note_leaf)
    # Pending operations read the numbers from before the write.
    recording.readings.before(func, args, kwargs)
    virtual = [item for item in written if isinstance(item, VirtualTensor)]
    # The operator reads the rows of all samples at once, so it is logged as one that gathers.
    full_values: list[Value] = []

    def take(item: VirtualTensor) -> None:
        owner = item.virtual.recording
        full_values.append(owner.gathered(current(owner, item), "gathered", func))

    for arg in (*args, *kwargs.values()):
        mapped(arg, take, VirtualTensor)
    # Cloned: pending operations may still read the numbers from before the write.
    real = {id(item): recording.numbers(item).clone() for item in virtual}
    result = _with_numbers(recording, func, args, kwargs, real)
    for item in virtual:
        assign(recording, item, recording.given(real[id(item)]))
    # An in-place operator returns the tensor that it was given, not a new one.
    returns = func._schema.returns
    if len(written) == 1 and len(returns) == 1 and returns[0].alias_info is not None:
        return written[0]
    return recording.shown(mapped(result, recording.given)) if virtual else result


# -- numbers ------------------------------------------------------------------------------------------------


def _number(recording: Recorder, tensor: Tensor) -> Any:
    return recording.numbers(tensor).item()


def _equal(recording: Recorder, first: Tensor, second: Tensor) -> bool:
    return torch.equal(recording.numbers(first), recording.numbers(second))


def _refuse_memory(recording: Recorder, *args: Any, **kwargs: Any) -> Any:
    raise WindowError(
        "resize_() and set_() cannot change a virtual tensor: it has no memory. "
        "Use an operation that returns a new tensor."
    )


_ANSWERS: dict[Any, Any] = {
    aten._local_scalar_dense.default: _number,
    aten.item.default: _number,
    aten.equal.default: _equal,
    aten.set_.source_Storage: _refuse_memory,
    aten.set_.source_Tensor: _refuse_memory,
    aten.resize_.default: _refuse_memory,
    **REFUSED,
}
