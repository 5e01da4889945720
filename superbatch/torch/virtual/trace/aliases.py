"""Views and in-place writes in a recording whose values are immutable.

Tensors that share memory share a `Storage`, and each stores the steps that make it a view of that storage. A
write computes a new view, scatters the view into the base through the steps in reverse, and increments the
version of the storage. A view of an older version is recomputed when it is read.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from superbatch.errors import WindowError

from ..ir.recorder import Recorder
from ..ir.values import Value
from .tensor import ViewStep, VirtualTensor

aten: Any = torch.ops.aten

# From in-place operators to functional ones, if the names differ by more than the underscore.
_OTHER_NAMES: dict[Any, Any] = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.uniform_.default: aten.uniform.default,
    aten.normal_.default: aten.normal_functional.default,
    aten.transpose_.default: aten.transpose.int,
    aten.copy_.Tensor: aten.copy.default,
    aten.floor_divide_.Tensor: aten.floor_divide.default,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,  # aten.pow.Scalar has a number as the base
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
    aten.float_power_.Scalar: aten.float_power.Tensor_Scalar,
    aten.float_power_.Tensor: aten.float_power.Tensor_Tensor,
    aten.ldexp_.default: aten.ldexp.Tensor,
}


@cache
def functional_of(func: Any) -> Any:
    """Return the functional form of an in-place operator; None if it has none.

    Examples:
        >>> functional_of(torch.ops.aten.add_.Tensor)
        <OpOverload(op='aten.add', overload='Tensor')>
    """
    if func in _OTHER_NAMES:
        return _OTHER_NAMES[func]
    namespace, name = func._schema.name.split("::")
    if not name.endswith("_") or name.endswith("__"):  # __lshift__ is not in place
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    overload = None if packet is None else getattr(packet, func._overloadname, None)
    if overload is None or overload._schema.is_mutable or len(overload._schema.returns) != 1:
        return None
    first = overload._schema.arguments[0]  # polygamma_(x, n) writes x, but polygamma(n, x) has a number first
    return overload if str(first.type).startswith(("Tensor", "List[Tensor")) else None


def with_defaults(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the positional arguments of an in-place operator, followed by its defaults."""
    if func not in _OTHER_NAMES:
        return args
    # The functional form may lack the default: bernoulli_(x, p=0.5), but bernoulli(x, p).
    missing = func._schema.arguments[len(args) :]
    return (*args, *(arg.default_value for arg in missing if not arg.kwarg_only and arg.name not in kwargs))


_SCATTERS: dict[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
}
_RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten._reshape_alias.default,
}


def _base_after_write(recording: Recorder, step: ViewStep, base: Value, new: Value) -> Value:
    """Return the base of a view made by `step`, after a write that turned the view into `new`.

    Raises:
        WindowError: a view by this operation cannot be written.
    """
    func, args, kwargs = step
    if func in _SCATTERS:
        return recording.compute(_SCATTERS[func], (base, new, *args), kwargs)
    if func in _RESHAPES:  # the view has all elements of the base, in the same order
        return recording.compute(aten._reshape_copy.default, (new, list(base.meta.shape)), {})
    if func in (aten.t.default, aten.transpose.int):
        return recording.compute(func, (new, *args), kwargs)
    if func is aten.permute.default:
        # Undone by the inverse permutation.
        dims = [dim % base.meta.dim() for dim in args[0]]
        return recording.compute(func, (new, [dims.index(dim) for dim in range(len(dims))]), {})
    if func is aten.view_as_real.default:
        return recording.compute(aten.view_as_complex.default, (new,), {})
    if func is aten.view_as_complex.default:
        return recording.compute(aten.view_as_real.default, (new,), {})
    raise WindowError(
        f"A view of the virtual batch made by {func} cannot be written in place. Write into a clone of it."
    )


def current(recording: Recorder, tensor: VirtualTensor) -> Value:
    """Return the value of a tensor after all writes into the memory that it shares."""
    state = tensor.virtual
    storage = state.storage
    if state.version != storage.version:  # the tensor, its base or another view was written
        value = storage.value
        for step in state.steps:
            value = recording.compute(step.func, (value, *step.args), step.kwargs)
        state.set_value(value.handle(), storage.version)
    return state.handle.value


def view(
    recording: Recorder, base: VirtualTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return a view of a tensor."""
    state = base.virtual
    if state.recording is not recording:
        # The values of another block belong to another batch, so the tensor enters as a real one.
        return func(recording.numbers(base), *args, **kwargs)
    value = current(recording, base)
    # Called by autograd for a new tensor with the same value.
    same = func in (aten.detach.default, aten.alias.default)
    if not same:
        value = recording.compute(func, (value, *args), kwargs)
    steps = state.steps if same else (*state.steps, ViewStep(func, args, kwargs))
    return VirtualTensor(recording, value, state.storage, steps)


def _adopt(recording: Recorder, target: VirtualTensor, value: Value) -> None:
    """Move a tensor of another block into this one, such as a momentum that an optimizer made there."""
    if target.virtual.steps:  # its base belongs to the other block, which may have ended
        raise WindowError(
            "A view of another virtual batch cannot be written in place. Write into a clone of it."
        )
    target.virtual.reset(recording, value.handle())


def assign(recording: Recorder, target: VirtualTensor, value: Value) -> None:
    """Write a value into a tensor, and into all tensors that share its memory."""
    # Like copy_, broadcast to the shape of the target and cast to its dtype.
    if value.meta.shape != target.shape:
        value = recording.compute(aten.expand.default, (value, list(target.shape)), {})
    if value.meta.dtype != target.dtype:
        value = recording.compute(aten._to_copy.default, (value,), {"dtype": target.dtype})
    state = target.virtual
    if state.recording is not recording:
        _adopt(recording, target, value)
        return
    storage, steps = state.storage, state.steps
    # Forward through the steps to compute the base of each view, then backward to write into each base.
    bases = [storage.value]
    for step in steps[:-1]:
        bases.append(recording.compute(step.func, (bases[-1], *step.args), step.kwargs))
    changed = value
    for step, base in zip(reversed(steps), reversed(bases), strict=False):
        changed = _base_after_write(recording, step, base, changed)
    storage.write(changed)
    state.set_value(value.handle(), storage.version)
