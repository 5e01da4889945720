"""Buffers of models as they were before a window: ``take()``, then ``release()`` or ``restore()``."""

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

    A large buffer that a whole window left alone (a causal mask, a rotary table) is not copied again until
    its version counter moves: copying it for every window would cost memory that the hand-written loop does
    not need.

    Attributes:
        owners: modules that have buffers.

    Examples:
        >>> norm = nn.BatchNorm1d(2)
        >>> keeper = BufferKeeper([norm])
        >>> keeper.take()
        >>> _ = norm(torch.randn(4, 2))
        >>> keeper.restore()
        >>> norm.running_mean
        tensor([0., 0.])
    """

    # Up to this size a copy costs nothing worth a thought. Running statistics must stay below it: torch's
    # batch_norm changes them without moving their version counter.
    ALWAYS_COPIED_BYTES = 1 << 20

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.owners: list[nn.Module] = []
        for model in models:
            self.add(model.modules())
        self._constant: dict[int, int] = {}
        self._taken: list[_Taken] = []

    # A twin finds modules later; the set makes adding O(modules) instead of quadratic.
    def add(self, modules: Iterable[nn.Module]) -> None:
        """Keep the buffers of further modules too, from the next `take` on; each module counts once."""
        known = set(self.owners)
        self.owners += [module for module in modules if buffers_of(module) and module not in known]

    def take(self) -> None:
        """Copy every buffer that may change; forgets the copies taken before, also where memory runs out."""
        self._taken = []
        if not self.owners:
            return
        found = [(module, *item) for module in self.owners for item in buffers_of(module).items()]
        copies = _clones([None if self._is_constant(buffer) else buffer for *_, buffer in found])
        self._taken = [_Taken(*one, copy) for one, copy in zip(found, copies, strict=True)]

    def release(self) -> None:
        """Drop the copies at the end of a window and note which large buffers it left alone."""
        for module, name, buffer, copy in self._taken:
            if copy is None or buffer is None or buffer.nbytes <= self.ALWAYS_COPIED_BYTES:
                continue
            # Unchanged over a whole window, e.g. a causal mask: not copied again until its counter moves.
            if buffers_of(module).get(name) is buffer and torch.equal(buffer, copy):
                self._constant[id(buffer)] = buffer._version
        self._taken = []

    def moved(self) -> list[tuple[nn.Module, str]]:
        """Return the floating-point buffers that are no longer as at `take`."""
        return [
            (module, name)
            for module, name, buffer, copy in self._taken
            if buffer is not None
            and copy is not None
            and buffer.is_floating_point()
            # Identity too: `self.mean = new` binds another tensor to the buffer's name.
            and not (buffers_of(module).get(name) is buffer and torch.equal(buffer, copy))
        ]

    def changed(self) -> bool:
        """Return whether any buffer is no longer as at `take`."""
        return any(
            buffers_of(module).get(name) is not buffer
            or (buffer is not None and copy is not None and not torch.equal(buffer, copy))
            or (buffer is not None and copy is None and not self._is_constant(buffer))
            for module, name, buffer, copy in self._taken
        )

    def restore(self) -> None:
        """Restore every buffer, its identity included, as it was at `take`."""
        for module, name, buffer, copy in self._taken:
            # By the table, not setattr: Module.__setattr__ checks types and runs user code.
            buffers_of(module)[name] = buffer
            if buffer is None or copy is None:
                continue
            # An inference tensor may be written in inference mode only.
            with torch.no_grad(), torch.inference_mode(buffer.is_inference()):
                if buffer.shape != copy.shape:  # e.g. a queue that grew by resize_
                    buffer.resize_(copy.shape)
                # Through an alias, which leaves the version counter of all that share the memory alone.
                buffer.data.copy_(copy)

    def lost(self) -> list[tuple[nn.Module, str]]:
        """Return the buffers that have moved since `take` and were not copied: `restore` leaves them."""
        return [
            (module, name)
            for module, name, buffer, copy in self._taken
            if buffer is not None and copy is None and not (is_lazy(buffer) or self._is_constant(buffer))
        ]

    def counters(self) -> list[int]:
        """Return the version counters of the buffers that were not copied."""
        return [buffer._version for buffer in self._uncopied()]

    def pass_over(self, before: list[int]) -> None:
        """Count what was written since `counters` returned `before` as not written: it was restored."""
        for buffer, was in zip(self._uncopied(), before, strict=True):
            # A check's write and its restore moved the counter by `buffer._version - was`; shift the note
            # alike.
            self._constant[id(buffer)] += buffer._version - was

    def _uncopied(self) -> list[Tensor]:
        found = (taken.buffer for taken in self._taken if taken.copy is None)
        return [buffer for buffer in found if buffer is not None and id(buffer) in self._constant]

    def covers(self) -> Callable[[Any, Tensor], bool]:
        """Return a function that tells whether an object is a buffer, or its strided tensor lies in one."""
        buffers = [buffer for owner in self.owners for buffer in buffers_of(owner).values()]
        same = set(map(id, buffers))
        strided = [buffer for buffer in buffers if buffer is not None and can_be_kept(buffer)]
        sizes = {buffer.data_ptr(): buffer.nbytes for buffer in strided}
        # An object may be a view of a buffer: the buffer's copy then restores it as well.
        return lambda one, tensor: id(one) in same or tensor.nbytes <= sizes.get(tensor.data_ptr(), -1)

    def state(self) -> list[Tensor | None]:
        """Return the copies taken, in the order of the modules (None for a buffer that was not copied)."""
        return [taken.copy for taken in self._taken]

    def load_state(self, copies: list[Tensor | None]) -> None:
        """Use copies from `state` in place of those taken."""
        self._taken = [
            _Taken(taken.module, taken.name, taken.buffer, copy)
            for taken, copy in zip(self._taken, copies, strict=True)
        ]

    def _is_constant(self, buffer: Tensor | None) -> bool:
        return buffer is not None and self._constant.get(id(buffer)) == buffer._version


def _clones(buffers: list[Tensor | None]) -> list[Tensor | None]:
    """Copy buffers: on an accelerator by one kernel for each device and dtype."""
    copies: list[Tensor | None] = []
    elsewhere: list[tuple[Tensor, Tensor]] = []
    for buffer in buffers:
        # Of a lazy module, before its first forward: there is nothing in it yet.
        if buffer is None or is_lazy(buffer):
            copies.append(None)
        # A foreach kernel needs dense accelerator tensors; others are cloned one by one.
        elif buffer.is_cpu or buffer.is_meta or buffer.layout is not torch.strided or buffer.requires_grad:
            copies.append(buffer.clone())
        else:
            empty = torch.empty_like(buffer)
            copies.append(empty)
            elsewhere.append((empty, buffer))
    if elsewhere:
        copy_alike([copy for copy, _ in elsewhere], [buffer for _, buffer in elsewhere])
    return copies


class _Taken(NamedTuple):
    module: nn.Module
    name: str
    buffer: Tensor | None
    copy: Tensor | None
