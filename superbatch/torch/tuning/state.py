"""Change everything that training changes, for a survey, and restore it bit for bit, whatever happens.

Each part notes what it will restore *before* anything is changed, and is restored by itself: an error in
one leaves no other behind. Tensors keep their identity: contents are copied back into them.
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
def put_back(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    scaler: Any = None,
    *,
    owned: Sequence[ManagedParameter] = (),
    devices: Iterable[torch.device] = (),
) -> Iterator[ExitStack]:
    """Run the body, then restore everything as it was, also after an exception or Ctrl-C.

    Inside, the optimizers have no state (momentum and moments start fresh) and no parameter has a gradient.

    Args:
        models: parameters, buffers, training modes, attributes.
        optimizers: state and groups; their own parameters too.
        scaler: a GradScaler, or None.
        owned: parameters with their masters.
        devices: whose random state is kept, beside that of the models' devices.

    Yields:
        What is closed in the end, for more to be restored.

    Examples:
        >>> layer = nn.Linear(2, 1)
        >>> before = layer.weight.detach().clone()
        >>> with put_back([layer], []):
        ...     _ = layer.weight.data.zero_()
        >>> bool((layer.weight == before).all())
        True
    """
    # Before anything changes: whatever cannot be recorded raises here.
    tensors = _tensors(models, optimizers, owned)
    undo = ExitStack()  # what is noted first is restored last
    try:
        undo.callback(restore_random_state, random_state({*devices, *(t.device for t in tensors)}))
        for model in models:
            undo.callback(state_restorer(model))  # buffers, modes, attributes
        _keep_contents(tensors, undo)
        _set_gradients_aside(tensors, undo)
        if scaler is not None:
            _keep_attributes(scaler, undo)
        for optimizer in optimizers:
            _begin_afresh(optimizer, undo)
        yield undo
    # Restoring runs to its end: a second Ctrl-C waits.
    finally:
        with _interrupts_wait():
            undo.close()


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C wait until the body is done: half of what was restored would be worse than nothing."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # other threads are not interrupted; where nobody listens, or C code does, nothing is raised
        return
    # Noted and raised afterwards, by the handler that was there.
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
    # On the host, where there is one beside the device: a survey should fit where training fits.
    copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]

    def restore() -> None:
        with torch.no_grad():
            for tensor, kept in zip(tensors, copies, strict=True):
                tensor.copy_(kept)

    undo.callback(restore)


def _set_gradients_aside(tensors: Sequence[Tensor], undo: ExitStack) -> None:
    # Only leaves have a .grad of their own.
    leaves = [tensor for tensor in tensors if tensor.is_leaf]
    gradients = [tensor.grad for tensor in leaves]

    def restore() -> None:
        for tensor, gradient in zip(leaves, gradients, strict=True):
            tensor.grad = gradient

    undo.callback(restore)
    for tensor in leaves:  # a backward would add to what is there, in place
        tensor.grad = None


def _begin_afresh(optimizer: Optimizer, undo: ExitStack) -> None:
    """Empty the state of an optimizer; what comes back is the old one, which nothing has touched."""
    # A shallow copy: the old tensors are not written, for they are taken out.
    state = dict(optimizer.state)
    _keep_attributes(optimizer, undo)
    for group in optimizer.param_groups:
        undo.callback(_as_it_was, group, dict(group))
        _keep_numbers(group, undo)
    undo.callback(_as_it_was, optimizer.state, state)
    optimizer.state.clear()
    if isinstance(optimizer, Adagrad):  # makes its state when it is made, and cannot do without
        for tensor, values in state.items():
            start = torch.full_like(values["sum"], optimizer.defaults["initial_accumulator_value"])
            optimizer.state[tensor] = {"step": torch.zeros_like(values["step"]), "sum": start}


def _keep_attributes(thing: Any, undo: ExitStack) -> None:
    """Attributes of an object, and the content of the tensors and dictionaries among them."""
    attributes = vars(thing)
    undo.callback(_as_it_was, attributes, dict(attributes))
    _keep_numbers(attributes, undo)
    for table in attributes.values():
        if isinstance(table, dict):
            for inner in table.values():
                if isinstance(inner, dict):  # what a scaler knows of each optimizer
                    undo.callback(_as_it_was, inner, dict(inner))
            undo.callback(_as_it_was, table, dict(table))


def _keep_numbers(table: Mapping[str, Any], undo: ExitStack) -> None:
    """The content of tensors: a rate that a captured optimizer holds on to, a scale."""
    for value in table.values():
        if isinstance(value, Tensor):
            undo.callback(value.copy_, value.clone())


def _as_it_was(table: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    table.clear()
    table.update(content)
