"""Indices, masks and lengths of the host beside samples on an accelerator."""

from __future__ import annotations

from typing import Any

import torch

from ..ir.calls import mapped
from ..ir.recorder import Recorder
from ..ir.values import Value
from ..run.memo import KeyedCall

aten: Any = torch.ops.aten


def on_device(recording: Recorder, keyed: KeyedCall) -> KeyedCall | None:
    """Return the call with its indices, masks and lengths on the device; None if no argument is moved.

    torch accepts them on the host in ``x[mask]`` and ``ctc_loss``; the operators that these are made of here,
    such as ``index_select``, do not. Floating-point tensors stay where they are, so that the program gets
    the error of torch for a model or a batch on two devices.
    """

    def moved(value: Value) -> Value:
        return (
            recording.compute(aten._to_copy.default, (value,), {"device": device})
            if on_host(value)
            else value
        )

    def on_host(value: Value) -> bool:
        kind = value.meta.dtype
        full = value.shard is None and value.meta.dim() > 0  # torch accepts numbers on any device
        return full and value.device.type == "cpu" and not (kind.is_floating_point or kind.is_complex)

    device = next(value.device for value in keyed.tensors if value.shard is not None)
    if device.type == "cpu" or not any(map(on_host, keyed.tensors)):
        return None
    args = tuple(mapped(arg, moved, Value) for arg in keyed.args)
    kwargs = {name: mapped(arg, moved, Value) for name, arg in keyed.kwargs.items()}
    return KeyedCall(keyed.func, args, kwargs, keyed.samples)
