"""Trial run of a model, which leaves it bit for bit as it was.

Every parameter and buffer gets a working copy of its data (tensors that share memory keep sharing it),
optionally in another dtype. Afterwards each tensor object has its own storage again, which nothing has
written to. The tensor objects stay the same, so that a `loss_fn` that closes over the model, or over a
parameter, sees the copies.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from superbatch.torch.devices import accelerators, module_of
from superbatch.torch.module_tables import buffers_of, parameters_of
from superbatch.torch.window.participants.snapshot import (
    generator_restorer,
    random_state,
    restore_random_state,
)

from ..introspection import run_eagerly

# Attributes of torch itself; all others in a module's `__dict__` are the user's.
_INTERNAL = frozenset(nn.Module().__dict__)
_CONTAINERS = (list, dict, set, deque)


class _Slot(NamedTuple):
    owner: Any  # a dict or other container whose content is restored in place; None: `content` does it
    content: Any


class _Kept(NamedTuple):
    tensor: Tensor
    data: Tensor
    gradient: Tensor | None
    requires_grad: bool


@contextmanager
def untouched(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[Callable[[], None]]:
    """Let the body run and convert a model, and restore everything afterwards, also after an exception.

    Restored are: parameters, buffers and other tensors of the modules (object, storage and bits), `.grad`,
    `requires_grad`, training flags, Python attributes, containers and generators of the modules, and the
    random state of torch (CPU and the model's devices), Python and NumPy. State outside the modules is the
    caller's.

    Args:
        model: its parameters get working copies; `.grad` is None inside.
        dtype: the dtype of floating-point working copies (complex ones get the matching complex dtype);
            None keeps their own.

    Yields:
        A function without arguments that makes the working copies anew, to begin another pass from the same
        state.

    Examples:
        >>> layer = nn.Linear(2, 1)
        >>> before = layer.weight.data_ptr()
        >>> with untouched(layer, dtype=torch.float64) as reset:
        ...     layer(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        ...     print(layer.weight.dtype, layer.weight.grad is not None)
        torch.float64 True
        >>> layer.weight.data_ptr() == before, layer.weight.dtype, layer.weight.grad
        (True, torch.float32, None)
    """
    tensors, slots = _kept(model), _slots(model)
    modes = [(module, module.training) for module in model.modules()]
    randomness = random_state({kept.tensor.device for kept in tensors})

    def reset() -> None:
        _restore_python(slots, modes)
        _copy(tensors, dtype)

    try:
        # Eagerly: compiled code would be compiled again for the copies' dtype.
        with run_eagerly():
            reset()
            yield reset
    finally:
        _restore_python(slots, modes)
        _restore_tensors(tensors)
        restore_random_state(randomness)


def state_restorer(model: nn.Module) -> Callable[[], None]:
    """Remember buffers, modes and plain attributes of modules, to begin several passes from the same state.

    Args:
        model: any module.

    Returns:
        A function that restores them, and leaves parameters and gradients alone.

    Examples:
        >>> norm = nn.BatchNorm1d(2)
        >>> restore = state_restorer(norm)
        >>> _ = norm(torch.randn(3, 2))
        >>> restore()
        >>> norm.num_batches_tracked
        tensor(0)
    """
    slots, modes = _slots(model), [(module, module.training) for module in model.modules()]
    # A plain tensor that a forward writes to is as good as a buffer; one with a gradient is a result.
    attributes = (value for module in model.modules() for value in _held(_attributes(module).values()))
    plain = (value for value in attributes if isinstance(value, Tensor) and not value.requires_grad)
    tensors = {id(tensor): tensor for tensor in (*model.buffers(), *plain)}
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]

    def restore() -> None:
        _restore_python(slots, modes)
        with torch.no_grad():
            for tensor, content in copies:
                # A forward may have made it longer, e.g. a cache.
                if tensor.shape != content.shape:
                    tensor.resize_(content.shape)
                tensor.copy_(content)

    return restore


def held_parameter(model: nn.Module) -> str | None:
    """A parameter whose dtype must not be changed, not even for a while, in a distributed program.

    A change of the dtype makes autograd replace the node of a parameter, and with it go the hooks by
    which DistributedDataParallel reduces gradients.

    Args:
        model: any module.

    Returns:
        The name of a parameter that autograd keeps for another user; None without one or a process group.

    Examples:
        >>> held_parameter(nn.Linear(1, 1)) is None
        True
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # The node is made for each call, unless it is held already, as by DDP: then the mark is
            # found. (The stub says that `metadata` is a method; it is a dict.)
            node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
            node.metadata["superbatch"] = True
            # Without another reference the node is freed, and its metadata with it.
            del node
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            if node.metadata.pop("superbatch", False):
                return name
    return None


def seed_all(seed: int, model: nn.Module, *, host: int = 0) -> None:
    """Seed every generator that user code may draw from: torch on CPU and the model's devices, Python, NumPy.

    Args:
        seed: a non-negative integer.
        model: names the devices; others are left alone, so that CUDA is not initialised for nothing.
        host: added to the seed for Python and NumPy.

    Examples:
        >>> layer = nn.Linear(1, 1)
        >>> seed_all(0, layer)
        >>> first = torch.rand(())
        >>> seed_all(0, layer)
        >>> bool(first == torch.rand(()))
        True
    """
    # Not torch.manual_seed, which seeds every device.
    torch.default_generator.manual_seed(seed)
    random.seed(seed + host)
    # Not imported for this: without it nobody draws from NumPy.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed + host)
    for kind in {device.type for device in accelerators([model])}:
        module = module_of(torch.device(kind))
        seed_them = getattr(module, "manual_seed_all", None) or getattr(module, "manual_seed", None)
        if seed_them is not None:
            seed_them(seed)


def module_state(model: nn.Module) -> dict[str, Any]:
    """Return the state that a forward could change in modules: copies of buffers and attributes, by path.

    Args:
        model: any module.

    Returns:
        Tensors as copies; numbers, strings and None as they are; other objects are left out.

    Examples:
        >>> list(module_state(nn.BatchNorm1d(1)))[:3]
        ['running_mean', 'running_var', 'num_batches_tracked']
    """
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in (*buffers_of(module).items(), *_attributes(module).items()):
            where = f"{path}.{name}" if path else name
            if isinstance(value, Tensor):
                # A copy, since a forward writes to its buffers in place.
                state[where] = value.detach().clone()
            elif value is None or isinstance(value, bool | int | float | str):
                state[where] = value
    return state


def changed_state(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Paths of the buffers and attributes that differ between two results of `module_state`.

    Args:
        before: the earlier state.
        after: the later state.

    Returns:
        The paths, in the order of the modules.

    Examples:
        >>> norm = nn.BatchNorm1d(2)
        >>> before = module_state(norm)
        >>> _ = norm(torch.randn(3, 2))
        >>> changed_state(before, module_state(norm))
        ['running_mean', 'running_var', 'num_batches_tracked']
    """
    return [path for path in after if path not in before or not _same(before[path], after[path])]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())  # a NaN that stays a NaN is no change
    return type(a) is type(b) and bool(a == b or a != a)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _INTERNAL}


def _kept(model: nn.Module) -> list[_Kept]:
    tensors: dict[int, Tensor] = {}
    for module in model.modules():
        tables = (parameters_of(module), buffers_of(module), _attributes(module))
        values = (value for table in tables for value in table.values())
        # By id: tied parameters are one tensor in several modules.
        tensors.update({id(value): value for value in values if isinstance(value, Tensor)})
    # `.grad` of a tensor that autograd made is not stored, and reading it warns.
    return [_Kept(t, t.data, t.grad if t.is_leaf else None, t.requires_grad) for t in tensors.values()]


def _slots(model: nn.Module) -> list[_Slot]:
    slots: list[_Slot] = []
    for module in model.modules():
        # Shallow: the tensors stay the same objects, and `_restore_tensors` restores their data.
        slots += [_Slot(table, dict(table)) for table in (parameters_of(module), buffers_of(module))]
        attributes = _attributes(module)
        for value in _held(attributes.values()):
            if type(value) in _CONTAINERS:
                slots.append(_Slot(value, value.copy()))
            elif (restore := generator_restorer(value)) is not None:
                slots.append(_Slot(None, restore))
        slots.append(_Slot(module, attributes))
    return slots


def _held(values: Iterable[Any]) -> Iterator[Any]:
    """The values, and those in built-in containers among them, however deep: each object once."""
    seen: set[int] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        # A container may contain itself.
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if type(value) in _CONTAINERS:
            waiting.extend(value.values() if isinstance(value, dict) else value)


def _restore_python(slots: list[_Slot], modes: list[tuple[nn.Module, bool]]) -> None:
    for owner, content in slots:
        if owner is None:
            content()
            continue
        if isinstance(owner, nn.Module):
            # Attributes that the body has added.
            for name in _attributes(owner).keys() - content.keys():
                del owner.__dict__[name]
            owner.__dict__.update(content)
            continue
        owner.clear()
        (owner.extend if isinstance(owner, list | deque) else owner.update)(content)
    for module, training in modes:
        module.training = training


def _copy(tensors: list[_Kept], dtype: torch.dtype | None) -> None:
    storages: dict[tuple[Any, ...], Tensor] = {}
    for tensor, data, _, requires_grad in tensors:
        # A gradient of another dtype does not allow the new data.
        if tensor.is_leaf:
            tensor.grad = None
        tensor.data = _copied(data, dtype, storages)
        if tensor.is_leaf:
            tensor.requires_grad_(requires_grad)


def _copied(data: Tensor, dtype: torch.dtype | None, storages: dict[tuple[Any, ...], Tensor]) -> Tensor:
    wanted = as_dtype(data.dtype, dtype)
    if type(data) is not Tensor or data.layout is not torch.strided or data.device.type == "meta":
        return data.clone().to(wanted)
    # By storage, not by tensor: parameters that are views of each other must stay so in the copies.
    key = (data.untyped_storage().data_ptr(), data.dtype, data.device)
    if data.numel() == 0:
        return data.clone().to(wanted)
    if key not in storages:
        # The whole storage; the copies are views of it, as the tensors were.
        flat = torch.empty(0, dtype=data.dtype, device=data.device).set_(data.untyped_storage())
        storages[key] = flat.to(wanted, copy=True)
    return storages[key].as_strided(data.size(), data.stride(), data.storage_offset())


def as_dtype(given: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype that a tensor of dtype `given` gets where floating-point tensors become `wanted`.

    Args:
        given: a tensor's dtype.
        wanted: a floating-point dtype, or None to leave every tensor as it is.

    Returns:
        `wanted` for a floating-point dtype, its complex companion for a complex one, else `given`.

    Examples:
        >>> as_dtype(torch.float32, torch.float64), as_dtype(torch.int64, torch.float64)
        (torch.float64, torch.int64)
    """
    if wanted is None or not (given.is_floating_point or given.is_complex):
        return given
    return wanted.to_complex() if given.is_complex else wanted


def _restore_tensors(tensors: list[_Kept]) -> None:
    for tensor, data, gradient, requires_grad in tensors:
        if tensor.is_leaf:
            tensor.grad = None  # a gradient of the working dtype would refuse the data's own dtype
        tensor.data = data
        if tensor.is_leaf:
            tensor.requires_grad_(requires_grad)
            tensor.grad = gradient
