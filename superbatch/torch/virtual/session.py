"""Session of one `virtual_batch` block: from its first batch to the real gradients at its end.

Invariants: after the block no parameter, buffer or leaf has a virtual gradient or memory; after an exception
gradients and memory are as before the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.batch.tree import count_samples, map_arrays, map_leaves
from superbatch.errors import InputError, WindowError
from superbatch.results.coupling import CouplingReport

from ..module_tables import buffers_of, parameters_of
from .options import Options
from .ranks.reducer import RankReducer
from .run.log import Log, paths
from .run.store import Store
from .trace.aliases import current
from .trace.entering import entered
from .trace.leaves import Leaves
from .trace.randomness import Randomness
from .trace.recording import Recording
from .trace.tensor import VirtualTensor, is_hollow, refuse_hollow
from .trace.unsupported import refuse_nested


class Session:
    """Recording of a block, and the state of the models before and after it.

    Args:
        models: models whose parameters get gradients.
        options: options of `virtual_batch`.

    Attributes:
        recording: the recording; None before the first batch.
        log: log of the block.
        across: reductions over the ranks.
    """

    def __init__(self, models: Sequence[nn.Module], options: Options) -> None:
        self._options = options
        self._models = models
        self.recording: Recording | None = None
        self.log = Log(models, options.on_gather)
        modules = [module for model in models for module in paths(model)]
        self.across = RankReducer(models, modules, options.group, options.device, reduces=options.reduces)
        parameters = dict.fromkeys(p for one in modules for p in parameters_of(one).values() if p is not None)
        buffers = [b for one in modules for b in buffers_of(one).values() if b is not None]
        self._gradients = [(p, p.grad) for p in parameters]
        self._added_to = self._gradients
        self._written: dict[Tensor, Tensor] = {}  # gradients written before the first batch, with copies
        self._over = False
        # `.data` now: an in-block `parameter.data = virtual` is undone with it after a failure.
        self._memory = [(tensor, tensor.data) for tensor in (*parameters, *buffers)]

    def enter(self, batch: Any) -> Any:
        """Return the batch with virtual tensors in place of its tensors."""
        if self._over:
            raise WindowError(
                "batch() was called after its `with virtual_batch(...)` block. "
                "Call it, the forward and backward() inside the block."
            )
        # Counted on the host, on every call: nothing is recorded for a batch that does not fit the block.
        samples = count_samples(map_leaves(refuse_nested, batch))
        if self.recording is None:
            self.recording = self._begin(samples)
        recording = self.recording
        if samples != recording.samples:
            raise InputError(
                f"batch() was called with {samples} samples after {recording.samples} samples in the same "
                "block. Use one block for each batch."
            )
        return map_arrays(
            lambda leaf: entered(leaf, recording) if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch
        )

    def report(self) -> CouplingReport:
        """Return a report on the block so far."""
        recording = self.recording
        if recording is None:
            return self.log.report(0, 0)
        return self.log.report(recording.samples, len(recording.parts), recording.store)

    def _begin(self, samples: int) -> Recording:
        options = self._options
        self.log.is_split = options.size == "auto" or options.size < samples
        recording = Recording(
            samples,
            options.size,
            options.device,
            randomness=Randomness(options.rng),
            store=Store(options.device, options.device_budget),
            log=self.log,
            paranoid=options.paranoid,
            compile=options.compile,
        )
        recording.across = self.across
        # Read again: the program may have called zero_grad() since the block began.
        self._added_to = [(parameter, parameter.grad) for parameter, _ in self._gradients]
        for parameter, _ in self._added_to:
            recording.note_leaf(parameter)  # before the forward, while the gradients are still real
        return recording

    def settle(self) -> None:
        """Compute the values that the program may still read, and set real gradients."""
        recording = self.recording
        self.across.ending = True
        if recording is not None:
            recording.end()
        self.across.catch_up()  # recorded collectives come before those of the gradients, on every rank
        virtual = [isinstance(parameter.grad, VirtualTensor) for parameter, _ in self._added_to]
        mine = [_numbers(parameter.grad) for parameter, _ in self._added_to]
        # Before any gradient is set: a rank that fails here leaves all of them as before the block.
        means = self.across.mean([parameter for parameter, _ in self._added_to], mine)
        for (parameter, old), was_virtual, one, new in zip(self._added_to, virtual, mine, means, strict=True):
            if not was_virtual and new is one:  # the block did not touch this gradient
                continue
            _put(parameter, old, new)
        for tensor, _ in self._memory:  # `.data = virtual` dispatches nothing, so it is found only here
            refuse_hollow(tensor)
        if recording is not None:
            _leave_leaves_real(recording)
            self.across.scatter()  # FSDP2: after all gradients are real, because it reduces them into shards
            for model in self._models:
                _leave_real(paths(model), recording)

    def before_the_batch(self, written: Iterable[Tensor]) -> None:
        """Copy gradients that are written before the first batch (zero_grad), to restore them on failure."""
        for tensor in written:
            if tensor not in self._written and any(tensor is grad for _, grad in self._gradients):
                self._written[tensor] = tensor.clone()

    def end(self, *, failed: bool) -> None:
        """Free the recording; after a failure, restore memory and gradients."""
        self._over = True
        memory, self._memory = self._memory, []
        if failed:
            for tensor, before in memory:
                # Only these: a parameter that the block wrote keeps its new numbers (see `virtual_batch`).
                if is_hollow(tensor):
                    tensor.data = before
        leaves = Leaves() if self.recording is None else self.recording.leaves
        if self.recording is not None:
            self.recording.open = False  # from here virtual tensors return computed numbers, or raise
        if failed:
            for tensor, grad in (*leaves.had.values(), *self._gradients):
                tensor.grad = grad
            with torch.no_grad():
                for grad, before in self._written.items():
                    grad.copy_(before)
        leaves.clear()
        self._written.clear()


def _numbers(grad: Tensor | None) -> Tensor | None:
    return grad.virtual.recording.numbers(grad).detach() if isinstance(grad, VirtualTensor) else grad


def _put(leaf: Tensor, old: Tensor | None, new: Tensor | None) -> None:
    """Set a gradient; an existing gradient tensor is updated in place and keeps its identity."""
    # In place, like autograd: an optimizer or a bucket view (DDP) may hold the old tensor.
    if old is not None and new is not None and old.layout is new.layout is torch.strided:
        new = old if new.data_ptr() == old.data_ptr() else old.copy_(new)
    leaf.grad = None
    leaf.grad = new


def _leave_leaves_real(recording: Recording) -> None:
    """Set real gradients of leaves that are no parameters of the models, e.g. of a loss."""
    for leaf, old in recording.leaves.had.values():
        if isinstance(leaf.grad, VirtualTensor):
            _put(leaf, old, _numbers(leaf.grad))


def _leave_real(modules: Iterable[nn.Module], recording: Recording) -> None:
    """Replace virtual tensors that a forward stored in a module by real ones, if they are full."""
    for module in modules:
        buffers = buffers_of(module)
        for owned in (buffers, module.__dict__):
            found = [(name, item) for name, item in list(owned.items()) if isinstance(item, VirtualTensor)]
            for name, item in found:
                if item.virtual.recording is not recording:
                    continue
                # A sharded attribute stays virtual: gathering it would take the memory of the whole batch.
                if owned is buffers or current(recording, item).shard is None:
                    owned[name] = recording.numbers(item).detach()
