"""Views, and writing in place, in a recording in which nothing is ever written.

Tensors that share memory share a `Storage`, and know by which steps they are views of it. A write makes a new
value, puts it back through the steps, and gives the storage a new version; views of an older version are made
again when they are read.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from superbatch.errors import WindowError, explain

from ..ir.recorder import Recorder
from ..ir.values import Value
from .tensor import ViewStep, VirtualTensor

aten: Any = torch.ops.aten

# In place -> returning, where the name differs by more than an underscore.
_OTHER_NAMES: dict[Any, Any] = {
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.uniform_.default: aten.uniform.default,
    aten.normal_.default: aten.normal_functional.default,
    aten.transpose_.default: aten.transpose.int,
    aten.copy_.Tensor: aten.copy.default,
    aten.floor_divide_.Tensor: aten.floor_divide.default,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,  # of the same name is a number to the power of a tensor
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
    aten.float_power_.Scalar: aten.float_power.Tensor_Scalar,
    aten.float_power_.Tensor: aten.float_power.Tensor_Tensor,
    aten.ldexp_.default: aten.ldexp.Tensor,
}


@cache
def functional_of(func: Any) -> Any:
    """Return the operator that returns what this one writes; None if there is none.

    Examples:
        >>> functional_of(torch.ops.aten.add_.Tensor)
        <OpOverload(op='aten.add', overload='Tensor')>
    """
    if func in _OTHER_NAMES:
        return _OTHER_NAMES[func]
    namespace, name = func._schema.name.split("::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    found = None if packet is None else getattr(packet, func._overloadname, None)
    if found is None or found._schema.is_mutable or len(found._schema.returns) != 1:
        return None
    first = found._schema.arguments[0]  # of polygamma(n, x), beside polygamma_(x, n), it is a number
    return found if str(first.type).startswith(("Tensor", "List[Tensor")) else None


def with_defaults(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return positional arguments with the defaults that were left out.

    The operator that returns its result may have none: ``bernoulli_(p=0.5)`` beside ``bernoulli(x, p)``.
    """
    if func not in _OTHER_NAMES:
        return args
    told = func._schema.arguments[len(args) :]
    return (*args, *(arg.default_value for arg in told if not arg.kwarg_only and arg.name not in kwargs))


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


def _put_back(recording: Recorder, step: ViewStep, base: Value, new: Value) -> Value:
    """Return the base of a view after the view was written.

    Args:
        recording: of both.
        step: makes the view from the base.
        base: before.
        new: the view after.

    Raises:
        WindowError: the view cannot be written.
    """
    func, args, kwargs = step
    if func in _SCATTERS:
        return recording.compute(_SCATTERS[func], (base, new, *args), kwargs)
    if func in _RESHAPES:
        return recording.compute(aten._reshape_copy.default, (new, list(base.meta.shape)), {})
    if func in (aten.t.default, aten.transpose.int):
        return recording.compute(func, (new, *args), kwargs)
    if func is aten.permute.default:
        dims = [dim % base.meta.dim() for dim in args[0]]
        return recording.compute(func, (new, [dims.index(dim) for dim in range(len(dims))]), {})
    if func is aten.view_as_real.default:
        return recording.compute(aten.view_as_complex.default, (new,), {})
    if func is aten.view_as_complex.default:
        return recording.compute(aten.view_as_real.default, (new,), {})
    raise WindowError(
        explain(
            f"a tensor of the virtual batch, a view made by {func}, that is written in place",
            "this kind of view cannot be written",
            "write into a clone of it",
        )
    )


def current(recording: Recorder, tensor: VirtualTensor) -> Value:
    """Return the value of a tensor, after what was written into what it shares memory with."""
    state = tensor.virtual
    storage = state.storage
    if state.seen != storage.version:
        value = storage.value
        for step in state.steps:
            value = recording.compute(step.func, (value, *step.args), step.kwargs)
        state.show(value.handle(), storage.version)
    return state.handle.value


def view(
    recording: Recorder, base: VirtualTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return a view of a tensor."""
    state = base.virtual
    if state.recording is not recording:
        return func(recording.numbers(base), *args, **kwargs)
    value = current(recording, base)
    same = func in (aten.detach.default, aten.alias.default)
    if not same:
        value = recording.compute(func, (value, *args), kwargs)
    steps = state.steps if same else (*state.steps, ViewStep(func, args, kwargs))
    return VirtualTensor(recording, value, state.storage, steps)


def _adopt(recording: Recorder, target: VirtualTensor, value: Value) -> None:
    """Take over a tensor of another block, such as a momentum that an optimizer made there."""
    if target.virtual.steps:
        raise WindowError(
            explain(
                "a tensor that is a view of one of another virtual batch, written in place",
                "what it is a view of cannot be written here",
                "write into a clone of it",
            )
        )
    target.virtual.restart(recording, value.handle())


def assign(recording: Recorder, target: VirtualTensor, value: Value) -> None:
    """Write a value into a tensor, and so into all that share its memory."""
    if value.meta.shape != target.shape:
        value = recording.compute(aten.expand.default, (value, list(target.shape)), {})
    if value.meta.dtype != target.dtype:
        value = recording.compute(aten._to_copy.default, (value,), {"dtype": target.dtype})
    state = target.virtual
    if state.recording is not recording:
        _adopt(recording, target, value)
        return
    storage, steps = state.storage, state.steps
    bases = [storage.value]
    for step in steps[:-1]:
        bases.append(recording.compute(step.func, (bases[-1], *step.args), step.kwargs))
    changed = value
    for step, base in zip(reversed(steps), reversed(bases), strict=False):
        changed = _put_back(recording, step, base, changed)
    storage.write(changed)
    state.show(value.handle(), storage.version)
