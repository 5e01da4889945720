"""Dispatch of operations on virtual tensors: recorded, views, writes in place, and numbers."""

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
from ..run.memo import KeyedCall
from . import composites
from .aliases import assign, current, functional_of, view, with_defaults
from .paranoid_composites import compared
from .randomness import draw_full_batch
from .tensor import VirtualTensor
from .unsupported import REFUSED

aten: Any = torch.ops.aten


def dispatch(recording: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dispatch an operation on virtual tensors."""
    if recording.paranoid and recording.open:
        return compared(recording, func, args, kwargs, _dispatched)
    return _dispatched(recording, func, args, kwargs)


def _dispatched(recording: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not recording.open:
        return _on_real_tensors(recording, func, args, kwargs)
    if torch.is_inference_mode_enabled():
        # Inference tensors have no version counter, which autograd needs for views.
        with torch.inference_mode(mode=False):
            return _dispatched(recording, func, args, kwargs)
    kind = _kind_of(func)
    if kind.handler is not None:
        return kind.handler(recording, *args, **kwargs)
    if kind.composite:  # called by a decomposition; torch decomposes the program's composites
        return func.decompose(*args, **kwargs)
    if kind.writes:
        return _write(recording, func, args, kwargs)
    if kind.view and isinstance(args[0], VirtualTensor):
        return view(recording, args[0], func, args[1:], kwargs)
    if kind.has_composite:  # before the rules
        result = composites.attempt(recording, func, args, kwargs)
        if result is not NotImplemented:
            return result
    return recording.wrapped(recording.compute(func, *recording.values(args, kwargs)))


class _Kind(NamedTuple):
    """Kind of an operator, cached to save several lookups in schema, tags and tables."""

    handler: Callable[..., Any] | None  # computes a number or a list of views itself
    composite: bool
    writes: bool
    view: bool
    has_composite: bool  # for some arguments at least


@cache
def _kind_of(func: Any) -> _Kind:
    handler = _HANDLERS.get(func, composites.LISTS.get(func))
    has_composite = composites.composite_of(func) is not None
    return _Kind(handler, is_composite(func), func._schema.is_mutable, func.is_view, has_composite)


def _on_real_tensors(recording: Recorder, func: Any, args: Any, kwargs: Any, real: Any = None) -> Any:
    """Run an operation on real tensors: those in `real`, by id of the virtual one, else its numbers."""

    def one(item: Any) -> Any:
        if real and id(item) in real:
            return real[id(item)]
        return recording.numbers(item) if isinstance(item, VirtualTensor) else item

    # Operators take tensors, or lists of them, as in cat(); lists are never nested.
    def each(arg: Any) -> Any:
        return [one(item) for item in arg] if isinstance(arg, (list, tuple)) else one(arg)

    return func(*(each(arg) for arg in args), **{name: each(arg) for name, arg in kwargs.items()})


# -- writing in place ---------------------------------------------------------------------------------------


def _write(recording: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    functional, target = functional_of(func), args[0] if args else None
    if functional is None or not isinstance(target, VirtualTensor) or "out" in kwargs:
        return _write_on_real_tensors(recording, func, args, kwargs)
    args = with_defaults(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags:  # squeeze_ changes the shape and writes no numbers
        return _reshape(recording, func, functional, args, kwargs)
    draws_full_batch = recording.randomness.as_full_batch or kwargs.get("generator") is not None
    if draws_full_batch and torch.Tag.nondeterministic_seeded in func.tags:
        # The functional operator may draw its numbers in another memory order.
        keyed = KeyedCall(func, *recording.values(args, kwargs), recording.samples)
        assign(recording, target, draw_full_batch(recording, keyed.call()))
        return target
    result = composites.attempt(recording, functional, args, kwargs)
    if result is NotImplemented:
        result = recording.compute(functional, *recording.values(args, kwargs))
    assign(recording, target, result if isinstance(result, Value) else recording.value(result))
    return target


def _reshape(recording: Recorder, func: Any, functional: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run `squeeze_`, `t_` or another operator that changes the shape in place."""
    target: VirtualTensor = args[0]
    other = view(recording, target, functional, args[1:], kwargs)
    target.virtual.alias(other.virtual)
    with no_dispatch():
        func(*args, **kwargs)  # changes the wrapper's shape, which the program reads
    return target


def _write_on_real_tensors(recording: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a write that cannot be recorded: into a real or several tensors, or without functional form."""
    written = written_by(func, args, kwargs)
    for arg in (*args, *kwargs.values()):
        mapped(arg, recording.register_leaves)
    # Copied, because pending operations read the numbers from before the write.
    recording.readings.copy_before(func, args, kwargs)
    virtual = [item for item in written if isinstance(item, VirtualTensor)]
    # The operator reads the rows of all samples at once, so it is logged as gathering.
    full_values: list[Value] = []

    def take(item: VirtualTensor) -> None:
        owner = item.virtual.recording
        full_values.append(owner.gathered(current(owner, item), "gathered", func))

    for arg in (*args, *kwargs.values()):
        mapped(arg, take, VirtualTensor)
    # Cloned: pending operations may still read the numbers from before the write.
    real = {id(item): recording.numbers(item).clone() for item in virtual}
    result = _on_real_tensors(recording, func, args, kwargs, real)
    for item in virtual:
        assign(recording, item, recording.from_real(real[id(item)]))
    # An in-place operator returns its argument, not a new tensor.
    returns = func._schema.returns
    if len(written) == 1 and len(returns) == 1 and returns[0].alias_info is not None:
        return written[0]
    return recording.wrapped(mapped(result, recording.from_real)) if virtual else result


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


_HANDLERS: dict[Any, Any] = {
    aten._local_scalar_dense.default: _number,
    aten.item.default: _number,
    aten.equal.default: _equal,
    aten.set_.source_Storage: _refuse_memory,
    aten.set_.source_Tensor: _refuse_memory,
    aten.resize_.default: _refuse_memory,
    **REFUSED,
}
