"""Restore everything that a survey changes, bit for bit, after an error too.

The state of each part is recorded *before* anything changes, and restored separately: an error in one part
does not prevent the others. Contents are copied into the tensors, so these remain the same objects.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from ..checks.probing.untouched import state_restorer
from ..window.participants.gradient_sum import ManagedParameter
from ..window.participants.snapshot import random_state, restore_random_state


@contextmanager
def restoring(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    scaler: Any = None,
    *,
    owned: Sequence[ManagedParameter] = (),
    devices: Iterable[torch.device] = (),
) -> Iterator[ExitStack]:
    """Run the body, then restore everything, also after an exception or Ctrl-C.

    Inside, the optimizers have no state (momentum and moments start at zero) and no parameter has a gradient.

    Args:
        models: models whose parameters, buffers, training modes and attributes are restored.
        optimizers: optimizers whose state, groups and parameters are restored.
        scaler: a GradScaler, or None.
        owned: managed parameters, whose masters are restored too.
        devices: devices whose random state is restored, besides those of the models.

    Yields:
        ExitStack to which the caller may add further functions; they run first.

    Examples:
        >>> layer = nn.Linear(2, 1)
        >>> before = layer.weight.detach().clone()
        >>> with restoring([layer], []):
        ...     _ = layer.weight.data.zero_()
        >>> bool((layer.weight == before).all())
        True
    """
    # Before anything changes: errors while recording are raised here.
    tensors = _tensors(models, optimizers, owned)
    undo = ExitStack()  # the first entry is restored last
    try:
        undo.callback(restore_random_state, random_state({*devices, *(t.device for t in tensors)}))
        for model in models:
            undo.callback(state_restorer(model))  # buffers, modes, attributes
        _keep_contents(tensors, undo)
        _remove_gradients(tensors, undo)
        if scaler is not None:
            _keep_attributes(scaler, undo)
        for optimizer in optimizers:
            _clear_state(optimizer, undo)
        yield undo
    # A second Ctrl-C must not interrupt this.
    finally:
        with _deferred_interrupts():
            undo.close()


@contextmanager
def _deferred_interrupts() -> Iterator[None]:
    """Defer Ctrl-C until the end of the body, because half-restored state would be inconsistent."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # no KeyboardInterrupt here: another thread, or SIGINT is ignored or handled by C code
        return
    # Recorded, and passed to the previous handler afterwards.
    pressed: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        before(*pressed[0])


def _tensors(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], owned: Sequence[ManagedParameter]
) -> list[Tensor]:
    # By id: a master or a tied weight is copied once.
    found = {id(p): p for model in models for p in model.parameters()}
    found |= {id(t): t for entry in owned for t in (entry.parameter, entry.target)}
    found |= {
        id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    }
    return list(found.values())


def _keep_contents(tensors: Sequence[Tensor], undo: ExitStack) -> None:
    # On the host, so that a survey fits on a device on which training fits.
    copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]

    def restore() -> None:
        with torch.no_grad():
            for tensor, content in zip(tensors, copies, strict=True):
                tensor.copy_(content)

    undo.callback(restore)


def _remove_gradients(tensors: Sequence[Tensor], undo: ExitStack) -> None:
    # Only leaves have a .grad.
    leaves = [tensor for tensor in tensors if tensor.is_leaf]
    gradients = [tensor.grad for tensor in leaves]

    def restore() -> None:
        for tensor, gradient in zip(leaves, gradients, strict=True):
            tensor.grad = gradient

    undo.callback(restore)
    for tensor in leaves:  # else a backward would add to the old gradient in place
        tensor.grad = None


def _clear_state(optimizer: Optimizer, undo: ExitStack) -> None:
    """Empty the state of an optimizer; the old state is restored unchanged."""
    # A shallow copy is enough: the old tensors are removed from the optimizer, so nothing writes them.
    state = dict(optimizer.state)
    _keep_attributes(optimizer, undo)
    for group in optimizer.param_groups:
        undo.callback(_set_content, group, dict(group))
        _keep_numbers(group, undo)
    undo.callback(_set_content, optimizer.state, state)
    optimizer.state.clear()
    if isinstance(optimizer, Adagrad):  # its constructor creates the state, which step() requires
        for tensor, values in state.items():
            start = torch.full_like(values["sum"], optimizer.defaults["initial_accumulator_value"])
            optimizer.state[tensor] = {"step": torch.zeros_like(values["step"]), "sum": start}


def _keep_attributes(thing: Any, undo: ExitStack) -> None:
    """Record the attributes of an object, and the content of tensors and dictionaries among them."""
    attributes = vars(thing)
    undo.callback(_set_content, attributes, dict(attributes))
    _keep_numbers(attributes, undo)
    for table in attributes.values():
        if isinstance(table, dict):
            for inner in table.values():
                if isinstance(inner, dict):  # a GradScaler's state per optimizer
                    undo.callback(_set_content, inner, dict(inner))
            undo.callback(_set_content, table, dict(table))


def _keep_numbers(table: Mapping[str, Any], undo: ExitStack) -> None:
    """Record the content of tensors, such as the rate of a captured optimizer, or the scale of a scaler."""
    for value in table.values():
        if isinstance(value, Tensor):
            undo.callback(value.copy_, value.clone())


def _set_content(table: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    table.clear()
    table.update(content)
