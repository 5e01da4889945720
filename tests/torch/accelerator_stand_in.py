"""Fake accelerator that computes on the CPU and records each transfer to the host.

``Elsewhere`` wraps a CPU tensor and reports a device whose type is neither "cpu" nor "meta". Like CUDA, it
refuses operators on CPU tensors beside its own, with few exceptions. Autograd, parameters, optimizers and
in-place operations work on it. Each operator that copies a value to the host is recorded in `READS`: a real
device would synchronize there. Storages are not emulated: a data pointer is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from superbatch.torch import devices

DEVICE = torch.device("lazy", 0)  # a device type that no test machine has

READS: list[str] = []
"""Operators that copied a value to the host, in call order."""

FLOAT64 = [True]
"""False emulates MPS, which has no float64."""

# As on CUDA: any operator reads a number on the CPU; these read whole tensors there, or their indices.
_READ_BOTH = {"copy", "copy_", "_to_copy"}
_READ_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}

_READING = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "allclose"}


class Elsewhere(Tensor):
    """Tensor that reports the device `DEVICE`."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        if held.dtype in (torch.float64, torch.complex128) and not FLOAT64[0]:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as MPS does not support float64.")
        return Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Elsewhere({self.held})"

    def tolist(self) -> Any:
        READS.append("tolist")
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.partition("::")[2]
        target = kwargs.get("device")
        to_host = target is not None and torch.device(target).type == "cpu"
        if name in _READING or (to_host and name == "_to_copy"):
            READS.append(name)
        _check_devices(name, args, kwargs)
        if target is not None:
            kwargs["device"] = "cpu"
        plain, plain_kwargs = tree_map(_inner, args), tree_map(_inner, kwargs)
        if name == "copy_" and not isinstance(args[0], Elsewhere):
            READS.append(name)
        found = func(*plain, **plain_kwargs)
        if to_host or (name == "copy_" and not isinstance(args[0], Elsewhere)):
            return args[0] if name == "copy_" else found
        return return_and_correct_aliasing(func, args, kwargs, tree_map(_outer, found))


def _check_devices(name: str, args: Any, kwargs: Any) -> None:
    """Raise the error of torch for a CPU tensor beside tensors of the device."""
    if name in _READ_INDICES:
        args = (args[0], *args[2:])
    tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
    here = [item for item in tensors if item.device.type == "cpu" and item.dim()]
    there = [item for item in tensors if isinstance(item, Elsewhere)]
    if here and there and name not in _READ_BOTH:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices in {name}"
        )


def _inner(item: Any) -> Any:
    return item.held if isinstance(item, Elsewhere) else item


def _outer(item: Any) -> Any:
    return Elsewhere(item) if isinstance(item, Tensor) and not isinstance(item, Elsewhere) else item


class _Factories(TorchDispatchMode):
    """Redirect tensor factories from `DEVICE` to the CPU, and wrap their results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is None or torch.device(device).type != DEVICE.type:
            return func(*args, **kwargs)
        kwargs["device"] = "cpu"
        return tree_map(_outer, func(*tree_map(_inner, args), **tree_map(_inner, kwargs)))


@contextmanager
def made_in_operators() -> Iterator[None]:
    """Allow operators to make tensors on `DEVICE` too, where `_Factories` is not active."""

    def empty(size: Any, **options: Any) -> Tensor:
        return Elsewhere(torch.empty(size, dtype=options["dtype"]))

    with torch.library._scoped_library("aten", "IMPL") as kernels:
        kernels.impl("empty.memory_format", empty, "Lazy")
        yield


@contextmanager
def stand_in(*, float64: bool = True) -> Iterator[None]:
    """Allow tensors on `DEVICE` inside the context."""
    before, FLOAT64[0] = FLOAT64[0], float64
    READS.clear()
    known = set(devices.NO_FLOAT64)
    if not float64:
        devices.NO_FLOAT64.add(DEVICE.type)
    try:
        with _Factories():
            yield
    finally:
        FLOAT64[0] = before
        devices.NO_FLOAT64.intersection_update(known)


def elsewhere(model: nn.Module) -> nn.Module:
    """Move a module's parameters and buffers to `DEVICE`, in place."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                moved = nn.Parameter(Elsewhere(parameter.detach().clone()), parameter.requires_grad)
                module._parameters[name] = moved
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = Elsewhere(buffer.clone())
    return model
