"""Paranoid mode for composites, lists of views and in-place writes.

`paranoia.check` compares single operations that rules record. A composite (BatchNorm, means, losses,
recurrent layers, indexing) records several, and a write changes all tensors that share memory. So the
program's operation runs on full tensors here, and is compared with the tensors that the program gets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ir.calls import mapped
from ..ir.conjugates import lazy_conjugation
from ..ir.recorder import Recorder
from ..ir.references import REFERENCES, arguments_by_name, dropped
from ..ir.values import Value
from . import composites, ranks_reference
from .aliases import current
from .paranoia import compare
from .tensor import VirtualTensor

Dispatch = Callable[..., Any]  # (recording, operator, args, kwargs)
aten: Any = torch.ops.aten
_BATCH_NORM = {aten.native_batch_norm, aten.cudnn_batch_norm}
_BATCH_NORM_BACKWARD = {aten.native_batch_norm_backward, aten.cudnn_batch_norm_backward}


def compared(
    recording: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dispatch: Dispatch
) -> Any:
    """Run an operation, and compare its results with those on full tensors, like `paranoia.compare`."""
    if func._schema.is_mutable:
        return _compared_write(recording, func, args, kwargs, dispatch)
    if func is aten.native_dropout.default:
        return _compared_dropout(recording, func, args, kwargs, dispatch)
    if composites.composite_of(func) is None and func not in composites.LISTS:
        return dispatch(recording, func, args, kwargs)
    # Before the operation, because BatchNorm writes its running statistics.
    arguments = recording.values(args, kwargs)
    results = dispatch(recording, func, args, kwargs)
    values, inputs, (new_args, new_kwargs) = _full_tensors(recording, arguments)
    named = arguments_by_name(func, new_args, new_kwargs)
    ours = [recording.value(item) if isinstance(item, Tensor) else item for item in _flat(results)]
    with torch.no_grad(), lazy_conjugation():
        expected = _over_ranks(recording, func, args, named, ours)
        if expected is None:
            reference = REFERENCES.get(func.overloadpacket)
            expected = _flat(func(*new_args, **new_kwargs) if reference is None else reference(named))
            if func.overloadpacket in _BATCH_NORM:
                # The kernel has written the running statistics into copies.
                expected = [*expected[:3], *(named[name] for name in _running(named))]
    if func.overloadpacket in _BATCH_NORM:
        before = arguments_by_name(func, args, kwargs)
        ours = [*ours[:3], *(recording.value(before[name]) for name in _running(named))]
    _compare(recording, func, values, inputs, ours, expected)
    return results


def _running(named: dict[str, Any]) -> list[str]:
    return [name for name in ("running_mean", "running_var") if named[name] is not None]


def _over_ranks(
    recording: Recorder, func: Any, args: tuple[Any, ...], named: dict[str, Any], ours: list[Any]
) -> list[Any] | None:
    """Return the reference of a BatchNorm over ranks; None for any other operation."""
    ranks, packet = recording.ranks, func.overloadpacket
    if ranks is None:
        return None
    if packet in _BATCH_NORM and ranks.is_over_ranks(ours[1]):
        return ranks_reference.forward(recording, ranks, ours[1], named)
    if packet in _BATCH_NORM_BACKWARD and ranks.is_over_ranks(mean := recording.value(args[5])):
        # cuDNN's backward has no mask.
        mask = named.get("output_mask", (True, True, True))
        return ranks_reference.backward(recording, ranks, mean, named, mask=mask)
    return None


def _flat(results: Any) -> list[Any]:
    items = results if isinstance(results, (list, tuple)) else [results]
    return [leaf for item in items for leaf in (_flat(item) if isinstance(item, (list, tuple)) else [item])]


def _full_tensors(
    recording: Recorder, arguments: tuple[Any, Any]
) -> tuple[list[Value], list[Tensor], tuple[Any, Any]]:
    """Return the values, their full tensors, and the arguments with copies of these."""
    values: list[Value] = []
    for arg in (*arguments[0], *arguments[1].values()):
        mapped(arg, values.append, Value)
    unique = {id(value): value for value in values}
    numbers = recording.materialized([recording.gathered(value) for value in unique.values()])
    tensors = dict(zip(unique, numbers, strict=True))

    def copied(value: Value) -> Tensor:
        # Cloned, because the operation may write into its arguments.
        return tensors[id(value)].clone(memory_format=torch.contiguous_format)

    args = [mapped(arg, copied, Value) for arg in arguments[0]]
    kwargs = {name: mapped(arg, copied, Value) for name, arg in arguments[1].items()}
    return values, [tensors[id(value)] for value in values], (args, kwargs)


def _compare(
    recording: Recorder, func: Any, values: list[Value], inputs: list[Tensor], ours: Any, expected: Any
) -> None:
    # Some kernels return 16-bit statistics, but composites float32.
    cast = [
        full.to(value.meta.dtype) if isinstance(value, Value) and isinstance(full, Tensor) else full
        for value, full in zip(ours, expected, strict=False)
    ]
    compare(recording, func, values, inputs, ours, cast)


def _compared_dropout(recording: Recorder, func: Any, args: Any, kwargs: Any, dispatch: Dispatch) -> Any:
    """Compare the result of dropout with the product of its input and the mask that it returned."""
    arguments = recording.values(args, kwargs)
    results = dispatch(recording, func, args, kwargs)
    values, inputs, (new_args, new_kwargs) = _full_tensors(recording, arguments)
    named = arguments_by_name(func, new_args, new_kwargs)
    if named["train"] is not False:  # None also means training
        ours = [recording.value(item) for item in results]
        (mask,) = recording.materialized([recording.gathered(ours[1])])
        _compare(recording, func, values, inputs, ours[:1], dropped(named, mask))
    return results


# -- writing in place ---------------------------------------------------------------------------------------


def _compared_write(
    recording: Recorder, func: Any, args: tuple[Any, ...], kwargs: Any, dispatch: Dispatch
) -> Any:
    """Compare a tensor and its base after a write."""
    target = args[0] if args else None
    if not isinstance(target, VirtualTensor) or target.virtual.recording is not recording or "out" in kwargs:
        return dispatch(recording, func, args, kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags:  # a second draw would return other numbers
        return dispatch(recording, func, args, kwargs)
    before = current(recording, target)
    steps, storage = target.virtual.steps, target.virtual.storage
    base = storage.value
    arguments = recording.values(args[1:], kwargs)
    result = dispatch(recording, func, args, kwargs)
    values, inputs, (rest, new_kwargs) = _full_tensors(recording, arguments)
    (numbers,) = recording.materialized([recording.gathered(base)])
    # With the strides of the program's tensor, because `view` may raise for those of the gathered one.
    memory = torch.empty_strided(
        base.meta.shape, base.meta.stride(), dtype=numbers.dtype, device=numbers.device
    )
    with torch.no_grad(), lazy_conjugation():
        # detach() makes a new tensor object, because `squeeze_` changes the shape of its argument.
        real = memory.copy_(numbers).detach()
        for step in steps:
            real = step.func(real, *step.args, **step.kwargs)
        func(real, *rest, **new_kwargs)
    after = current(recording, target)
    _compare(recording, func, [before, *values], [numbers, *inputs], [after, storage.value], [real, memory])
    return result
