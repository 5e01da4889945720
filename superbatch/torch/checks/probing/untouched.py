"""Trial run of a model on working copies of its tensors, which restores the model bit for bit.

The data of every parameter and buffer is replaced by a copy, optionally in another dtype. Tensors that share
memory share it in the copies too. Afterwards each tensor gets its own storage back. The tensor objects stay
the same, so a `loss_fn` that closes over the model or a parameter uses the copies.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
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


class _Record(NamedTuple):
    tensor: Tensor
    data: Tensor
    gradient: Tensor | None
    requires_grad: bool


class PythonState:
    """Attributes, containers, generators and training flags of a model's modules.

    Tensors are recorded as objects; their data is not copied.

    Args:
        model: any module.

    Examples:
        >>> layer = nn.Linear(1, 1)
        >>> layer.calls = [1]
        >>> state = PythonState(layer)
        >>> layer.calls.append(2)
        >>> state.restore()
        >>> layer.calls
        [1]
    """

    def __init__(self, model: nn.Module) -> None:
        self._restorers = list(_restorers(model))

    def restore(self) -> None:
        """Restore the state that the modules had when this object was made."""
        for restore in self._restorers:
            restore()


@contextmanager
def untouched(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[Callable[[], None]]:
    """Run a model on working copies inside the context, and restore everything, also after an exception.

    Restored are:

    * parameters, buffers and other tensors of the modules (object, storage and bits), `.grad` and
      `requires_grad`;
    * training flags, Python attributes, containers and generators of the modules (`PythonState`);
    * the random state of torch (CPU and the model's devices), Python and NumPy.

    The caller restores state outside the modules.

    Args:
        model: model whose parameters get working copies; `.grad` is None inside.
        dtype: dtype of floating-point working copies (complex ones get the matching complex dtype); None
            keeps their own.

    Yields:
        Function without arguments that makes new working copies, to begin another pass from the same state.

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
    records, python = _records(model), PythonState(model)
    randomness = random_state({record.tensor.device for record in records})

    def reset() -> None:
        python.restore()
        _copy(records, dtype)

    try:
        # Eagerly: a compiled model would be compiled anew for the dtype of the copies.
        with run_eagerly():
            reset()
            yield reset
    finally:
        python.restore()
        _restore_tensors(records)
        restore_random_state(randomness)


def state_restorer(model: nn.Module) -> Callable[[], None]:
    """Record buffers, modes and attributes of modules; return a function that restores them.

    It does not change parameters and gradients.

    Examples:
        >>> norm = nn.BatchNorm1d(2)
        >>> restore = state_restorer(norm)
        >>> _ = norm(torch.randn(3, 2))
        >>> restore()
        >>> norm.num_batches_tracked
        tensor(0)
    """
    python = PythonState(model)
    # A plain tensor attribute is restored like a buffer, unless it requires a gradient: then it is a result.
    attributes = (value for module in model.modules() for value in _held(_attributes(module).values()))
    plain = (value for value in attributes if isinstance(value, Tensor) and not value.requires_grad)
    tensors = {id(tensor): tensor for tensor in (*model.buffers(), *plain)}
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]

    def restore() -> None:
        python.restore()
        with torch.no_grad():
            for tensor, content in copies:
                # A forward may have resized it, e.g. a cache.
                if tensor.shape != content.shape:
                    tensor.resize_(content.shape)
                tensor.copy_(content)

    return restore


def held_parameter(model: nn.Module) -> str | None:
    """Return the name of a parameter with autograd hooks that a temporary change of its dtype would remove.

    A change of the dtype makes autograd replace the AccumulateGrad node of a parameter, which holds the hooks
    by which DistributedDataParallel reduces gradients. Return None without one, or without a process group.

    Examples:
        >>> held_parameter(nn.Linear(1, 1)) is None
        True
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # Autograd makes a new node for each call unless another object, such as DDP, holds one: then the
            # mark is found again. (In torch's stub `metadata` is a method; it is a dict.)
            node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
            node.metadata["superbatch"] = True
            # Without another reference this frees the node and its metadata.
            del node
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            if node.metadata.pop("superbatch", False):
                return name
    return None


def seed_all(seed: int, model: nn.Module, *, host: int = 0) -> None:
    """Seed every generator that user code may draw from: torch on CPU and the model's devices, Python, NumPy.

    Args:
        seed: a non-negative integer.
        model: model whose devices are seeded; others are not, so that CUDA is not initialised needlessly.
        host: offset of the seed for Python and NumPy.

    Examples:
        >>> layer = nn.Linear(1, 1)
        >>> seed_all(0, layer)
        >>> first = torch.rand(())
        >>> seed_all(0, layer)
        >>> bool(first == torch.rand(()))
        True
    """
    # Not torch.manual_seed: it seeds every device.
    torch.default_generator.manual_seed(seed)
    random.seed(seed + host)
    # If NumPy is not imported yet, no code can draw from it.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed + host)
    for kind in {device.type for device in accelerators([model])}:
        module = module_of(torch.device(kind))
        seed_them = getattr(module, "manual_seed_all", None) or getattr(module, "manual_seed", None)
        if seed_them is not None:
            seed_them(seed)


def module_state(model: nn.Module) -> dict[str, Any]:
    """Return the state that a forward may change in modules: buffers and attributes, by path.

    Tensors are copied; of other objects only numbers, strings and None are included.

    Examples:
        >>> list(module_state(nn.BatchNorm1d(1)))[:3]
        ['running_mean', 'running_var', 'num_batches_tracked']
    """
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in (*buffers_of(module).items(), *_attributes(module).items()):
            where = f"{path}.{name}" if path else name
            if isinstance(value, Tensor):
                # A copy: a forward writes into its buffers in place.
                state[where] = value.detach().clone()
            elif value is None or isinstance(value, bool | int | float | str):
                state[where] = value
    return state


def changed_state(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the paths of the buffers and attributes that differ between two results of `module_state`.

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
        return bool(((a == b) | ((a != a) & (b != b))).all())  # NaN in both is equal
    return type(a) is type(b) and bool(a == b or a != a)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _INTERNAL}


def _records(model: nn.Module) -> list[_Record]:
    tensors: dict[int, Tensor] = {}
    for module in model.modules():
        tables = (parameters_of(module), buffers_of(module), _attributes(module))
        values = (value for table in tables for value in table.values())
        # By id: tied parameters are one tensor in several modules.
        tensors.update({id(value): value for value in values if isinstance(value, Tensor)})
    # Only leaves: reading `.grad` of another tensor warns.
    return [_Record(t, t.data, t.grad if t.is_leaf else None, t.requires_grad) for t in tensors.values()]


def _restorers(model: nn.Module) -> Iterator[Callable[[], object]]:
    """Yield functions that restore the Python state of the modules."""
    for module in model.modules():
        # Shallow: `_restore_tensors` restores the data of the tensors.
        for table in (parameters_of(module), buffers_of(module)):
            yield partial(_restore_container, table, dict(table))
        attributes = _attributes(module)
        for value in _held(attributes.values()):
            if type(value) in _CONTAINERS:
                yield partial(_restore_container, value, value.copy())
            elif (restore := generator_restorer(value)) is not None:
                yield restore
        yield partial(_restore_attributes, module, attributes)
        yield partial(setattr, module, "training", module.training)


def _restore_container(container: Any, content: Any) -> None:
    # In place, because other objects may refer to the container.
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(content)


def _restore_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    for added in _attributes(module).keys() - attributes.keys():
        del module.__dict__[added]
    module.__dict__.update(attributes)


def _held(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values and, at any depth, the content of built-in containers among them; each object once."""
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


def _copy(records: list[_Record], dtype: torch.dtype | None) -> None:
    storages: dict[tuple[Any, ...], Tensor] = {}
    for tensor, data, _, requires_grad in records:
        # First, because torch raises if the new data and the gradient have different dtypes.
        if tensor.is_leaf:
            tensor.grad = None
        tensor.data = _copied(data, dtype, storages)
        if tensor.is_leaf:
            tensor.requires_grad_(requires_grad)


def _copied(data: Tensor, dtype: torch.dtype | None, storages: dict[tuple[Any, ...], Tensor]) -> Tensor:
    wanted = as_dtype(data.dtype, dtype)
    if type(data) is not Tensor or data.layout is not torch.strided or data.device.type == "meta":
        return data.clone().to(wanted)
    # By storage, not by tensor: parameters that share memory must share it in the copies.
    key = (data.untyped_storage().data_ptr(), data.dtype, data.device)
    if data.numel() == 0:
        return data.clone().to(wanted)
    if key not in storages:
        # Copy the whole storage; the working copies are views of it, like the tensors.
        flat = torch.empty(0, dtype=data.dtype, device=data.device).set_(data.untyped_storage())
        storages[key] = flat.to(wanted, copy=True)
    return storages[key].as_strided(data.size(), data.stride(), data.storage_offset())


def as_dtype(given: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a tensor has after conversion of floating-point tensors to `wanted` (None: none).

    A complex dtype becomes the complex dtype of equal precision.

    Examples:
        >>> as_dtype(torch.float32, torch.float64), as_dtype(torch.int64, torch.float64)
        (torch.float64, torch.int64)
    """
    if wanted is None or not (given.is_floating_point or given.is_complex):
        return given
    return wanted.to_complex() if given.is_complex else wanted


def _restore_tensors(records: list[_Record]) -> None:
    for tensor, data, gradient, requires_grad in records:
        if tensor.is_leaf:
            tensor.grad = None  # or torch raises because its dtype differs from that of the data
        tensor.data = data
        if tensor.is_leaf:
            tensor.requires_grad_(requires_grad)
            tensor.grad = gradient
