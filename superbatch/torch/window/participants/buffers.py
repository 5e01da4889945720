"""Copies of the models' buffers before a window: ``begin()``, then ``commit()`` or ``restore()``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from superbatch.torch.devices import copy_alike
from superbatch.torch.module_tables import buffers_of

from .kept_tensors import can_be_kept


class BufferKeeper:
    """Copies the buffers of models at the start of a window, so that a failed window can restore them.

    A large buffer that a window has not changed (a causal mask, a rotary table) is not copied again until its
    version counter changes. A copy in every window would take memory that a hand-written loop does not need.

    Attributes:
        owners: modules that have buffers.

    Examples:
        >>> norm = nn.BatchNorm1d(2)
        >>> keeper = BufferKeeper([norm])
        >>> keeper.begin()
        >>> _ = norm(torch.randn(4, 2))
        >>> keeper.restore()
        >>> norm.running_mean
        tensor([0., 0.])
    """

    # Buffers up to this size are always copied, because batch_norm changes running statistics without
    # increasing their version counter.
    ALWAYS_COPIED_BYTES = 1 << 20

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.owners: list[nn.Module] = []
        for model in models:
            self.add(model.modules())
        self._constant: dict[int, int] = {}
        self._copied: list[_Copied] = []

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Add modules, whose buffers are copied from the next `begin` on; each module is added once."""
        present = set(self.owners)
        self.owners += [module for module in modules if buffers_of(module) and module not in present]

    def begin(self) -> None:
        """Copy every buffer that may change; earlier copies are freed first."""
        self._copied = []
        if not self.owners:
            return
        found = [(module, *item) for module in self.owners for item in buffers_of(module).items()]
        copies = _clones([None if self._is_constant(buffer) else buffer for *_, buffer in found])
        self._copied = [_Copied(*one, copy) for one, copy in zip(found, copies, strict=True)]

    def commit(self) -> None:
        """Free the copies at the end of a window, and record the large buffers that it has not changed."""
        for module, name, buffer, copy in self._copied:
            if copy is None or buffer is None or buffer.nbytes <= self.ALWAYS_COPIED_BYTES:
                continue
            if buffers_of(module).get(name) is buffer and torch.equal(buffer, copy):
                self._constant[id(buffer)] = buffer._version
        self._copied = []

    def changed_floating(self) -> list[tuple[nn.Module, str]]:
        """Return the floating-point buffers that have changed since `begin`."""
        return [
            (module, name)
            for module, name, buffer, copy in self._copied
            if buffer is not None
            and copy is not None
            and buffer.is_floating_point()
            # Identity too, because `self.mean = new` assigns another tensor.
            and not (buffers_of(module).get(name) is buffer and torch.equal(buffer, copy))
        ]

    def changed(self) -> bool:
        """Return whether any buffer has changed since `begin`."""
        return any(
            buffers_of(module).get(name) is not buffer
            or (buffer is not None and copy is not None and not torch.equal(buffer, copy))
            or (buffer is not None and copy is None and not self._is_constant(buffer))
            for module, name, buffer, copy in self._copied
        )

    def restore(self) -> None:
        """Restore every buffer as it was at `begin`: the tensor object and its content."""
        for module, name, buffer, copy in self._copied:
            # In the table, because setattr checks types and may run the user's code.
            buffers_of(module)[name] = buffer
            if buffer is None or copy is None:
                continue
            # An inference tensor can be written only in inference mode.
            with torch.no_grad(), torch.inference_mode(buffer.is_inference()):
                if buffer.shape != copy.shape:  # e.g. a queue that grew by resize_
                    buffer.resize_(copy.shape)
                # Through an alias, so that no version counter changes.
                buffer.data.copy_(copy)

    def unrestorable(self) -> list[tuple[nn.Module, str]]:
        """Return the buffers that have changed since `begin` and were not copied."""
        return [
            (module, name)
            for module, name, buffer, copy in self._copied
            if buffer is not None and copy is None and not (is_lazy(buffer) or self._is_constant(buffer))
        ]

    def counters(self) -> list[int]:
        """Return the version counters of the buffers that were not copied."""
        return [buffer._version for buffer in self._uncopied()]

    def ignore_writes_since(self, before: list[int]) -> None:
        """Ignore writes since `counters` returned `before`: a check made them and restored the content."""
        for buffer, was in zip(self._uncopied(), before, strict=True):
            # Add the check's writes to the recorded counter.
            self._constant[id(buffer)] += buffer._version - was

    def _uncopied(self) -> list[Tensor]:
        found = (entry.buffer for entry in self._copied if entry.copy is None)
        return [buffer for buffer in found if buffer is not None and id(buffer) in self._constant]

    def covers(self) -> Callable[[Any, Tensor], bool]:
        """Return a function ``(object, tensor) -> bool``: object is a buffer, or tensor is in its memory."""
        buffers = [buffer for owner in self.owners for buffer in buffers_of(owner).values()]
        same = set(map(id, buffers))
        strided = [buffer for buffer in buffers if buffer is not None and can_be_kept(buffer)]
        sizes = {buffer.data_ptr(): buffer.nbytes for buffer in strided}
        # The copy of a buffer also restores views of the buffer.
        return lambda one, tensor: id(one) in same or tensor.nbytes <= sizes.get(tensor.data_ptr(), -1)

    def state(self) -> list[Tensor | None]:
        """Return the copies, in the order of the modules, with None for a buffer that was not copied."""
        return [entry.copy for entry in self._copied]

    def load_state(self, copies: list[Tensor | None]) -> None:
        """Replace the copies by those of `state`."""
        self._copied = [
            _Copied(entry.module, entry.name, entry.buffer, copy)
            for entry, copy in zip(self._copied, copies, strict=True)
        ]

    def _is_constant(self, buffer: Tensor | None) -> bool:
        return buffer is not None and self._constant.get(id(buffer)) == buffer._version


def _clones(buffers: list[Tensor | None]) -> list[Tensor | None]:
    """Return copies of buffers, made on an accelerator by one kernel for each device and dtype."""
    copies: list[Tensor | None] = []
    elsewhere: list[tuple[Tensor, Tensor]] = []
    for buffer in buffers:
        # A lazy buffer has no content before the first forward.
        if buffer is None or is_lazy(buffer):
            copies.append(None)
        # Only dense tensors on an accelerator are copied by one kernel.
        elif buffer.is_cpu or buffer.is_meta or buffer.layout is not torch.strided or buffer.requires_grad:
            copies.append(buffer.clone())
        else:
            empty = torch.empty_like(buffer)
            copies.append(empty)
            elsewhere.append((empty, buffer))
    if elsewhere:
        copy_alike([copy for copy, _ in elsewhere], [buffer for _, buffer in elsewhere])
    return copies


class _Copied(NamedTuple):
    module: nn.Module
    name: str
    buffer: Tensor | None
    copy: Tensor | None
